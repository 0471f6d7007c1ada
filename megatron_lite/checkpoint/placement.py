"""Places a rank's tensors in the whole model: keys, offsets and global shapes of Megatron core's `torch_dist` checkpoints.

The family's table determines the placement. A rank's tensor consists of rectangles of canonical tensors. The same
tensor of a single-rank model consists of rectangles of the same canonical tensors. A rectangle that both contain gives
the offset of one in the other.

- If all layers have the same structure, the layers of all stages are stacked along a leading axis under one key.
- If layers differ, each layer has its own keys.
- Experts of all ranks are stacked along the next axis.
- Norms have Transformer Engine's names.
- The projections and convolutions of mixers with a state have a key for each part: `in_proj.weight.z`, `.x` …

Source: megatron/core/dist_checkpointing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from formats.tensor import Shape, matrix_shape
from megaconv.families import family
from megaconv.megatron.distributed.keys import pieces, stacks_layers
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import CORE, CORE_LOCAL, Naming
from megaconv.model.natives import NativeTensor, Region, native_tensors
from megaconv.model.table import encoder_layers

_LAYER = re.compile(
    r"((?:(?:query|context|shared)_model\.)?(decoder|encoder)\.layers)\.(\d+)(\..*)"
)
_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)(\..*)")

_LOCAL = (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
"""The norm before experts: Transformer Engine's key, and the key in local layers.

The latter names a matrix (linear_fc1) that layers with experts don't have.
"""


@dataclass(frozen=True)
class Run:
    """Rows of a rank's tensor that are also contiguous in the whole tensor."""

    row: int
    rows: int
    whole_row: int
    whole_col: int
    piece: str = ""
    """The end of the key if the tensor's parts have keys of their own: `.z`."""


@dataclass(frozen=True)
class Place:
    """The place of one rank's tensor in the whole tensor."""

    key: str
    stacked: tuple[tuple[int, int], ...]
    """(index, size) of each leading axis over the whole model: layers first, then experts."""
    local: Shape
    wholes: Mapping[str, Shape]
    """The shape without the leading axes of each piece, by the end of its key; of one tensor with the end "" as a rule."""
    runs: tuple[Run, ...]
    native: NativeTensor

    def global_shape(self, piece: str) -> Shape:
        """Return the shape of a piece over the whole model."""
        return *(count for _, count in self.stacked), *self.wholes[piece]


