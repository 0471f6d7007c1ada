"""Which weights of a Hugging Face directory are stored in FP8 by blocks, and what its config.json says of them.

Those of attention, MLP and experts; not embeddings, head, norms, routers and indexers. A tensor that several canonical ones are
fused into is quantized where each of them fills whole blocks of it, else it stays as it is and is listed with the rest.
"""

import json
import re
from collections.abc import Iterator, Sequence

from formats.tensor import Box
from megaconv.engine.fp8_blocks import BLOCK, SCALES, grid
from megaconv.engine.stored_forms import Form
from megaconv.errors import NotExpressible, UsageError
from megaconv.families.parts.hf_config import QUANTIZATION, as_file
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.options import QUANTIZATIONS, SaveOptions

LOSSY = (
    "weights of attention, MLP and experts are rounded to float8_e4m3fn with a scale for each block of 128 by 128 (fp8-block); "
    "fingerprints are of the values that are read back"
)
_LINEAR = re.compile(r"(.*\.)?(attn|mlp)\.(?!router\.|indexer\.|.*_norm\.).*\.weight")


def fp8_forms(natives: Sequence[NativeTensor], header: Header, options: SaveOptions) -> dict[Key, Form]:
    """The canonical tensors that are quantized. Raises UsageError for a word that is not known and beside --base,
    NotExpressible where there are none."""
    if options.quantize not in QUANTIZATIONS:
        raise UsageError(f"--quantize {options.quantize}: is not known; choose {' or '.join(QUANTIZATIONS)}")
    if options.base is not None:
        raise UsageError("--quantize: --base copies the original's tensors as they are; leave one of them out")
    found = {Key(name): Form("fp8_block") for native in natives if _fills_blocks(native) for name in native.parts}
    if not found:
        raise NotExpressible(
            f"--quantize {options.quantize}: {header.config.family} has no weight here that could be stored so: "
            "each has to be a matrix [out, in], or made of whole blocks of 128 rows"
        )
    return found


def _fills_blocks(native: NativeTensor) -> bool:
    if len(native.shape) != 2 or native.shape[0] == 1 or not all(map(_LINEAR.fullmatch, native.parts)):
        return False
    return all(_is_plain(region, native) for regions in native.parts.values() for region in regions)


def _is_plain(region: Region, native: NativeTensor) -> bool:
    box, (rows, cols) = region.box, native.shape
    if region != Region(box, region.row) or (box.col0, box.col1) != (0, cols):
        return False
    ends = region.row + box.rows
    return not (region.row % BLOCK or box.row0 % BLOCK) and (ends == rows or not ends % BLOCK)


def with_scales(native: NativeTensor, header: Header) -> Iterator[NativeTensor]:
    """A native tensor, and behind one that is quantized that of its scales. header: of tensors as they are stored."""
    yield native
    if not _is_quantized(native, header):
        return
    across = grid(native.shape)[1]
    parts = {
        name + SCALES: tuple(
            Region(Box(region.box.row0 // BLOCK, -(-region.box.row1 // BLOCK), 0, across), region.row // BLOCK)
            for region in regions
        )
        for name, regions in native.parts.items()
    }
    yield NativeTensor(native.name + SCALES, parts, grid(native.shape))


def with_quantization(config: bytes, natives: Sequence[NativeTensor], header: Header) -> bytes:
    """A config.json that says so, as DeepSeek's do, with the modules that are not quantized."""
    kept = [
        native.name.removesuffix(".weight")
        for native in natives
        if native.name.endswith(".weight") and len(native.shape) == 2 and not _is_quantized(native, header)
    ]
    described = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted({*kept, "lm_head"}),
    }
    return as_file({**json.loads(config), QUANTIZATION: described})


def _is_quantized(native: NativeTensor, header: Header) -> bool:
    return all(header.manifest[Key(name)].dtype == "float8_e4m3fn" for name in native.parts)
