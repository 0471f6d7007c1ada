"""Plans a Megatron core checkpoint in `torch_dist` or `zarr` format: chunks in files, extra states, `common.pt`.

Megatron core 0.9 to 0.19 needs metadata.json, common.pt, the tracker, and an `_extra_state` object for every module
that has one. The modules of Transformer Engine's versions differ, so the objects of all versions are written.
Source: megatron/core/dist_checkpointing and sharded_state_dict() of Megatron core's modules.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, Protocol

from formats import rank_files, torch_dist, torch_zip, zarr_arrays
from formats.distcp_files import DistcpFiles
from formats.output import FileLayout, PlainFile
from formats.tensor import ITEMSIZE, Box, Shape
from megaconv.engine.plan import OutputPlan, Placement, native_dtype, native_shift
from megaconv.errors import LayoutError, NotExpressible
from megaconv.families import family
from megaconv.megatron.arguments.sparse import INDEXER_ORDER
from megaconv.megatron.distributed.bridge_files import CONTENT, bridge_files, is_for_bridge
from megaconv.megatron.distributed.chunks import PlannedChunk, chunks_of
from megaconv.megatron.distributed.keys import pieces, stack, stacks_layers
from megaconv.megatron.distributed.optimizer_plan import OptimizerForm, choose_form
from megaconv.megatron.optimizer.training_output import OutputTraining, output_training
from megaconv.megatron.rank_files.iteration import at_iteration, directory_iteration
from megaconv.megatron.rank_files.plan import megatron_args, tracker_and_sidecars
from megaconv.megatron.states.names import extra_states, is_of_linear_layer
from megaconv.megatron.states.whole_names import in_whole
from megaconv.model.beside import BESIDE
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Header, Key
from megaconv.model.layout import Layout, divide
from megaconv.model.naming import CORE, CORE_LOCAL, CORE_LOCAL_KEYS, with_rope_last
from megaconv.model.natives import NativeTensor, Region, unsharded_tensors
from megaconv.model.regions import Repeated
from megaconv.model.sharding import rank_sizes
from megaconv.options import SaveOptions


def plan_dist(header: Header, options: SaveOptions, layout: Layout) -> OutputPlan:
    """The plan of a distributed checkpoint. layout: the layout whose ranks the chunks are made for.

    Raises LayoutError for a model that can't be sharded this way, NotExpressible.
    """
    if layout.encoder_stage_layers:
        raise LayoutError(
            f"pp = {layout.pp}: a distributed checkpoint of a model with an encoder and a decoder is written for one pipeline stage "
            "(Megatron core's own for several don't hold its head); choose --pp 1, or --ckpt-format torch"
        )
    rank_sizes(header.config, layout, shares_heads=True)
    for_bridge = is_for_bridge(options)
    header = at_iteration(header, options, without_releases=for_bridge)
    arguments = megatron_args(header, options, layout, transformer_impl=options.transformer_impl)
    backend = options.ckpt_format
    arguments.ckpt_format = backend
    arguments.use_dist_ckpt = True
    arguments.dist_ckpt_format = backend
    divide(arguments.padded_vocab_size, layout.tp, "padded vocabulary", "tensor parallel size (tp)")
    iteration = directory_iteration(header.training)
    version = rank_files.iteration_directory(iteration)
    kept = output_training(
        header, layout, keeps_rng=layout.ep == 1, distributed=bool(options.distributed_optimizer)
    )
    optimizer = choose_form(kept, options)
    vars(arguments).update(kept.arguments(distributed=optimizer.distributed))
    local = options.transformer_impl == "local"
    model = GlobalModel.of(
        header,
        layout,
        arguments.padded_vocab_size,
        optimizer,
        local=local,
        rope_last=hasattr(arguments, INDEXER_ORDER),
    )
    common = _common(header, arguments, kept, optimizer, model, for_bridge=for_bridge)
    for (tp_rank, pp_rank, _), state in kept.rng.items():
        place_in_grid, grid = (pp_rank, tp_rank), (layout.pp, layout.tp)
        model.objects.append(("rng_state", place_in_grid, grid, state))
    stored: Stored = _Zarr(model) if backend == "zarr" else _TorchDist(model, options.files or 1)
    # Cached, because hundreds of thousands of chunks lie in a few files.
    in_version = cache(f"{version}/{{}}".format)
    chunks = ((chunk, in_version(file), record) for chunk, file, record in stored.chunks())
    placements, zeros = place(chunks, header, options)
    files: dict[str, FileLayout] = {
        f"{version}/{name}": layout for name, layout in stored.files().items()
    }
    files[f"{version}/{torch_dist.COMMON_FILE}"] = torch_zip.plan(common, "common")
    files[f"{version}/{torch_dist.FORMAT_FILE}"] = PlainFile(torch_dist.format_json(backend))
    if for_bridge:
        has = {"with_optimizer": optimizer.writer is not None, "with_rng": bool(kept.rng)}
        files |= bridge_files(header, layout, arguments, iteration, **has)
    return OutputPlan(
        files | tracker_and_sidecars(header, iteration), placements, zeros, kept.notices
    )


def _common(
    header: Header,
    arguments: Namespace,
    kept: OutputTraining,
    optimizer: OptimizerForm,
    model: "GlobalModel",
    *,
    for_bridge: bool,
) -> dict[str, Any]:
    """The content of common.pt: all state that is not sharded."""
    common: dict[str, Any] = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": header.training.iteration,
        **kept.state(None, optimizer.state()),
        "num_floating_point_operations_so_far": header.training.floating_point_operations,
    }
    content = optimizer.content()
    if not model.stacked:
        content["non_homogeneous_layers"] = True
    if content or for_bridge:
        common["content_metadata"] = CONTENT | content
    return common


class PlacedTensor(NamedTuple):
    """A native tensor of a single rank, placed in a global tensor."""

    native: NativeTensor
    key: str
    """Key of the global tensor."""
    place: Shape
    """Position in the first axes of the global tensor."""
    dtype: str
    ranks: int
    """The number of ranks that the tensor is split for."""
    slot: str


@dataclass(frozen=True)
class GlobalModel:
    """The tensors and objects of a whole model by their keys."""

    stacked: bool
    """True if layers are stacked, which they aren't if they differ."""
    tensors: list[PlacedTensor]
    shapes: Mapping[str, Shape]
    """Shapes of the global tensors, by key."""
    objects: list[tuple[str, Shape, Shape, Any]]
    """(key, place, grid, value) of an empty `_extra_state` for every module that has one."""

    @classmethod
    def of(
        cls,
        header: Header,
        layout: Layout,
        padded: int,
        optimizer: OptimizerForm,
        *,
        local: bool,
        rope_last: bool,
    ) -> "GlobalModel":
        """The model in one piece. layout: the layout whose ranks the chunks are made for. padded: rows of the vocabulary.

        local: True for Megatron's own layers instead of Transformer Engine's. rope_last: True if indexers have their
        rotary elements last.
        """
        config = header.config
        is_renamed = local and _renames_local_layers(config)
        naming = CORE
        if local:
            naming = CORE_LOCAL_KEYS if is_renamed else CORE_LOCAL
        if rope_last:
            naming = with_rope_last(naming)
        rows = family(config.family).rows
        every = unsharded_tensors(rows, config, naming, vocab_rows=padded)
        natives = [each for each in every if each.copy is None or each.copy.written]
        stacked = stacks_layers(config)
        # A language model inside a multimodal model has a prefix.
        full_key = in_whole if config.whole else str
        # If a parameter has several names, Megatron's optimizer uses the last.
        last_names = {tuple(native.parts): native.name for native in natives if native.copy}
        inside = [native for native in natives if not native.name.startswith(BESIDE)]
        beside = [native for native in natives if native.name.startswith(BESIDE)]
        tensors: list[PlacedTensor] = []
        shapes: dict[str, Shape] = {}
        last_places: dict[str, Shape] = {}
        for native in chain(beside, *map(pieces, inside)):
            name = native.name.removeprefix(BESIDE)
            key, place = stack(name, layers=stacked, local=is_renamed)
            if name == native.name:
                key = full_key(key)
            ranks = layout.etp if native.of_experts else layout.tp
            pairs = zip(place, last_places.get(key, place), strict=True)
            last_places[key] = tuple(max(pair) for pair in pairs)
            is_trained_name = native.name == last_names.get(tuple(native.parts), native.name)
            slots = optimizer.tensors(native) if is_trained_name else ()
            for prefix, slot in (("", WEIGHT), *slots):
                dtype = native_dtype(header, native, slot)
                tensors.append(PlacedTensor(native, prefix + key, place, dtype, ranks, slot))
                grid = (last + 1 for last in last_places[key])
                shapes[prefix + key] = (*grid, *native.shape)
        _require_one_dtype(tensors)
        names = [native.name for native in inside]
        objects = [(full_key(key), *rest) for key, *rest in _extra_objects(names, stacked, local)]
        if config.whole is not None:
            built = [native.name for native in beside if config.whole.builds(native.name)]
            tower = [name.removeprefix(BESIDE) for name in built]
            objects += _extra_objects(tower, stacked, local)
        return cls(stacked, tensors, shapes, objects)

    def chunks(self) -> Iterator[PlannedChunk]:
        """The chunks of all tensors. Each call makes them anew, because a large model has hundreds of thousands."""
        for native, key, place, dtype, ranks, slot in self.tensors:
            yield from chunks_of(native, key, place, dtype, ranks, slot)


