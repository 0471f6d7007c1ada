"""The scales of FP8 in TensorRT-LLM's checkpoints, from the statistics of a calibration.

    X.weight                          float8_e4m3fn: value / scale in float32, to nearest even. An hf output rounds the
                                      quotient to the dtype of the weights first, so that some codes differ
    X.weights_scaling_factor [1]      float32 = amax / 448 of the whole matrix, over all ranks;
                                      q, k and v share the largest, and gate and up do too
    X.activation_scaling_factor [1]   float32 = amax / 448 of the inputs

Embeddings, head, norms and biases stay as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from formats.lazy_numpy import np
from formats.tensor import Box
from megaconv.huggingface.modules import modules_of
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.options import FP8
from megaconv.trtllm.stored_scales import INPUTS_SCALE, WEIGHTS_SCALE
from megaconv.values.calibration import INPUT_AMAX, Calibration
from megaconv.values.forms import Constant, Form, Scaling
from megaconv.values.fp8_blocks import LARGEST
from megaconv.values.quantizing import SCALE

INPUT_SCALE = "input_scale"
"""The last part of the canonical name of a scale of inputs."""
_JOINED = {"fc": "fc_gate", "gate": "fc_gate"}
"""Matrices that share a scale: the last part of a module's name -> a name for them."""


@dataclass(frozen=True)
class Fp8Forms:
    """The forms of all quantized matrices."""

    header: Header
    calibration: Calibration

    def of(self, natives: Sequence[NativeTensor]) -> dict[Key, Form]:
        """natives: the unsharded tensors. Raises TensorMismatch for a missing statistic."""
        found: dict[Key, Form] = {}
        for native in natives:
            if is_linear(native):
                found |= self._of(native)
        return found

    def _of(self, native: NativeTensor) -> dict[Key, Form]:
        joined = _shares_with(native.name)
        first, *others = (Key(name) for name in native.parts)
        constants = {INPUT_SCALE: _scale_of(self._input_amax(native))}
        scaling = Scaling(constants=constants, rounds_quotients=False)
        found = {first: Form(FP8, 0, joined, brings_scale_2=True, scaling=scaling)}
        without = Scaling(rounds_quotients=False)
        return found | {key: Form(FP8, 0, joined, scaling=without) for key in others}

    def _input_amax(self, native: NativeTensor) -> float:
        """The largest input of the Hugging Face model's matrices that this matrix consists of."""
        modules = {self._modules[name] for name in native.parts}
        return max(self.calibration.number(module, INPUT_AMAX) for module in modules)

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        return modules_of(self.header.config)


def is_linear(native: NativeTensor) -> bool:
    """True for a matrix of attention or of an MLP."""
    return len(native.shape) == 2 and ".layers." in native.name


def with_scales(native: NativeTensor, header: Header) -> Iterator[NativeTensor]:
    """A rank's tensor, followed by its scales if it is quantized. header: header of the stored tensors."""
    yield native
    first = next(iter(native.parts))
    if Key(first + SCALE) not in header.manifest:
        return
    module = native.name.removesuffix(".weight")
    beside = f"{first.removesuffix('.weight')}.{INPUT_SCALE}"
    names = {INPUTS_SCALE: beside, WEIGHTS_SCALE: first + SCALE}
    for name, canonical in names.items():
        one = Region(Box(0, 1, 0, 1), 0)
        yield NativeTensor(f"{module}.{name}", {canonical: (one,)}, (1,))


def _shares_with(name: str) -> str:
    """A name that is equal for all matrices that share a scale."""
    path, _, kind = name.removesuffix(".weight").rpartition(".")
    return f"{path}.{_JOINED.get(kind, kind)}"


def _scale_of(amax: float) -> Constant:
    """amax / 448; 1 for inputs of zero only."""
    scale = np.float32(amax) / np.float32(LARGEST) or np.float32(1)
    return Constant(np.array([[scale]], np.float32).view(np.uint8), (), "float32")
