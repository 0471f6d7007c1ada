"""Which weights of a Hugging Face directory are stored in FP8 by blocks or in NVFP4, and what its config.json says of them.

Those of attention, MLP and experts; not embeddings, head, norms, routers and indexers. A tensor that several canonical ones are
fused into is quantized where each of them fills whole blocks of it, else it stays as it is and is listed with the rest: 128 rows
of FP8, 16 of a row in NVFP4. Source of NVFP4's settings: convert_hf_config.py of ModelOpt 0.47, whose W4A16_NVFP4 is that of
weights alone, without the scales of activations that only a calibration can tell.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from formats.tensor import Box
from megaconv import _version
from megaconv.engine import fp8_blocks, nvfp4
from megaconv.engine.fp8_blocks import BLOCK, grid
from megaconv.engine.nvfp4 import GROUP, scales_shape
from megaconv.engine.stored_forms import Form
from megaconv.errors import NotExpressible, UsageError
from megaconv.families.parts.hf_config import QUANTIZATION, as_file
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.options import FP8_BLOCK, NVFP4, QUANTIZATIONS, SaveOptions

MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt's exports say the same again."""
_W4A16 = "W4A16_NVFP4"
_LINEAR = re.compile(r"(.*\.)?(attn|mlp)\.(?!router\.|indexer\.|.*_norm\.).*\.weight")
_JOINED = {
    **dict.fromkeys(("q", "k", "v"), "qkv"),
    **dict.fromkeys(("gate", "up"), "gate_up"),
    **dict.fromkeys(("q_down", "kv_down"), "down"),
    **dict.fromkeys(("k_up", "v_up"), "kv_up"),
}
"""What inference engines join: the last part of a weight's name -> that of the whole, of all experts of a layer."""


def lossy(quantize: str) -> str:
    """What a conversion says of it."""
    how = {
        FP8_BLOCK: "float8_e4m3fn with a scale for each block of 128 by 128",
        NVFP4: "4 bits with a scale for each 16 of a row",
    }
    return (
        f"weights of attention, MLP and experts are rounded to {how[quantize]} ({quantize}); "
        "fingerprints are of the values that are read back"
    )


def quantized_forms(natives: Sequence[NativeTensor], header: Header, options: SaveOptions) -> dict[Key, Form]:
    """The canonical tensors that are quantized. Raises UsageError for a word that is not known and beside --base,
    NotExpressible where there are none."""
    kind = options.quantize
    if kind not in QUANTIZATIONS:
        raise UsageError(f"--quantize {kind}: is not known; choose {' or '.join(QUANTIZATIONS)}")
    if options.base is not None:
        raise UsageError("--quantize: --base copies the original's tensors as they are; leave one of them out")
    fills = _fills_blocks if kind == FP8_BLOCK else _fills_groups
    found = {
        Key(name): Form(kind) if kind == FP8_BLOCK else Form(kind, 0, _joined(name), not place)
        for native in natives
        if _is_linear(native) and fills(native)
        for place, name in enumerate(native.parts)
    }
    if not found:
        blocks = "made of whole blocks of 128 rows" if kind == FP8_BLOCK else "with a multiple of 16 columns"
        raise NotExpressible(
            f"--quantize {kind}: {header.config.family} has no weight here that could be stored so: "
            f"each has to be a matrix [out, in], {'or ' * (kind == FP8_BLOCK)}{blocks}"
        )
    return found


def _is_linear(native: NativeTensor) -> bool:
    return len(native.shape) == 2 and native.shape[0] != 1 and all(map(_LINEAR.fullmatch, native.parts))


def _joined(name: str) -> str:
    """The same for all weights that share a scale_2."""
    path, kind, _ = name.rsplit(".", 2)
    if kind == "gate" or kind == "up":
        path = re.sub(r"\.experts\.\d+$", ".experts", path)
    return f"{path}.{_JOINED.get(kind, kind)}"