def _renames_local_layers(config: ModelConfig) -> bool:
    """True if local layers use Transformer Engine's names as keys. Latent attention and hybrids keep their own names."""
    return not config.latent.kv_rank and not config.has("hybrid_stack")


def _require_one_dtype(tensors: list[PlacedTensor]) -> None:
    dtypes: dict[str, str] = {}
    for tensor in tensors:
        if dtypes.setdefault(tensor.key, tensor.dtype) != tensor.dtype:
            raise NotExpressible(
                f"{tensor.key}: would stack layers of {dtypes[tensor.key]} and {tensor.dtype}; give --dtype to have them all the same"
            )


def _extra_objects(
    names: list[str], stacked: bool, local: bool
) -> Iterator[tuple[str, Shape, Shape, Any]]:
    """(key, place, grid, None) of the extra state of each module. names: tensors of the modules."""
    # GPTModel leaves out the extra state of the head; MambaModel, BertModel and T5Model have it.
    with_head = any(name.startswith(("decoder.final_norm.", "lm_head.")) for name in names)

    def is_saved(name: str) -> bool:
        if is_of_linear_layer(name):
            return True
        return with_head if "output_layer" in name else not local

    modules = [
        name for name in extra_states(names, CORE_LOCAL if local else CORE) if is_saved(name)
    ]
    if not local:
        norms = [name for name in names if name.endswith(_NORMS_WITH_STATE)]
        modules += [name.removesuffix("weight") + "_extra_state" for name in norms]
    placed = [stack(name, layers=stacked) for name in modules]
    grids: dict[str, Shape] = {}
    for key, place in placed:
        pairs = zip(grids.get(key, place), place, strict=True)
        grids[key] = tuple(max(size, index + 1) for size, index in pairs)
    for key, place in placed:
        yield key, place or (0,), grids[key] or (1,), None


