"""The training state of a source that torch's Adam trained, as a conversion streams it."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from formats.tensor import LazyTensor
from megaconv.errors import UnsupportedInput
from megaconv.families import Family
from megaconv.model.config import ModelConfig
from megaconv.model.naming import HF, HF_STACKED, Naming
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megaconv.model.training import MASTER
from megaconv.values.cast import FLOATS, CastTensor

_UNTRAINED = re.compile(r".*(?:\.router\.bias|\blayers\.\d+\.scale|\.act\.(?:beta|eps))")
"""The names of tensors that no optimizer trains: biases that balance the load of experts, and numbers that are buffers in
transformers (Gemma 4's scale of a layer, beta and eps of Apertus's activation)."""


@dataclass(frozen=True)
class Parameters:
    """The tensors of a module, under the names of a source."""

    natives: Mapping[str, NativeTensor]
    """Every tensor that the module may have. A tied head is none of its own."""
    copies: Collection[str] = ()
    """The names of tied heads and other duplicate tensors."""

    @staticmethod
    def of(family: Family, config: ModelConfig, namings: Iterable[Naming] = (HF, HF_STACKED)) -> "Parameters":  # fmt: skip
        found: dict[str, NativeTensor] = {}
        copies = set[str]()
        for naming in namings:
            for native in unsharded_tensors(family.rows, config, naming):
                if native.copy is None:
                    found[native.name] = native
                else:
                    copies.add(native.name)
        return Parameters(found, copies)

    def frozen(self, names: Iterable[str], trained: Collection[str]) -> list[str]:
        """Those of the module's tensors that could be trained, and aren't."""
        return [name for name in names if name not in trained and self._is_trainable(name)]

    def _is_trainable(self, name: str) -> bool:
        native = self.natives.get(name)
        return native is not None and not all(map(_UNTRAINED.fullmatch, native.parts))

    def by_canonical(
        self, groups: Iterable[Mapping[str, Any]], group_of: Mapping[str, int]
    ) -> dict[str, Mapping[str, Any]]:
        """Canonical name of each trained tensor -> its group. group_of: name in the module -> index of its group."""
        listed = list(groups)
        return {
            part: listed[group_of[name]]
            for name, native in self.natives.items()
            if name in group_of
            for part in native.parts
        }


def with_masters(
    weights: Mapping[str, LazyTensor], slots: Mapping[str, Mapping[str, LazyTensor]]
) -> dict[str, Mapping[str, LazyTensor]]:
    """The slots in fp32. A 16-bit weight that the optimizer trained itself is its own master, in fp32."""
    found: dict[str, Mapping[str, LazyTensor]] = {}
    trained = {name for held in slots.values() for name in held}
    in_16_bits = {name: weights[name] for name in trained if weights[name].dtype != "float32"}
    if in_16_bits:
        found[MASTER] = {name: in_fp32(tensor, name) for name, tensor in in_16_bits.items()}
    for slot, held in slots.items():
        found[slot] = {name: in_fp32(tensor, name) for name, tensor in held.items()}
    return found


def in_fp32(tensor: LazyTensor, name: str) -> LazyTensor:
    """The tensor in fp32, which every 16-bit dtype fits into. Raises UnsupportedInput for numbers that aren't floats."""
    if tensor.dtype == "float32":
        return tensor
    if tensor.dtype not in FLOATS:
        raise UnsupportedInput(
            f"{name}: an optimizer's state in {tensor.dtype} is not supported; --no-optimizer converts the weights alone"
        )
    return CastTensor(tensor, "float32", name, overflow=False)
