"""Plain distributed checkpoints (DCP) for torch.distributed.checkpoint.load; config.json beside.

Every tensor is one chunk, its key the name in transformers' state_dict, or in that of torchtitan's Llama.
"""

from formats.distcp_files import DistcpFiles
from formats.output import FileLayout, PlainFile
from formats.tensor import ITEMSIZE, matrix_shape
from megaconv.engine.plan import OutputPlan, Placement, native_dtype
from megaconv.engine.sidecars import copies
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import Family, family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.ir import Header, Key
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF, META_ROWS, Naming
from megaconv.model.natives import native_tensors
from megaconv.model.table import expressible
from megaconv.options import SaveOptions

DESCRIPTION = (
    "PyTorch distributed checkpoint (DCP) with transformers' or torchtitan's names, for torchtitan, FSDP and the like"
)
OPTIONS = {"names": "whose names tensors have: `transformers` (if it isn't given), or `torchtitan` (of a Llama)"}


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that choose something."""
    return ("files",)


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """Raises NotExpressible when the family has no config.json for this model."""
    config, table = header.config, family(header.config.family)
    files: dict[str, FileLayout] = {CONFIG_NAME: PlainFile(table.config_json(config))}
    files |= copies(header.files)
    whole, stored = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True), DistcpFiles(options.files or 1)
    placements: dict[Key, list[Placement]] = {}
    for native in native_tensors(
        table.rows, config, _naming(table, options.extra.get("names", "transformers")), Layout(), 0, whole, config.vocab
    ):
        if native.copy is not None:
            continue
        dtype = native_dtype(header, native)
        start = (0,) * len(native.shape)
        file, record = stored.add_chunk(native.name, native.shape, dtype, start, native.shape)
        row_bytes = matrix_shape(native.shape)[1] * ITEMSIZE[dtype]
        for name, regions in native.parts.items():
            placements.setdefault(Key(name), []).append(Placement(file, record, row_bytes, regions))
    return OutputPlan(files | stored.layouts(nested_keys=True), placements)


def _naming(table: Family, names: str) -> Naming:
    """Raises UsageError for a word that is not known, NotExpressible for a family that torchtitan's Llama isn't."""
    if names not in ("transformers", "torchtitan"):
        raise UsageError(f"--option names={names}: is not known; choose transformers or torchtitan")
    if names == "torchtitan" and not expressible(table.rows, META_ROWS, table.features):
        raise NotExpressible(f"--option names=torchtitan: its Llama has no names for all tensors of a {table.name}")
    return HF if names == "transformers" else META_ROWS
