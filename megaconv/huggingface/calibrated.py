"""Scales of activations for the matrices of a quantized Hugging Face output, from the statistics of a calibration.

    fp8         input_scale = amax / 448
    int8-sq     pre_quant_scale = 1 / the amax of each column, between 1e-4 and 1e4; 1 for a column of zeros;
                input_scale = amax of the scaled inputs / 127
    int4-awq    pre_quant_scale = 1 / awq_scale; matrices with the same inputs share the mean of theirs
    w4a8-awq    the same, and input_scale = amax of the scaled inputs / 448
    --kv-cache  k_scale and v_scale = amax / 448

The columns of a weight are divided by its pre_quant_scale. AWQ multiplies the norm before q, k and v, or before gate and
up, with their pre_quant_scale instead of storing it. Source: model_calib.py and quant_utils.py of ModelOpt 0.47.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from formats.lazy_numpy import Floats, np
from megaconv.errors import NotExpressible
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor
from megaconv.options import FP8, INT4_AWQ, INT8_SQ, W4A8_AWQ
from megaconv.values.calibration import (
    AWQ_SCALE,
    CHANNEL_AMAX,
    INPUT_AMAX,
    K_AMAX,
    V_AMAX,
    Calibration,
)
from megaconv.values.forms import FOLDED, Constant, Form, Scaling, Step
from megaconv.values.fp8_blocks import LARGEST
from megaconv.values.rounding import rounded
from megaconv.values.smoothed import round_to

INPUT_SCALE, PRE_QUANT_SCALE, K_SCALE, V_SCALE = CONSTANTS = (
    "input_scale", "pre_quant_scale", "k_scale", "v_scale",
)  # fmt: skip
"""The last parts of the names of the tensors that are stored beside a weight and come from a calibration."""
AWQ = (INT4_AWQ, W4A8_AWQ)
_LEAST, _MOST = 1e-4, 1e4
_LEAST_AWQ_SCALE = 1e-8
_UNSEEN = 2.0**-31
"""A column with a smaller amax was never used."""
_INPUTS = {
    **dict.fromkeys(("q", "k", "v"), "qkv"),
    **dict.fromkeys(("gate", "up"), "gate_up"),
}
"""Weights with the same inputs: the last part of a weight's name -> a name for these inputs."""
_NORM_OF = {"attn.qkv": "input_norm", "mlp.gate_up": "mlp_norm"}
"""Inputs of matrices -> the norm that makes them, in a layer with norms before its sublayers."""
_BEHIND = (".q_norm.weight", ".k_norm.weight", ".o.weight", ".down.weight")
"""Ends of the names of weights in a sublayer that don't use the output of the norm before the sublayer."""
_CACHED = ((".attn.k.weight", K_SCALE, K_AMAX), (".attn.v.weight", V_SCALE, V_AMAX))
"""Weights that make keys and values -> the scale that is stored beside them, and its statistic."""


class Smoothing(NamedTuple):
    """The factors of a matrix's inputs."""

    own: Floats
    """The matrix's own pre_quant_scale [in], before it is rounded."""
    shared: Floats
    """The pre_quant_scale [in] that all matrices with the same inputs have, in the dtype of the weights."""


@dataclass(frozen=True)
class Calibrated:
    """Matrices to be quantized, and the statistics of their inputs."""

    natives: Sequence[NativeTensor]
    header: Header
    kind: str
    """The quantization."""
    calibration: Calibration

    def dtype(self, native: NativeTensor) -> str:
        return self.header.manifest[Key(first_part(native))].dtype

    def channels(self, native: NativeTensor, statistic: str) -> Floats:
        """A statistic with a number for each column of a matrix."""
        return self.calibration.vector(module_of(native), statistic, native.shape[1])

    def own_factors(self, native: NativeTensor) -> Floats:
        """A matrix's own pre_quant_scale [in], float32."""
        if self.kind != INT8_SQ:
            scale = self.channels(native, AWQ_SCALE).clip(np.float32(_LEAST_AWQ_SCALE))
            inverse: Floats = (np.float32(1) / scale).astype(np.float32)
            return inverse
        amax = self.channels(native, CHANNEL_AMAX)
        unseen = amax <= _UNSEEN
        factors = np.float32(1) / np.where(unseen, np.float32(1), amax)
        bounded: Floats = factors.clip(_LEAST, _MOST).astype(np.float32)
        return bounded

    def input_amax(self, native: NativeTensor, own: Floats) -> float:
        """The largest scaled input of a matrix. own: its own pre_quant_scale."""
        amax = round_to(self.channels(native, CHANNEL_AMAX), self.dtype(native))
        return float(round_to((amax * own).max(keepdims=True), self.dtype(native))[0])


