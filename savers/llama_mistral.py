"""Meta's original files, in --tp shards, and Mistral's: params.json, weights and tokenizer.

    params.json, consolidated.00.pth, consolidated.01.pth ...     Meta: one file per tensor-parallel rank
    params.json, consolidated.safetensors                         Mistral: whole

The embedding is sharded by columns for Llama 1 and 2 and by rows for Llama 3, as Meta's code loads it. A tied head is
written a second time, since neither Meta's nor Mistral's code supports tied weights.
"""

from formats import torch_zip
from formats.output import FileLayout, PlainFile
from formats.pickle_writer import Placeholder
from formats.safetensors import SafetensorsLayout
from megaconv.engine.plan import OutputPlan, Placement, add_placements, native_dtype
from megaconv.engine.sidecars import small_files
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import family
from megaconv.families.parts.meta_params import KINDS, PARAMS_NAME, is_llama3, params_json
from megaconv.model.ir import Header, Key
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import META, META_ROWS
from megaconv.model.natives import NativeTensor, native_tensors
from megaconv.options import SaveOptions
from megaconv.saver import Saver


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    return ("tp", "checkpoint_type")


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output.

    Raises NotExpressible for a model that params.json can't represent, and LayoutError for a number of shards that
    doesn't divide it.
    """
    config = header.config
    kind = options.checkpoint_type or (
        "mistral" if config.family in ("mistral", "mixtral") else "meta"
    )
    _check(kind, options)
    files: dict[str, FileLayout] = {**small_files(header)}
    files[PARAMS_NAME] = PlainFile(
        params_json(config, kind, allow_lossy="rope_scaling" in options.allow_lossy)
    )
    naming = META if kind == "meta" and not is_llama3(config) else META_ROWS
    layout = Layout(tp=options.tp or 1)
    whole = Chunk.of_whole_model(config.layer_count)
    placements: dict[Key, list[Placement]] = {}
    rows = family(config.family).rows
    if not rows[0].spelling(naming):
        raise NotExpressible(
            f"{KINDS[kind]} files have no names for a {config.family}; choose --saver hf"
        )
    for rank in range(layout.tp):
        natives = list(native_tensors(rows, config, naming, layout, rank, whole, config.vocab))
        file, weights = _file(header, kind, rank, natives)
        files[file] = weights
        for native in natives:
            add_placements(placements, header, native, file, native.name)
    return OutputPlan(files, placements)


def _check(kind: str, options: SaveOptions) -> None:
    if kind not in KINDS:
        raise UsageError(
            f"--checkpoint-type {kind}: can't be written; choose {' or '.join(KINDS)}, or --saver hf"
        )
    if kind == "mistral" and (options.tp or 1) > 1:
        raise UsageError(
            f"--tp {options.tp}: {KINDS[kind]} files are not sharded over ranks; leave it out"
        )
    for name in ("pp", "vpp", "ep", "etp"):
        if (getattr(options, name) or 1) > 1:
            raise UsageError(
                f"--{name} {getattr(options, name)}: {KINDS[kind]} files are sharded by --tp only; leave it out"
            )


def _file(
    header: Header, kind: str, rank: int, natives: list[NativeTensor]
) -> tuple[str, FileLayout]:
    """(name, layout) of one weight file."""
    if kind == "mistral":
        tensors = {native.name: (native.shape, native_dtype(header, native)) for native in natives}
        return "consolidated.safetensors", SafetensorsLayout(tensors)
    state: dict[str, object] = {
        native.name: Placeholder(native.name, native.shape, native_dtype(header, native))
        for native in natives
    }
    return f"consolidated.{rank:02d}.pth", torch_zip.plan(state, f"consolidated.{rank:02d}")


SAVER = Saver(
    name="llama_mistral",
    description="Meta's originals: params.json with consolidated.*.pth; Mistral's: with consolidated.safetensors",
    plan=plan,
    uses=uses,
)
