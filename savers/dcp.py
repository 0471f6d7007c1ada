"""Plain distributed checkpoints (DCP) for torch.distributed.checkpoint.load, with a config.json next to them.

Every tensor is one chunk. Its key is the name in transformers' state_dict, or in the state dict of torchtitan's model.
Optimizer state is stored as torchtitan's checkpointer does (megaconv/pytorch/dcp_output.py).
"""

from collections.abc import Callable

from formats.distcp_files import DistcpFiles
from formats.output import FileLayout, PlainFile
from megaconv.engine.plan import (
    OutputPlan,
    Placement,
    Zeros,
    add_placements,
    native_dtype,
    padding_of,
)
from megaconv.engine.sidecars import small_files
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import Family, family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.scores import HEAD, HEAD_OPTION, with_asked_class
from megaconv.model.ir import Header, Key
from megaconv.model.naming import (
    HF,
    HF_STACKED,
    META_FUSED,
    META_ROWS,
    TITAN,
    TITAN_FUSED,
    Naming,
)
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megaconv.model.table import expressible
from megaconv.options import SaveOptions
from megaconv.pytorch import groups, titan_biases, titan_names
from megaconv.pytorch.dcp_output import CONTAINERS, output_optimizer
from megaconv.pytorch.stacked_experts import require_stackable
from megaconv.pytorch.titan_rows import with_titan_names
from megaconv.saver import Saver

_TITANS = "torchtitan", "torchtitan-0.3", "torchtitan-0.3-separate"
_SINCE_03 = _TITANS[1:]
_FUSES = "torchtitan-0.3"
"""The names of a model with `fuse_qkv`, whose optimizer has q, k and v in one parameter. The weights are apart."""
_METAS = (META_ROWS, META_FUSED)
_FUSED = {META_ROWS: META_FUSED, TITAN: TITAN_FUSED}
NAMES = ("transformers", "transformers-stacked", *_TITANS)


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    return ("files",)


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output. Raises NotExpressible if the family has no config.json for this model."""
    table = with_titan_names(family(header.config.family))
    config = with_asked_class(header.config, options.extra.get(HEAD))
    names = options.extra.get("names", "transformers")
    naming = _naming(table, names)
    if naming == HF_STACKED:
        require_stackable(config, "--option names=transformers keeps them")
    config_json = table.config_json(config, header.training.arguments)
    files: dict[str, FileLayout] = {CONFIG_NAME: PlainFile(config_json)}
    files |= small_files(header)
    stored = DistcpFiles(options.files or 1)
    placements: dict[Key, list[Placement]] = {}
    zeros: list[Zeros] = []
    natives = _natives(header, table, naming, names)
    for name, native in natives.items():
        dtype = native_dtype(header, native)
        start = (0,) * len(native.shape)
        file, record = stored.add_chunk(name, native.shape, dtype, start, native.shape)
        add_placements(placements, header, native, file, record)
        zeros += padding_of(header, native, file, record)
    if naming == TITAN:
        titan_biases.add_zeros(stored, header.config)
    optimizer = output_optimizer(header, is_titans=names in _TITANS)
    notices: tuple[str, ...] = ()
    if optimizer is not None:
        fused = _FUSED.get(naming) if names == _FUSES else None
        trained = natives if fused is None else _natives(header, table, fused, names)
        own = {name: native for name, native in trained.items() if native.copy is None}
        notices = optimizer.add(stored, own, placements, zeros)
    layouts = stored.layouts(nested_keys=True, containers=CONTAINERS)
    return OutputPlan(files | layouts, placements, zeros, notices=notices)


def _natives(header: Header, table: Family, naming: Naming, names: str) -> dict[str, NativeTensor]:
    """The model's tensors, by the names of --option names. torchtitan expects a tied head under its own name too."""
    renamed: Callable[[str], str] = titan_names.since_03 if naming in _METAS and names in _SINCE_03 else str  # fmt: skip
    return {
        renamed(native.name): native
        for native in unsharded_tensors(table.rows, header.config, naming)
        if native.copy is None or names in _TITANS
    }


def _naming(table: Family, names: str) -> Naming:
    """The naming scheme of --option names. Raises UsageError for an unknown word.

    Raises NotExpressible for torchtitan's names if its model has no names for the family's tensors.
    """
    if names not in NAMES:
        raise UsageError(f"--option names={names}: is not known; choose {', '.join(NAMES)}")
    if names not in _TITANS:
        return HF_STACKED if names == "transformers-stacked" else HF
    if expressible(table.rows, META_ROWS, table.features):
        return META_ROWS
    if not expressible(table.rows, TITAN, table.features):
        raise NotExpressible(
            f"--option names={names}: torchtitan has no names for all tensors of a {table.name}"
        )
    if names not in _SINCE_03:
        raise NotExpressible(
            f"--option names={names}: the names of releases before 0.3 are known for Llama only; choose torchtitan-0.3"
        )
    return TITAN


SAVER = Saver(
    name="dcp",
    description="PyTorch distributed checkpoint (DCP) with transformers' or torchtitan's names, for torchtitan, FSDP and the like",
    plan=plan,
    holds_scores=True,
    options={
        "names": "the names of tensors: `transformers` (the default); `transformers-stacked`, the names in memory since transformers 5, "
        "where one tensor holds all experts of a layer; `torchtitan-0.3` for torchtitan since release 0.3 (Llama, Qwen3, GPT-OSS, "
        "DeepSeek V2 and V3), or `torchtitan-0.3-separate` for optimizer state of a model without `fuse_qkv`; `torchtitan` for "
        "earlier releases (Llama)",
        **HEAD_OPTION,
    },
    uses=uses,
    holds_optimizer=True,
    keeps_names=True,
    trains_weights=True,
    unfit=groups.unfit,
)
