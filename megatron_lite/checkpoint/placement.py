"""Where a rank's tensors lie in the whole model: the keys, offsets and global shapes of Megatron core's `torch_dist` checkpoints.

All of it follows from the family's table: a rank's tensor and the same tensor of a single rank are made of rectangles of
the same canonical tensors, and where both hold a rectangle is what places one in the other. Layers of all stages lie under
one key, stacked along a leading axis, where they are all alike, and under keys of their own where they differ; the experts of all
ranks are stacked behind it; norms have Transformer Engine's names (megatron/core/dist_checkpointing).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from formats.tensor import Shape, matrix_shape
from megaconv.families import family
from megaconv.megatron.distributed.keys import stacks_layers
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import CORE, CORE_LOCAL, Naming
from megaconv.model.natives import NativeTensor, Region, native_tensors
from megaconv.model.table import encoder_layers

_LAYER = re.compile(r"((decoder|encoder)\.layers)\.(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)(\..*)")

_LOCAL = (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
"""The norm before experts: Transformer Engine's key, and that of local layers, which have no such matrix."""


@dataclass(frozen=True)
class Run:
    """Rows of a rank's tensor that lie one after another in the whole tensor too."""

    row: int
    rows: int
    whole_row: int
    whole_col: int


@dataclass(frozen=True)
class Place:
    """Of one tensor of a rank."""

    key: str
    stacked: tuple[tuple[int, int], ...]
    """(its number, of how many) along each leading axis: of layers, and of experts; in the whole model."""
    local: Shape
    whole: Shape
    """Without those axes."""
    runs: tuple[Run, ...]
    native: NativeTensor

    @property
    def global_shape(self) -> Shape:
        return *(count for _, count in self.stacked), *self.whole


@dataclass(frozen=True)
class Shard:
    """A block of a checkpoint's tensor."""

    key: str
    offset: Shape
    global_shape: Shape
    tensor: Tensor
    """In the checkpoint's number of axes."""


