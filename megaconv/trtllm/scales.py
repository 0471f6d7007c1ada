"""The scales of FP8 in TensorRT-LLM's checkpoints, from the statistics of a calibration.

    X.weight                          float8_e4m3fn: value / scale in float32, to nearest even. An hf output rounds the
                                      quotient to the dtype of the weights first, so that some codes differ
    X.weights_scaling_factor [1]      float32 = amax / 448 of the whole matrix, over all ranks;
                                      q, k and v share the largest, and gate and up do too
    X.activation_scaling_factor [1]   float32 = amax / 448 of the inputs

Embeddings, head, norms and biases stay as they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from formats.lazy_numpy import np
from formats.tensor import Box, LazyTensor, matrix_shape, reshaped
from megaconv.errors import TensorMismatch
from megaconv.huggingface.modules import modules_of
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.options import FP8
from megaconv.values.calibration import INPUT_AMAX, Calibration
from megaconv.values.cast import CastTensor
from megaconv.values.code_tensors import READ_AS
from megaconv.values.forms import Constant, Form, Scaling
from megaconv.values.fp8_blocks import LARGEST
from megaconv.values.quantizing import SCALE
from megaconv.values.scaled import ScaledTensor

INPUT_SCALE = "input_scale"
"""The last part of the canonical name of a scale of inputs."""
INPUTS_SCALE, WEIGHTS_SCALE = "activation_scaling_factor", "weights_scaling_factor"
_OF_ACTIVATIONS = (INPUTS_SCALE, "kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor")
"""The last parts of the names of scales that belong to no weight."""
CODES = "float8_e4m3fn"
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


def dequantized(
    tensors: Mapping[str, LazyTensor], where: str, dtype: str = READ_AS
) -> dict[str, LazyTensor]:
    """The tensors of a rank, with plain values of this dtype for matrices in FP8, without scales of weights.

    where: the file, for messages. Raises TensorMismatch for a scale that is missing or doesn't fit.
    """
    scales = set(_scales_of_weights(tensors))
    plain = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name, tensor in plain.items():
        if tensor.dtype == CODES:
            plain[name] = _plain(name, tensors, where, dtype)
    return plain


def scales_of_activations(names: Iterable[str]) -> set[str]:
    """The names of the scales that belong to no weight. Plain weights may have those of a quantized cache."""
    return {name for name in names if name.rpartition(".")[2] in _OF_ACTIVATIONS}


def _scales_of_weights(tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
    """Yield the scales whose weight is there."""
    for name in tensors:
        module, _, last = name.rpartition(".")
        if last == WEIGHTS_SCALE and f"{module}.weight" in tensors:
            yield name


def _plain(name: str, tensors: Mapping[str, LazyTensor], where: str, dtype: str) -> LazyTensor:
    stored = tensors[name]
    scale_name = f"{name.removesuffix('.weight')}.{WEIGHTS_SCALE}"
    scale = tensors.get(scale_name)
    if scale is None:
        raise TensorMismatch(
            f"{where}: {name} is {CODES}, and there is no {scale_name}", code="missing-tensor"
        )
    if len(stored.shape) != 2 or prod(scale.shape) != 1 or scale.dtype != "float32":
        raise TensorMismatch(
            f"{where}: {name} is {list(stored.shape)} with scales {list(scale.shape)} {scale.dtype}; "
            "expected a matrix with one float32",
            code="misshapen-tensor",
        )
    read_as = "float32" if dtype == "float16" else dtype
    values = ScaledTensor(stored, reshaped(scale, (1, 1)), matrix_shape(stored.shape), read_as)
    return values if read_as == dtype else CastTensor(values, dtype, name, overflow=False)


def _shares_with(name: str) -> str:
    """A name that is equal for all matrices that share a scale."""
    path, _, kind = name.removesuffix(".weight").rpartition(".")
    return f"{path}.{_JOINED.get(kind, kind)}"


def _scale_of(amax: float) -> Constant:
    """amax / 448; 1 for inputs of zero only."""
    scale = np.float32(amax) / np.float32(LARGEST) or np.float32(1)
    return Constant(np.array([[scale]], np.float32).view(np.uint8), (), "float32")