def module_of(native: NativeTensor) -> str:
    return native.name.removesuffix(".weight")


def first_part(native: NativeTensor) -> str:
    """The canonical tensor beside which the scales of a native tensor are stored."""
    return next(iter(native.parts))


def inputs_of(name: str) -> str:
    """A name that is equal for all weights with the same inputs, such as `layers.0.attn.qkv`."""
    path, kind, _ = name.rsplit(".", 2)
    return f"{path}.{_INPUTS.get(kind, kind)}"


def calibrated_forms(asked: Calibrated) -> dict[Key, Form]:
    """The forms of weights in a quantization that needs a calibration, and of the norms that AWQ changes.

    Raises TensorMismatch for a missing statistic.
    """
    smoothings = {} if asked.kind == FP8 else _smoothings(asked)
    folded = _folded(asked, smoothings) if asked.kind in AWQ else {}
    inputs = {inputs for inputs, _ in folded}
    scales = _input_scales(asked, smoothings)
    found: dict[Key, Form] = {}
    for native in asked.natives:
        is_folded = inputs_of(first_part(native)) in inputs
        scaling = _scaling(asked, native, smoothings, is_folded=is_folded)
        if native.name in scales:
            constants = {INPUT_SCALE: scales[native.name], **scaling.constants}
            scaling = replace(scaling, constants=constants)
        found |= _forms_of_parts(native, asked.kind, scaling)
    is_centered = asked.header.config.norm.zero_centered
    for (_, norm), factors in folded.items():
        adds = is_centered and norm.name.endswith(".weight")
        found[norm] = Form(FOLDED, int(adds), scaling=Scaling((Step(factors),)))
    return found


def _forms_of_parts(native: NativeTensor, kind: str, scaling: Scaling) -> dict[Key, Form]:
    """The form of each part of a matrix. Constants and the shared scale are stored with the first part."""
    joined = {FP8: native.name, W4A8_AWQ: inputs_of(first_part(native))}.get(kind, "")
    first, *others = (Key(name) for name in native.parts)
    without = replace(scaling, constants={})
    found = {first: Form(kind, 0, joined, brings_scale_2=True, scaling=scaling)}
    return found | {key: Form(kind, 0, joined, scaling=without) for key in others}


def with_cache_scales(
    forms: Mapping[Key, Form],
    natives: Sequence[NativeTensor],
    header: Header,
    calibration: Calibration,
) -> dict[Key, Form]:
    """The same forms, with the scales of keys and values beside the matrices that make them.

    natives: all tensors of the model. Raises NotExpressible for a model whose cache holds something else.
    """
    found = dict(forms)
    count = 0
    for native in natives:
        for end, name, statistic in _CACHED:
            if any(part.endswith(end) for part in native.parts):
                amax = calibration.number(module_of(native), statistic)
                key = Key(first_part(native))
                form = found.get(key, Form(header.manifest[key].dtype))
                constants = {**form.scaling.constants, name: _scale_of(amax, LARGEST)}
                found[key] = form._replace(scaling=replace(form.scaling, constants=constants))
                count += 1
    if count != len(_CACHED) * header.config.layer_count:
        raise NotExpressible(
            f"--kv-cache: not every layer of this {header.config.family} caches keys and values; leave it out"
        )
    return found


def _smoothings(asked: Calibrated) -> dict[str, Smoothing]:
    """The factors of each matrix's inputs, by native name."""
    groups: dict[str, list[NativeTensor]] = {}
    for native in asked.natives:
        # Engines have one pre_quant_scale for all experts of a layer.
        group = re.sub(r"\.experts\.\d+\.", ".experts.", inputs_of(first_part(native)))
        groups.setdefault(group, []).append(native)
    found: dict[str, Smoothing] = {}
    for natives in groups.values():
        own = [asked.own_factors(native) for native in natives]
        dtype = asked.dtype(natives[0])
        stored = [round_to(factors, dtype) for factors in own]
        shared = round_to(np.mean(np.stack(stored), axis=0, dtype=np.float32), dtype)
        for native, factors in zip(natives, own, strict=True):
            found[native.name] = Smoothing(factors, shared)
    return found