def places(
    config: ModelConfig,
    layout: Layout,
    tp_rank: int,
    chunk: Chunk,
    vocab_rows: int,
    naming: Naming,
    ep_rank: int = 0,
    etp_rank: int | None = None,
    *,
    local: bool = False,
) -> dict[str, Place]:
    """By the name that a rank's tensor has in its chunk. vocab_rows: with padding. naming: of the model's parameters.

    local: with the keys that local layers have for norms.
    """
    padded = changed(config, {"vocab": vocab_rows})  # padding rows are placed like any others
    rows, single = family(config.family).rows, replace(layout, tp=1, etp=1, ep=1)
    # Local layers of latent attention have keys of their own names; all others Transformer Engine's, but for one.
    latent = config.latent.kv_rank > 0
    keys = CORE_LOCAL if local and latent else CORE
    named, keyed = (
        list(native_tensors(rows, padded, spelled, layout, tp_rank, chunk, vocab_rows, ep_rank, etp_rank))
        for spelled in (naming, keys)
    )
    whole = {native.name: native for native in native_tensors(rows, padded, keys, single, 0, chunk, vocab_rows)}
    first = ep_rank * (config.experts.count // layout.ep)
    found = {}
    for native, other in zip(named, keyed, strict=True):
        expert = _EXPERT.fullmatch(other.name)
        entire = whole[_numbered(other.name, first)]
        key, stacked = _key(other.name.replace(*_LOCAL) if local and not latent else other.name, config, chunk)
        if expert is not None:
            stacked = (*stacked, (first + int(expert[2]), config.experts.count))
        runs = tuple(_runs(native, entire))
        found[native.name] = Place(
            key,
            stacked,
            native.shape,
            entire.shape,
            runs,
            native,
        )
    return found


def _key(name: str, config: ModelConfig, chunk: Chunk) -> tuple[str, tuple[tuple[int, int], ...]]:
    """(without the number of an expert, and without the layer's where layers are stacked; then the layer's, of how many)."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return _EXPERT.sub(r"\1.experts\3", name), ()
    first, layers = layers_before(match[2], config, chunk)
    layer, inner = first + int(match[3]), _EXPERT.sub(r"\1.experts\3", match[4])
    return (match[1] + inner, ((layer, layers),)) if stacks_layers(config) else (f"{match[1]}.{layer}{inner}", ())


def layers_before(stack: str, config: ModelConfig, chunk: Chunk) -> tuple[int, int]:
    """(layers of a stack before those of a chunk, layers of the stack). stack: `encoder` or `decoder`, as names have it."""
    if stack == "encoder" and config.encoder.layers:
        return encoder_layers(config, chunk).start, config.encoder.layers
    return chunk.first_layer, config.layer_count


def _numbered(name: str, first: int) -> str:
    """With the number that an expert has in the whole model."""
    return _EXPERT.sub(lambda found: f"{found[1]}.local_experts.{first + int(found[2])}{found[3]}", name)


def _runs(native: NativeTensor, whole: NativeTensor) -> Iterator[Run]:
    """Neighbours are joined: an interleaved qkv is one run, [gate; up] are two."""
    pieces = sorted(
        (
            Run(region.row, region.box.rows, *_place_in(region, whole.parts[name]))
            for name, regions in native.parts.items()
            for region in regions
        ),
        key=lambda run: run.row,
    )
    current = pieces[0]
    for run in pieces[1:]:
        if run.whole_row - current.whole_row == run.row - current.row == current.rows:
            current = replace(current, rows=current.rows + run.rows)
        else:
            yield current
            current = run
    yield current


def _place_in(region: Region, candidates: tuple[Region, ...]) -> tuple[int, int]:
    """(row, column) in the whole tensor of a region's first element."""
    for whole in candidates:
        if whole.box.row0 <= region.box.row0 < whole.box.row1:
            return whole.row + region.box.row0 - whole.box.row0, whole.col + region.box.col0 - whole.box.col0
    raise AssertionError("a rank's rectangle lies in no rectangle of the whole tensor")


def shards(place: Place, tensor: Tensor) -> Iterator[Shard]:
    """A rank's whole tensor, split into the checkpoint's blocks."""
    return flat_shards(place, place.key, tensor.reshape(-1), 0, tensor.numel())


def flat_shards(place: Place, key: str, flat: Tensor, start: int, end: int) -> Iterator[Shard]:
    """Elements start..end of a rank's flattened tensor as blocks: views of flat [end - start], which starts at `start`."""
    _, cols = matrix_shape(place.local)
    for first, last, col0, col1 in _rectangles(start, end, cols):
        for run in place.runs:
            row0, row1 = max(first, run.row), min(last, run.row + run.rows)
            if row0 >= row1:
                continue
            at = row0 * cols + col0 - start
            block = flat[at : at + (row1 - row0) * (col1 - col0)]  # rows are whole, or there is only one
            offset: Shape = (run.whole_row + row0 - run.row, run.whole_col + col0)
            shape: Shape = (row1 - row0, col1 - col0)
            if len(place.whole) == 1:
                offset, shape = offset[:1], shape[:1]
            offset = (*(number for number, _ in place.stacked), *offset)
            shape = (*(1 for _ in place.stacked), *shape)
            yield Shard(key, offset, place.global_shape, block.view(shape))


def _rectangles(start: int, end: int, cols: int) -> Iterator[tuple[int, int, int, int]]:
    """(row0, row1, col0, col1) of a run of a matrix's elements: the end of a row, whole rows, the start of a row."""
    while start < end:
        row, col = divmod(start, cols)
        if col or end - start < cols:
            stop = min(end, (row + 1) * cols)
            yield row, row + 1, col, col + stop - start
        else:
            stop = end // cols * cols
            yield row, stop // cols, 0, cols
        start = stop
