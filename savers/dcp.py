"""Plain distributed checkpoints (DCP) for torch.distributed.checkpoint.load, with a config.json next to them.

Every tensor is one chunk. Its key is the name in transformers' state_dict, or in the state dict of torchtitan's Llama.
"""

from formats.distcp_files import DistcpFiles
from formats.output import FileLayout, PlainFile
from megaconv.engine.plan import OutputPlan, Placement, add_placements, native_dtype
from megaconv.engine.sidecars import copies
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import Family, family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.ir import Header, Key
from megaconv.model.naming import HF, META_ROWS, Naming
from megaconv.model.natives import unsharded_tensors
from megaconv.model.table import expressible
from megaconv.options import SaveOptions
from megaconv.saver import Saver


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    return ("files",)


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output. Raises NotExpressible if the family has no config.json for this model."""
    config, table = header.config, family(header.config.family)
    naming = _naming(table, options.extra.get("names", "transformers"))
    files: dict[str, FileLayout] = {CONFIG_NAME: PlainFile(table.config_json(config))}
    files |= copies(header.files)
    stored = DistcpFiles(options.files or 1)
    placements: dict[Key, list[Placement]] = {}
    for native in unsharded_tensors(table.rows, config, naming):
        if native.copy is not None:
            continue
        dtype = native_dtype(header, native)
        start = (0,) * len(native.shape)
        file, record = stored.add_chunk(native.name, native.shape, dtype, start, native.shape)
        add_placements(placements, header, native, file, record)
    return OutputPlan(files | stored.layouts(nested_keys=True), placements)


def _naming(table: Family, names: str) -> Naming:
    """The naming scheme of --option names. Raises UsageError for an unknown word.

    Raises NotExpressible for torchtitan's names if its Llama has no names for the family's tensors.
    """
    if names not in ("transformers", "torchtitan"):
        raise UsageError(f"--option names={names}: is not known; choose transformers or torchtitan")
    if names == "torchtitan" and not expressible(table.rows, META_ROWS, table.features):
        raise NotExpressible(
            f"--option names=torchtitan: its Llama has no names for all tensors of a {table.name}"
        )
    return HF if names == "transformers" else META_ROWS


SAVER = Saver(
    name="dcp",
    description="PyTorch distributed checkpoint (DCP) with transformers' or torchtitan's names, for torchtitan, FSDP and the like",
    plan=plan,
    options={
        "names": "the names of tensors: `transformers` (the default), or `torchtitan` (for Llama)"
    },
    uses=uses,
)