def _fills_blocks(native: NativeTensor) -> bool:
    return all(_is_whole_blocks(region, native) for regions in native.parts.values() for region in regions)


def _is_whole_blocks(region: Region, native: NativeTensor) -> bool:
    ends = region.row + region.box.rows
    whole = ends == native.shape[0] or not ends % BLOCK
    return _is_plain(region, native) and not (region.row % BLOCK or region.box.row0 % BLOCK) and whole


def _fills_groups(native: NativeTensor) -> bool:
    plain = all(_is_plain(region, native) for regions in native.parts.values() for region in regions)
    return plain and not native.shape[1] % GROUP and len({_joined(name) for name in native.parts}) == 1


def _is_plain(region: Region, native: NativeTensor) -> bool:
    """Whether it is whole rows, one after the other as in the canonical tensor."""
    box = region.box
    return region == Region(box, region.row) and (box.col0, box.col1) == (0, native.shape[1])


def with_scales(native: NativeTensor, header: Header) -> Iterator[NativeTensor]:
    """A native tensor as it is stored, and behind one that is quantized those of its scales. header: of stored tensors."""
    kind = _quantization_of(native, header)
    if kind == FP8_BLOCK:
        yield native
        across = grid(native.shape)[1]
        yield _scaled(native, fp8_blocks.SCALES, BLOCK, across)._replace(shape=grid(native.shape))
    elif kind == NVFP4:
        half, scales = native.shape[1] // 2, scales_shape(native.shape)
        yield _scaled(native, "", 1, half)._replace(shape=(native.shape[0], half))
        yield _scaled(native, nvfp4.SCALES, 1, scales[1])._replace(shape=scales)
        first = next(iter(native.parts))  # the one that brings it
        number = {first + nvfp4.SCALE_2: (Region(Box(0, 1, 0, 1), 0),)}
        yield NativeTensor(native.name + nvfp4.SCALE_2, number, ())
    else:
        yield native


def _scaled(native: NativeTensor, end: str, rows: int, cols: int) -> NativeTensor:
    """A tensor with fewer rows and with cols columns for what a native one holds; end: follows the names of both."""
    parts = {
        name + end: tuple(
            Region(Box(region.box.row0 // rows, -(-region.box.row1 // rows), 0, cols), region.row // rows)
            for region in regions
        )
        for name, regions in native.parts.items()
    }
    return NativeTensor(native.name + end, parts, native.shape)


def quantization_files(
    name: str, config: bytes, natives: Sequence[NativeTensor], header: Header, quantize: str
) -> dict[str, bytes]:
    """A config.json of this name that says so, as DeepSeek's or ModelOpt's do, with the modules that are not quantized; and
    what else says so. natives: without their scales; header: of stored tensors."""
    kept = [
        native.name.removesuffix(".weight")
        for native in natives
        if native.name.endswith(".weight") and len(native.shape) == 2 and _quantization_of(native, header) is None
    ]
    plain = sorted({*kept, "lm_head"})
    if quantize == FP8_BLOCK:
        return {name: _with(config, _fp8(plain))}
    producer = {"name": "megaconv", "version": _version.__version__}
    settings = {"quant_algo": _W4A16, "kv_cache_quant_algo": None, "group_size": GROUP, "exclude_modules": plain}
    again = as_file({"producer": producer, "quantization": settings})
    return {name: _with(config, _nvfp4(plain, producer)), MODELOPT_FILE: again}


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


def _nvfp4(plain: list[str], producer: Mapping[str, str]) -> dict[str, Any]:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
    return {
        "quant_method": "modelopt",
        "quant_algo": _W4A16,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": plain,
        "producer": producer,
    }


def _quantization_of(native: NativeTensor, header: Header) -> str | None:
    """By the names of its scales, which nothing else has."""
    for kind, end in ((FP8_BLOCK, fp8_blocks.SCALES), (NVFP4, nvfp4.SCALES)):
        if all(Key(name + end) in header.manifest for name in native.parts):
            return kind
    return None