@dataclass(frozen=True)
class Shard:
    """A block of one tensor in a checkpoint."""

    key: str
    offset: Shape
    global_shape: Shape
    tensor: Tensor
    """The block; it has as many axes as the checkpoint's tensor."""


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
    """Return the place of each tensor of a rank's chunk, by the tensor's name in that chunk.

    vocab_rows: the vocabulary with padding. naming: the naming scheme of the model's parameters.
    local: use the norm keys of Megatron's local layers.
    """
    # Padding rows are placed like any others.
    padded = changed(config, {"vocab": vocab_rows})
    rows = family(config.family).rows
    # Local layers of latent attention, and of hybrids with Mamba layers, are saved under their own names.
    # Other local layers have Transformer Engine's names, except for _LOCAL.
    own_names = config.latent.kv_rank > 0 or config.has("hybrid_stack")
    keys = CORE_LOCAL if local and own_names else CORE
    # Retro's encoder has a norm before its first MLP under a name of its own.
    renames_norms = local and not own_names and not config.has("retrieval")
    at_rank = layout, tp_rank, chunk, vocab_rows, ep_rank, etp_rank
    named = native_tensors(rows, padded, naming, *at_rank)
    keyed = native_tensors(rows, padded, keys, *at_rank)
    # The whole tensors are those of the same model on a single rank.
    single = replace(layout, tp=1, etp=1, ep=1)
    wholes = native_tensors(rows, padded, keys, single, 0, chunk, vocab_rows)
    whole_by_name = {native.name: native for native in wholes}
    # The number of this rank's first expert in the whole model.
    first_expert = ep_rank * (config.experts.count // layout.ep)
    found = {}
    for native, other in zip(named, keyed, strict=True):
        name = other.name
        whole = whole_by_name[_numbered(name, first_expert)]
        spelled = name.replace(*_LOCAL) if renames_norms else name
        key, of_layer = _key(spelled, config, chunk)
        of_expert = _expert_axis(name, config, first_expert)
        found[native.name] = Place(
            key=key,
            stacked=(*of_layer, *of_expert),
            local=native.shape,
            wholes={_end(piece, whole): piece.shape for piece in pieces(whole)},
            runs=tuple(_runs(native, whole)),
            native=native,
        )
    return found


def _expert_axis(name: str, config: ModelConfig, first_expert: int) -> tuple[tuple[int, int], ...]:
    """Return ((expert, experts),) for an expert's tensor, else (). first_expert: the first one of this rank."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return ()
    return ((first_expert + int(match[2]), config.experts.count),)


def _key(name: str, config: ModelConfig, chunk: Chunk) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return (checkpoint key, leading axes).

    The key has no expert number, and no layer number if layers are stacked. The leading axes are then ((layer,
    layers),).
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return _without_number(name), ()
    layers_of, stack, number, inner = match.groups()
    first, layers = layers_before(stack, config, chunk)
    layer = first + int(number)
    inner = _without_number(inner)
    if stacks_layers(config):
        return layers_of + inner, ((layer, layers),)
    return f"{layers_of}.{layer}{inner}", ()


def _without_number(name: str) -> str:
    """Return the name without the expert's number."""
    return _EXPERT.sub(r"\1.experts\3", name)


def layers_before(stack: str, config: ModelConfig, chunk: Chunk) -> tuple[int, int]:
    """Return (number of layers of a stack before the chunk, number of layers of the stack). stack: `encoder` or `decoder`."""
    if stack == "encoder" and config.encoder.layers:
        return encoder_layers(config, chunk).start, config.encoder.layers
    return chunk.first_layer, config.layer_count


def _numbered(name: str, first: int) -> str:
    """Return the name with the expert's number in the whole model."""
    return _EXPERT.sub(
        lambda found: f"{found[1]}.local_experts.{first + int(found[2])}{found[3]}", name
    )


def _runs(native: NativeTensor, whole: NativeTensor) -> Iterator[Run]:
    """Yield the contiguous runs. Adjacent runs are joined: an interleaved qkv is one run, [gate; up] are two."""
    found = []
    for piece in pieces(whole):
        end = _end(piece, whole)
        for name, candidates in piece.parts.items():
            for region in native.parts.get(name, ()):
                row, col = _place_in(region, candidates)
                found.append(Run(region.row, region.box.rows, row, col, end))
    found.sort(key=lambda run: run.row)
    current = found[0]
    for run in found[1:]:
        follows = run.whole_row - current.whole_row == run.row - current.row == current.rows
        if follows and run.piece == current.piece:
            current = replace(current, rows=current.rows + run.rows)
        else:
            yield current
            current = run
    yield current


def _end(piece: NativeTensor, whole: NativeTensor) -> str:
    """Return the end of a piece's key; empty for a tensor that is not split."""
    return piece.name.removeprefix(whole.name)


def _place_in(region: Region, candidates: tuple[Region, ...]) -> tuple[int, int]:
    """Return (row, column) in the whole tensor of the region's first element."""
    for whole in candidates:
        if whole.box.row0 <= region.box.row0 < whole.box.row1:
            return (
                whole.row + region.box.row0 - whole.box.row0,
                whole.col + region.box.col0 - whole.box.col0,
            )
    raise AssertionError("a rank's rectangle lies in no rectangle of the whole tensor")


def shards(place: Place, tensor: Tensor) -> Iterator[Shard]:
    """Split a rank's whole tensor into the checkpoint's blocks."""
    return flat_shards(place, place.key, tensor.reshape(-1), 0, tensor.numel())


def flat_shards(place: Place, key: str, flat: Tensor, start: int, end: int) -> Iterator[Shard]:
    """Split elements start..end of a rank's flattened tensor into blocks. The blocks are views of `flat` [end - start]."""
    _, cols = matrix_shape(place.local)
    for row0, row1, col0, col1 in _rectangles(start, end, cols):
        for run in place.runs:
            first, last = max(row0, run.row), min(row1, run.row + run.rows)
            if first >= last:
                continue
            rows, columns = last - first, col1 - col0
            at = first * cols + col0 - start
            block = flat[at : at + rows * columns]  # contiguous: whole rows, or a single row
            whole_row = run.whole_row + first - run.row
            whole_col = run.whole_col + col0
            yield _shard(place, key, run.piece, block, (whole_row, whole_col), (rows, columns))


def _shard(
    place: Place,
    key: str,
    piece: str,
    block: Tensor,
    corner: tuple[int, int],
    size: tuple[int, int],
) -> Shard:
    """Return a block of a piece of the whole tensor.

    key: without the piece's end. corner: row and column of its first element. size: rows and columns.
    """
    stacked, whole = tuple(number for number, _ in place.stacked), place.wholes[piece]
    offset = (*stacked, *_with_axes(whole, *corner, fill=0))
    shape = (*(1 for _ in stacked), *_with_axes(whole, *size, fill=1))
    return Shard(key + piece, offset, place.global_shape(piece), block.view(shape))


def _with_axes(whole: Shape, row: int, col: int, *, fill: int) -> Shape:
    """Return a row and a column with as many axes as `whole`: a vector has no columns, a convolution [channels, 1, width].

    A single number has no axes.
    """
    if not whole:
        return ()
    if len(whole) == 1:
        return (row,)
    between = whole[1:-1]
    assert all(size == 1 for size in between), (
        "rows of a tensor with more axes are not contiguous blocks"
    )
    return (row, *(fill for _ in between), col)


def _rectangles(start: int, end: int, cols: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row0, row1, col0, col1) for a range of a matrix's elements: the end of a row, whole rows, the start of a row."""
    while start < end:
        row, col = divmod(start, cols)
        if col or end - start < cols:
            stop = min(end, (row + 1) * cols)
            yield row, row + 1, col, col + stop - start
        else:
            stop = end // cols * cols
            yield row, stop // cols, 0, cols
        start = stop
