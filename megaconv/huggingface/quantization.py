"""Selects the weights of a Hugging Face output to store in FP8 or NVFP4, and describes them in config.json.

Weights of attention, MLP and experts are quantized. Embeddings, head, norms, routers and indexers are not. A fused
native tensor is quantized only if each canonical tensor in it fills whole blocks: 128 rows for FP8 by blocks, 16 elements of
a row for NVFP4. FP8 by rows needs whole rows. Any other tensor stays unquantized and is listed with the others.
Source of NVFP4's settings: convert_hf_config.py of ModelOpt 0.47. Its W4A16_NVFP4 quantizes only weights, so it needs
no scales of activations, which require a calibration.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from formats.tensor import Box
from megaconv import _version
from megaconv.errors import NotExpressible, UsageError
from megaconv.families.parts.hf_config import QUANTIZATION, as_file
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.options import FP8_BLOCK, FP8_PER_CHANNEL, NVFP4, QUANTIZATIONS, SaveOptions
from megaconv.values import fp8_blocks, fp8_rows, nvfp4
from megaconv.values.fp8_blocks import BLOCK, grid
from megaconv.values.nvfp4 import GROUP, scales_shape
from megaconv.values.stored_forms import Form

MODELOPT_FILE = "hf_quant_config.json"
"""The file in which ModelOpt's exports repeat the quantization settings."""
_W4A16 = "W4A16_NVFP4"
_LINEAR = re.compile(r"(.*\.)?(attn|mlp)\.(?!router\.|indexer\.|.*_norm\.).*\.weight")
_JOINED = {
    **dict.fromkeys(("q", "k", "v"), "qkv"),
    **dict.fromkeys(("gate", "up"), "gate_up"),
    **dict.fromkeys(("q_down", "kv_down"), "down"),
    **dict.fromkeys(("k_up", "v_up"), "kv_up"),
}
"""Weights that inference engines fuse: the last part of a weight's name -> the fused name."""


def lossy(quantize: str) -> str:
    """The notice that a conversion gives about the quantization."""
    how = {
        FP8_BLOCK: "float8_e4m3fn with a scale for each block of 128 by 128",
        FP8_PER_CHANNEL: "float8_e4m3fn with a scale for each row",
        NVFP4: "4 bits with a scale for each 16 of a row",
    }
    return (
        f"weights of attention, MLP and experts are rounded to {how[quantize]} ({quantize}); "
        "fingerprints are of the values that are read back"
    )


def quantized_forms(
    natives: Sequence[NativeTensor], header: Header, options: SaveOptions
) -> dict[Key, Form]:
    """The form of each quantized canonical tensor.

    Raises UsageError for an unknown name or in combination with --base, NotExpressible if no tensor can be quantized.
    """
    kind = options.quantize
    if kind not in QUANTIZATIONS:
        raise UsageError(f"--quantize {kind}: is not known; choose {' or '.join(QUANTIZATIONS)}")
    if options.base is not None:
        raise UsageError(
            "--quantize: --base copies the original's tensors as they are; leave one of them out"
        )
    fits, needed = _FITTING[kind]
    found = {
        Key(name): Form(kind, 0, _joined(name), not place) if kind == NVFP4 else Form(kind)
        for native in natives
        if _is_linear(native) and fits(native)
        for place, name in enumerate(native.parts)
    }
    if not found:
        raise NotExpressible(
            f"--quantize {kind}: {header.config.family} has no weight here that could be stored so: "
            f"each has to be a matrix [out, in]{needed}"
        )
    return found


def _is_linear(native: NativeTensor) -> bool:
    return (
        len(native.shape) == 2
        and native.shape[0] != 1
        and all(map(_LINEAR.fullmatch, native.parts))
    )


def _joined(name: str) -> str:
    """A name that is equal for all weights that share a scale_2."""
    path, kind, _ = name.rsplit(".", 2)
    if kind == "gate" or kind == "up":
        path = re.sub(r"\.experts\.\d+$", ".experts", path)
    return f"{path}.{_JOINED.get(kind, kind)}"


def _fills_blocks(native: NativeTensor) -> bool:
    return all(
        _is_whole_blocks(region, native) for regions in native.parts.values() for region in regions
    )


def _is_whole_blocks(region: Region, native: NativeTensor) -> bool:
    ends = region.row + region.box.rows
    whole = ends == native.shape[0] or not ends % BLOCK
    return (
        _is_plain(region, native) and not (region.row % BLOCK or region.box.row0 % BLOCK) and whole
    )


def _fills_groups(native: NativeTensor) -> bool:
    shared = {_joined(name) for name in native.parts}
    return _has_whole_rows(native) and not native.shape[1] % GROUP and len(shared) == 1


