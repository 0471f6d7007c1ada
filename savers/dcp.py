"""Plain distributed checkpoints (DCP) with transformers' names, for torch.distributed.checkpoint.load; config.json beside.

Every tensor is one chunk, its key the name in transformers' state_dict.
"""

from formats.distcp_files import DistcpFiles
from formats.output import FileLayout, PlainFile
from formats.tensor import ITEMSIZE, matrix_shape
from megaconv.engine.plan import OutputPlan, Placement, native_dtype
from megaconv.engine.sidecars import copies
from megaconv.families import family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.ir import Header, Key
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF
from megaconv.model.natives import native_tensors
from megaconv.options import SaveOptions

DESCRIPTION = "PyTorch distributed checkpoint (DCP) with transformers' names, for torchtitan, FSDP and the like"


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
    for native in native_tensors(table.rows, config, HF, Layout(), 0, whole, config.vocab):
        if native.copy is not None:
            continue
        dtype = native_dtype(header, native)
        start = (0,) * len(native.shape)
        file, record = stored.add_chunk(native.name, native.shape, dtype, start, native.shape)
        row_bytes = matrix_shape(native.shape)[1] * ITEMSIZE[dtype]
        for name, regions in native.parts.items():
            placements.setdefault(Key(name), []).append(Placement(file, record, row_bytes, regions))
    return OutputPlan(files | stored.layouts(nested_keys=True), placements)
