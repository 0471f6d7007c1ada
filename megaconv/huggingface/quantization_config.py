"""Describes the quantized weights of a Hugging Face output, in config.json and in ModelOpt's hf_quant_config.json.

NVFP4 is ModelOpt's W4A16_NVFP4, which quantizes only weights, so that it needs no scales of activations. Source:
convert_hf_config.py and quant_utils.py of ModelOpt 0.47.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megaconv import _version
from megaconv.families.parts.hf_config import MODELOPT_FILE, QUANTIZATION, as_file
from megaconv.huggingface.packed import mxfp4_settings, packed_settings
from megaconv.huggingface.plain_modules import closed_modules, pattern, plain_modules
from megaconv.model.ir import Header
from megaconv.model.natives import NativeTensor
from megaconv.options import (
    FP8,
    FP8_BLOCK,
    FP8_PER_CHANNEL,
    INT4_AWQ,
    INT8_SQ,
    MXFP4,
    NVFP4,
    PACKED,
    W4A8_AWQ,
    SaveOptions,
)
from megaconv.values import calibrated, nvfp4
from megaconv.values.fp8_blocks import BLOCK

_ALGORITHMS = {
    FP8: "FP8",
    FP8_PER_CHANNEL: "FP8_PER_CHANNEL_PER_TOKEN",
    NVFP4: "W4A16_NVFP4",
    INT8_SQ: "W8A8_SQ_PER_CHANNEL",
    INT4_AWQ: "W4A16_AWQ",
    W4A8_AWQ: "W4A8_AWQ",
}
"""Quantization -> ModelOpt's name of it (`quant_algo`)."""
_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.GROUP}
_GROUPS = {
    FP8: {"input_activations": _FP8, "weights": _FP8, "targets": ["Linear"]},
    NVFP4: {"weights": _NVFP4, "targets": ["Linear"]},
}
"""Quantization -> the only entry of config_groups. ModelOpt describes the others by their name alone."""
_AWQ = {"group_size": calibrated.GROUP, "has_zero_point": False, "pre_quant_scale": True}
_DETAILS: Mapping[str, Mapping[str, Any]] = {
    NVFP4: {"group_size": nvfp4.GROUP},
    INT4_AWQ: _AWQ,
    W4A8_AWQ: _AWQ,
}
"""Quantization -> its further keys in hf_quant_config.json."""


def quantization_files(
    name: str, config: bytes, natives: Sequence[NativeTensor], header: Header, options: SaveOptions
) -> dict[str, bytes]:
    """The config.json of this name with the quantization settings of its form, and any further settings file.

    The settings list the modules that aren't quantized. natives: native tensors without their scales. header: header of
    the stored tensors.
    """
    plain = plain_modules(natives, header)
    closed = closed_modules(plain, natives, header)
    kind = options.quantize or ""
    if kind == FP8_BLOCK:
        return {name: _with(config, _deepseek(sorted({*plain, *closed})))}
    if kind == MXFP4:
        return {name: _with(config, mxfp4_settings())}
    if kind in PACKED:
        ignored = [*plain, *map(pattern, closed)]
        return {name: _with(config, packed_settings(ignored, options))}
    producer = {"name": "megaconv", "version": _version.__version__}
    described = {
        **({"config_groups": {"group_0": _GROUPS[kind]}} if kind in _GROUPS else {}),
        "ignore": plain,
        "quant_algo": _ALGORITHMS[kind],
        **({"kv_cache_scheme": _FP8} if options.kv_cache else {}),
        "producer": producer,
        "quant_method": "modelopt",
    }
    settings = {
        "quant_algo": _ALGORITHMS[kind],
        "kv_cache_quant_algo": options.kv_cache.upper() if options.kv_cache else None,
        **_DETAILS.get(kind, {}),
        "exclude_modules": plain,
    }
    again = as_file({"producer": producer, "quantization": settings})
    return {name: _with(config, described), MODELOPT_FILE: again}


def _with(config: bytes, described: Mapping[str, Any]) -> bytes:
    return as_file({**json.loads(config), QUANTIZATION: described})


def _deepseek(plain: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": plain,
    }