def _has_whole_rows(native: NativeTensor) -> bool:
    return all(_is_plain(region, native) for regions in native.parts.values() for region in regions)


def _is_plain(region: Region, native: NativeTensor) -> bool:
    """True if the region holds whole rows, in the order of the canonical tensor."""
    box = region.box
    return region == Region(box, region.row) and (box.col0, box.col1) == (0, native.shape[1])


_FITTING = {
    FP8_BLOCK: (_fills_blocks, ", or made of whole blocks of 128 rows"),
    FP8_PER_CHANNEL: (_has_whole_rows, ""),
    NVFP4: (_fills_groups, ", with a multiple of 16 columns"),
}
"""Quantization -> (True for a native tensor that it can store, the condition in words)."""


def with_scales(native: NativeTensor, header: Header) -> Iterator[NativeTensor]:
    """A native tensor as it is stored, followed by its scales if it is quantized.

    header: header of the stored tensors.
    """
    kind = _quantization_of(native, header)
    if kind == FP8_BLOCK:
        yield native
        blocks = grid(native.shape)
        scales_of_blocks = _scaled(native, fp8_blocks.SCALES, BLOCK, blocks[1])
        yield scales_of_blocks._replace(shape=blocks)
    elif kind == FP8_PER_CHANNEL:
        yield native
        scales_of_rows = _scaled(native, fp8_rows.SCALES, 1, 1)
        yield scales_of_rows._replace(shape=fp8_rows.scales_shape(native.shape))
    elif kind == NVFP4:
        rows, cols = native.shape
        pairs = cols // 2
        yield _scaled(native, "", 1, pairs)._replace(shape=(rows, pairs))
        scales = scales_shape(native.shape)
        yield _scaled(native, nvfp4.SCALES, 1, scales[1])._replace(shape=scales)
        first = next(iter(native.parts))  # scale_2 is stored with the first part
        number = {first + nvfp4.SCALE_2: (Region(Box(0, 1, 0, 1), 0),)}
        yield NativeTensor(native.name + nvfp4.SCALE_2, number, ())
    else:
        yield native


def _scaled(native: NativeTensor, end: str, rows: int, cols: int) -> NativeTensor:
    """The tensor of scales or codes that belongs to a native tensor.

    It has one row per `rows` native rows, and `cols` columns. end: the suffix of both names.
    """
    parts = {
        name + end: tuple(
            Region(
                Box(region.box.row0 // rows, -(-region.box.row1 // rows), 0, cols),
                region.row // rows,
            )
            for region in regions
        )
        for name, regions in native.parts.items()
    }
    return NativeTensor(native.name + end, parts, native.shape)


def quantization_files(
    name: str, config: bytes, natives: Sequence[NativeTensor], header: Header, quantize: str
) -> dict[str, bytes]:
    """The config.json of this name with DeepSeek's or ModelOpt's quantization settings, and any further settings file.

    The settings list the modules that aren't quantized. natives: native tensors without their scales. header: header of
    the stored tensors.
    """
    kept = [
        native.name.removesuffix(".weight")
        for native in natives
        if native.name.endswith(".weight")
        and len(native.shape) == 2
        and _quantization_of(native, header) is None
    ]
    plain = sorted({*kept, "lm_head"})
    if quantize == FP8_BLOCK:
        return {name: _with(config, _fp8(plain))}
    producer = {"name": "megaconv", "version": _version.__version__}
    described = _by_rows(plain) if quantize == FP8_PER_CHANNEL else _nvfp4(plain)
    settings = {
        "quant_algo": described["quant_algo"],
        "kv_cache_quant_algo": None,
        **({"group_size": GROUP} if quantize == NVFP4 else {}),
        "exclude_modules": plain,
    }
    again = as_file({"producer": producer, "quantization": settings})
    return {name: _with(config, {**described, "producer": producer}), MODELOPT_FILE: again}


def _with(config: bytes, described: Mapping[str, Any]) -> bytes:
    return as_file({**json.loads(config), QUANTIZATION: described})


def _fp8(plain: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": plain,
    }


def _by_rows(plain: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
        "ignore": plain,
    }


def _nvfp4(plain: list[str]) -> dict[str, Any]:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
    return {
        "quant_method": "modelopt",
        "quant_algo": _W4A16,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": plain,
    }


def _quantization_of(native: NativeTensor, header: Header) -> str | None:
    """The quantization of a native tensor; None if it has none. Its dtype and its scales decide."""
    parts = [Key(name) for name in native.parts]
    if all(key._replace(name=key.name + fp8_blocks.SCALES) in header.manifest for key in parts):
        return FP8_BLOCK
    if not all(key._replace(name=key.name + nvfp4.SCALES) in header.manifest for key in parts):
        return None
    return NVFP4 if header.manifest[parts[0]].dtype == "uint8" else FP8_PER_CHANNEL