def _folded(
    asked: Calibrated, smoothings: Mapping[str, Smoothing]
) -> dict[tuple[str, Key], Floats]:
    """(inputs of matrices, tensor of the norm that makes them) -> the factors that the norm takes over.

    All weights behind the norm must be quantized, and there must be two matrices or more, as ModelOpt has it.
    """
    if asked.header.config.norm.place not in ("before", "both"):
        return {}
    consumers: dict[str, list[NativeTensor]] = {}
    for native in asked.natives:
        consumers.setdefault(inputs_of(first_part(native)), []).append(native)
    found: dict[tuple[str, Key], Floats] = {}
    for inputs, matrices in consumers.items():
        layer, norm = _norm_before(inputs)
        if not norm or len(matrices) < 2 or not _are_all(inputs, matrices, asked.header):
            continue
        for end in ("weight", "bias"):
            key = Key(f"{layer}.{norm}.{end}")
            if key in asked.header.manifest:
                found[inputs, key] = smoothings[matrices[0].name].shared
    return found


def _norm_before(inputs: str) -> tuple[str, str]:
    """(path of the layer, name of the norm that makes these inputs; empty if no norm does)."""
    for end, norm in _NORM_OF.items():
        if inputs.endswith(end):
            return inputs.removesuffix(f".{end}"), norm
    return inputs, ""


def _are_all(inputs: str, matrices: Sequence[NativeTensor], header: Header) -> bool:
    """True if these matrices are all weights that use the inputs."""
    path, _, group = inputs.rpartition(".")
    quantized = {name for native in matrices for name in native.parts}
    wanted = {f"{path}.{kind}.weight" for kind, of in _INPUTS.items() if of == group}
    others = [
        key.name
        for key in header.manifest
        if key.name.startswith(f"{path}.")
        and key.name.endswith(".weight")
        and key.name not in quantized
    ]
    return quantized == wanted and all(name.endswith(_BEHIND) for name in others)


def _input_scales(asked: Calibrated, smoothings: Mapping[str, Smoothing]) -> dict[str, Constant]:
    """The input_scale of each matrix by native name; empty for int4-awq, whose inputs aren't quantized."""
    if asked.kind == INT4_AWQ:
        return {}
    largest = 127.0 if asked.kind == INT8_SQ else LARGEST
    amax: dict[str, float] = {}
    of_inputs: dict[str, float] = {}
    for native in asked.natives:
        if asked.kind == FP8:
            amax[native.name] = asked.calibration.number(module_of(native), INPUT_AMAX)
            continue
        group = inputs_of(first_part(native))
        found = asked.input_amax(native, smoothings[native.name].own)
        of_inputs[group] = max(of_inputs.get(group, 0.0), found)
    if asked.kind != FP8:
        amax = {native.name: of_inputs[inputs_of(first_part(native))] for native in asked.natives}
    return {name: _scale_of(each, largest) for name, each in amax.items()}


def _scaling(
    asked: Calibrated,
    native: NativeTensor,
    smoothings: Mapping[str, Smoothing],
    *,
    is_folded: bool,
) -> Scaling:
    """The factors of a matrix, without its input_scale."""
    if asked.kind == FP8:
        return Scaling()
    own, shared = smoothings[native.name]
    dtype = asked.dtype(native)
    stored = round_to(own, dtype)
    steps = [Step(np.float32(1) / own)]
    if not np.array_equal(stored, shared):
        steps.append(Step(stored, shared))
    if is_folded:
        return Scaling(tuple(steps))
    content = rounded(shared, dtype).reshape(len(shared), -1)
    constant = Constant(content, (len(shared),), dtype)
    return Scaling(tuple(steps), shared, {PRE_QUANT_SCALE: constant})


def _scale_of(amax: float, largest: float) -> Constant:
    """amax / largest as a float32 without axes; 1 for an amax of zero, where there was nothing to be scaled."""
    scale = np.float32(amax) / np.float32(largest) or np.float32(1)
    return Constant(np.array([[scale]], np.float32).view(np.uint8), (), "float32")