_NORMS_WITH_STATE = (
    "q_layernorm.weight",
    "k_layernorm.weight",
    "kv_layernorm.weight",
    "indexer.k_norm.weight",
)
"""Endings of further tensors whose modules in Transformer Engine have an extra state."""


class Stored(Protocol):
    """The files of one format."""

    def chunks(self) -> Iterator[tuple[PlannedChunk, str, str]]:
        """(chunk, file, record) of every chunk, as it gets its place. Call it once."""
        ...

    def files(self) -> Mapping[str, FileLayout]:
        """All files. Call it after every chunk has its place."""
        ...


class _TorchDist:
    """Zip archives in `count` files, and `.metadata`."""

    def __init__(self, model: GlobalModel, count: int) -> None:
        self._model, self._files = model, DistcpFiles(count)

    def chunks(self) -> Iterator[tuple[PlannedChunk, str, str]]:
        for chunk in self._model.chunks():
            whole = self._model.shapes[chunk.key]
            file, record = self._files.add_chunk(
                chunk.key, whole, chunk.dtype, chunk.offset, chunk.shape
            )
            yield chunk, file, record

    def files(self) -> Mapping[str, FileLayout]:
        for key, place_in_grid, grid, value in self._model.objects:
            name = f"{key}/shard_{'.'.join(map(str, place_in_grid))}_{'.'.join(map(str, grid))}"
            self._files.add_object(name, [value])
        return self._files.layouts(nested_keys=False)


