"""Plans a Megatron core checkpoint in `torch_dist` or `zarr` format: chunks in files, extra states, `common.pt`.

Megatron core 0.9 to 0.19 needs metadata.json, common.pt, the tracker, and an `_extra_state` object for every module
that has one. The modules of Transformer Engine's versions differ, so the objects of all versions are written.
`global_model.py` lists the tensors and objects. This module gives them files.
Source: megatron/core/dist_checkpointing.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Protocol

from formats import rank_files, torch_dist, torch_zip, zarr_arrays
from formats.distcp_files import DistcpFiles
from formats.output import FileLayout, PlainFile
from formats.tensor import ITEMSIZE, Box, Shape
from megaconv.engine.plan import OutputPlan, Placement, native_shift
from megaconv.errors import LayoutError
from megaconv.megatron.arguments.head_sizes import require_scores_shown
from megaconv.megatron.arguments.sparse import INDEXER_ORDER
from megaconv.megatron.distributed.bridge_files import CONTENT, bridge_files
from megaconv.megatron.distributed.chunks import PlannedChunk
from megaconv.megatron.distributed.global_model import GlobalModel, PlacedObject
from megaconv.megatron.distributed.optimizer_plan import OptimizerForm, choose_form
from megaconv.megatron.optimizer.training_output import (
    OutputTraining,
    output_training,
    with_form_notice,
)
from megaconv.megatron.rank_files.iteration import at_iteration, directory_iteration
from megaconv.megatron.rank_files.plan import megatron_args, tracker_and_sidecars
from megaconv.megatron.states.hybrid_form import writes_hybrid
from megaconv.megatron.states.recipient import is_for_bridge
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key
from megaconv.model.layout import Layout, divide
from megaconv.model.natives import Region
from megaconv.model.regions import Repeated
from megaconv.model.sharding import rank_sizes
from megaconv.options import SaveOptions


def plan_dist(header: Header, options: SaveOptions, layout: Layout) -> OutputPlan:
    """The plan of a distributed checkpoint. layout: the layout whose ranks the chunks are made for.

    Raises LayoutError for a model that can't be sharded this way, NotExpressible.
    """
    _check_layout(header.config, layout)
    for_bridge = is_for_bridge(options)
    header = at_iteration(header, options, without_releases=for_bridge)
    arguments = _arguments(header, options, layout)
    require_scores_shown(header.config, arguments.padded_vocab_size)
    kept = output_training(
        header, layout, keeps_rng=layout.ep == 1, distributed=bool(options.distributed_optimizer)
    )
    optimizer = choose_form(kept, options)
    if not optimizer.distributed:
        kept = with_form_notice(kept, options)
    vars(arguments).update(kept.arguments(distributed=optimizer.distributed))
    model = GlobalModel.of(
        header,
        layout,
        arguments.padded_vocab_size,
        optimizer,
        local=options.transformer_impl == "local",
        rope_last=hasattr(arguments, INDEXER_ORDER),
        hybrid=writes_hybrid(options.extra, header.training.arguments),
    )
    model.objects.extend(_rng_objects(kept, layout))

    iteration = directory_iteration(header.training)
    version = rank_files.iteration_directory(iteration)
    stored = _stored(model, options)
    placements, zeros = place(_chunks_in(version, stored), header, options)

    common = _common(header, arguments, kept, optimizer, model, for_bridge=for_bridge)
    in_version: dict[str, FileLayout] = {
        **stored.files(),
        torch_dist.COMMON_FILE: torch_zip.plan(common, "common"),
        torch_dist.FORMAT_FILE: PlainFile(torch_dist.format_json(options.ckpt_format)),
    }
    files = {f"{version}/{name}": file for name, file in in_version.items()}
    if for_bridge:
        files |= bridge_files(
            header,
            layout,
            arguments,
            iteration,
            with_optimizer=optimizer.writer is not None,
            with_rng=bool(kept.rng),
        )
    files |= tracker_and_sidecars(header, iteration)
    return OutputPlan(files, placements, zeros, kept.notices)


def _check_layout(config: ModelConfig, layout: Layout) -> None:
    """Raise LayoutError for a model that can't be sharded for this layout."""
    if layout.encoder_stage_layers:
        raise LayoutError(
            f"pp = {layout.pp}: a distributed checkpoint of a model with an encoder and a decoder is written for one pipeline stage "
            "(Megatron core's own for several don't hold its head); choose --pp 1, or --ckpt-format torch"
        )
    rank_sizes(config, layout, shares_heads=True)