class _Zarr:
    """A file for every chunk and every object."""

    def __init__(self, model: GlobalModel) -> None:
        self._model = model
        self._files: dict[str, FileLayout] = {}

    def chunks(self) -> Iterator[tuple[PlannedChunk, str, str]]:
        steps = {chunk.key: chunk.shape for chunk in self._model.chunks()}
        for chunk in self._model.chunks():
            step = steps[chunk.key]
            file = f"{chunk.key}/{_file_in_array(chunk, step)}"
            self._files[file] = zarr_arrays.ChunkLayout(chunk.shape, chunk.dtype)
            described = zarr_arrays.array_json(self._model.shapes[chunk.key], step, chunk.dtype)
            self._files[f"{chunk.key}/{zarr_arrays.ARRAY_FILE}"] = PlainFile(described)
            yield chunk, file, zarr_arrays.ChunkLayout.RECORD

    def files(self) -> Mapping[str, FileLayout]:
        empty = torch_zip.plan(None, "archive")
        for key, place_in_grid, grid, value in self._model.objects:
            file = f"{key}/{zarr_arrays.object_name(place_in_grid, grid)}"
            self._files[file] = empty if value is None else torch_zip.plan(value, "archive")
        return self._files


def _file_in_array(chunk: PlannedChunk, step: Shape) -> str:
    """The name of a chunk's file: its place in the grid of chunks, such as `0.2`.

    step: shape of all chunks of the array. Raises LayoutError for a chunk of another shape.
    """
    places = [divmod(first, size) for first, size in zip(chunk.offset, step, strict=True)]
    on_grid = all(rest == 0 for _, rest in places)
    if chunk.shape != step or not on_grid:
        raise LayoutError(
            f"{chunk.key}: its shards are of different sizes, which zarr arrays can't have"
        )
    return ".".join(str(index) for index, _ in places)


def place(
    chunks: Iterator[tuple[PlannedChunk, str, str]], header: Header, options: SaveOptions
) -> tuple[dict[Key, list[Placement]], list[tuple[str, str, int, int]]]:
    """(placements, zeros) of all chunks, from (chunk, file, record)."""
    placements: dict[Key, list[Placement]] = {}
    zeros: list[tuple[str, str, int, int]] = []
    for chunk, file, record in chunks:
        row_bytes = chunk.cols * ITEMSIZE[chunk.dtype]
        padding, parts = chunk.padding, chunk.parts
        if padding and options.vocab_padding == "repeat":
            ((name, regions),) = parts
            tokens = header.config.tokens_of(name)
            last_row = Box(tokens - 1, tokens, 0, chunk.cols)
            again = Region(last_row, padding.start, order=Repeated(len(padding)))
            parts = [(name, (*regions, again))]
        elif padding:
            zeros.append((file, record, padding.start * row_bytes, len(padding) * row_bytes))
        for name, regions in parts:
            if regions:
                key = Key(name, chunk.slot)
                shift = native_shift(header, chunk.shift, key)
                at = Placement(file, record, row_bytes, regions, shift=shift)
                placements.setdefault(key, []).append(at)
    return placements, zeros