def _arguments(header: Header, options: SaveOptions, layout: Layout) -> Namespace:
    """The arguments of a run that saves in this format."""
    arguments = megatron_args(header, options, layout, transformer_impl=options.transformer_impl)
    arguments.ckpt_format = options.ckpt_format
    arguments.use_dist_ckpt = True
    arguments.dist_ckpt_format = options.ckpt_format
    divide(arguments.padded_vocab_size, layout.tp, "padded vocabulary", "tensor parallel size (tp)")
    return arguments


def _rng_objects(kept: OutputTraining, layout: Layout) -> Iterator[PlacedObject]:
    """The states of the random-number generators, in the grid of pipeline and tensor-parallel ranks."""
    for (tp_rank, pp_rank, _), state in kept.rng.items():
        yield PlacedObject("rng_state", (pp_rank, tp_rank), (layout.pp, layout.tp), state)


def _common(
    header: Header,
    arguments: Namespace,
    kept: OutputTraining,
    optimizer: OptimizerForm,
    model: GlobalModel,
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


class Stored(Protocol):
    """The files of one format."""

    def chunks(self) -> Iterator[tuple[PlannedChunk, str, str]]:
        """(chunk, file, record) of every chunk, as it gets its place. Call it once."""
        ...

    def files(self) -> Mapping[str, FileLayout]:
        """All files. Call it after every chunk has its place."""
        ...


def _stored(model: GlobalModel, options: SaveOptions) -> Stored:
    if options.ckpt_format == "zarr":
        return _Zarr(model)
    return _TorchDist(model, options.files or 1)


def _chunks_in(version: str, stored: Stored) -> Iterator[tuple[PlannedChunk, str, str]]:
    """(chunk, path below the root, record) of every chunk."""
    # Cached, because hundreds of thousands of chunks lie in a few files.
    path_of = cache(f"{version}/{{}}".format)
    for chunk, file, record in stored.chunks():
        yield chunk, path_of(file), record


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
            index = ".".join(map(str, place_in_grid))
            size = ".".join(map(str, grid))
            self._files.add_object(f"{key}/shard_{index}_{size}", [value])
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
    repeats_last_token = options.vocab_padding == "repeat"
    for chunk, file, record in chunks:
        row_bytes = chunk.cols * ITEMSIZE[chunk.dtype]
        padding, parts = chunk.padding, chunk.parts
        if padding and repeats_last_token:
            parts = [_with_padding(chunk, header.config)]
        elif padding:
            zeros.append((file, record, padding.start * row_bytes, len(padding) * row_bytes))
        for name, regions in parts:
            if regions:
                key = Key(name, chunk.slot)
                shift = native_shift(header, chunk.shift, key)
                placement = Placement(file, record, row_bytes, regions, shift=shift)
                placements.setdefault(key, []).append(placement)
    return placements, zeros


def _with_padding(chunk: PlannedChunk, config: ModelConfig) -> tuple[str, tuple[Region, ...]]:
    """The only part of a chunk with padding. The vocabulary's last row is repeated in the padding."""
    ((name, regions),) = chunk.parts
    tokens = config.tokens_of(name)
    last_row = Box(tokens - 1, tokens, 0, chunk.cols)
    repeated = Region(last_row, chunk.padding.start, order=Repeated(len(chunk.padding)))
    return name, (*regions, repeated)
