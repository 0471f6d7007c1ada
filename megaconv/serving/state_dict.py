"""The tensors of one rank under the names of a naming scheme, read when they are asked for: `megaconv.state_dict(path)`.

A native tensor becomes a file without headers (`planned_file.py`), so that a state dict and a served file read the same
rectangles of the source.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from formats.output import Record
from formats.tensor import ITEMSIZE, LazyTensor, matrix_shape
from megaconv.engine.plan import Placement, native_dtype, native_shift
from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.megatron.rank_files.output_layout import DEFAULT_DIVISOR
from megaconv.model.beside import Whole
from megaconv.model.ir import Header, Key
from megaconv.model.layout import Chunk, Layout, padded_vocab
from megaconv.model.naming import Naming
from megaconv.model.natives import native_tensors
from megaconv.model.regions import NativeTensor
from megaconv.serving.planned_file import Placed, PlannedFile

if TYPE_CHECKING:
    import torch

NAMES = {
    "hf": Naming("hf"),
    "core": Naming("core"),
    "core_local": Naming("core", ("local",)),
    "core_grouped": Naming("core", ("grouped",)),
    "legacy": Naming("legacy"),
}
"""Naming schemes of a state dict by the names under which callers choose them."""


@dataclass(frozen=True)
class _Bytes:
    """The layout of a file that holds a native tensor and nothing else."""

    size: int
    needs_checksums = False

    @cached_property
    def records(self) -> Mapping[str, Record]:
        return {"": Record(0, self.size)}

    def headers(self, _checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        return iter(())


@dataclass(frozen=True)
class Slice:
    """A tensor of a state dict that is not read yet. `[...]` reads it, as for a slice of safetensors."""

    file: PlannedFile
    dtype: str
    shape: tuple[int, ...]

    def get_shape(self) -> list[int]:
        """The shape, as safetensors' slices return it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The dtype's name in torch. safetensors' slices return a name of their own."""
        return self.dtype

    def read(self) -> "torch.Tensor":
        """The tensor, in new memory. Raises CheckpointError if the source can't be read."""
        import torch

        content = self.file.read(0, self.file.size)
        values: Any = (
            torch.frombuffer(content, dtype=torch.uint8)
            if content
            else torch.empty(0, dtype=torch.uint8)
        )
        found: torch.Tensor = values.view(getattr(torch, self.dtype)).reshape(self.shape)
        return found

    def __getitem__(self, index: Any) -> "torch.Tensor":
        return self.read()[index]


@dataclass(frozen=True, repr=False)
class StateDict(Mapping[str, "torch.Tensor"]):
    """A rank's tensors by name. A tensor is read each time when it is asked for; `dict(…)` reads all of them."""

    slices: Mapping[str, Slice]
    """The tensors before they are read, with their shapes and dtypes."""

    def __getitem__(self, name: str) -> "torch.Tensor":
        return self.slices[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    def __repr__(self) -> str:
        return f"<StateDict: {len(self)} tensors>"


def state_dict(
    header: Header,
    tensors: Mapping[Key, LazyTensor],
    names: str,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    divisor: int | None = None,
) -> StateDict:
    """The state dict of a tensor-parallel rank.

    names: a key of NAMES. divisor: in Megatron's schemes the vocabulary is padded to a multiple of divisor * tp. None: the
    source's divisor, or 128.
    Raises UsageError for a rank or a scheme that doesn't exist, LayoutError if a tensor can't be sharded, and
    NotExpressible if the scheme has no name for a tensor.
    """
    if names not in NAMES:
        raise UsageError(f"names={names!r}: expected one of {', '.join(NAMES)}")
    if not 0 <= tp_rank < tp:
        raise UsageError(f"tp_rank={tp_rank}: expected 0 to {tp - 1} with tp={tp}")
    config = header.config
    if config.whole is not None and names != "hf":
        raise UsageError(
            f"names={names!r}: a multimodal model has only names='hf'; pass text_only=True for its language model"
        )
    whole = config.whole or Whole({})
    if names == "hf":
        naming, vocab_rows = Naming("hf", whole.experts), config.vocab
    else:
        padded_to = divisor or header.vocab_divisor or DEFAULT_DIVISOR
        naming, vocab_rows = NAMES[names], padded_vocab(config.vocab, padded_to, tp)
    natives = native_tensors(
        family(config.family).rows,
        config,
        naming,
        Layout(tp=tp, stage_layers=(config.layer_count,)),
        tp_rank,
        Chunk.of_whole_model(config.layer_count),
        vocab_rows,
    )
    slices = {}
    for native in natives:
        if native.copy is None or native.copy.written:
            name = whole.hf_name(native.name) if names == "hf" else native.name
            slices[name] = _slice(native, header, tensors)
    return StateDict(slices)


def _slice(native: NativeTensor, header: Header, tensors: Mapping[Key, LazyTensor]) -> Slice:
    dtype = native_dtype(header, native)
    rows, columns = matrix_shape(native.shape)
    row_bytes = columns * ITEMSIZE[dtype]
    parts = []
    for name, regions in native.parts.items():
        key = Key(name)
        shift = native_shift(header, native.shift, key)
        filled = native.with_padding(regions, header.config.tokens_of(name))
        place = Placement("", "", row_bytes, filled, shift=shift)
        parts.append(Placed(0, place, key, tensors[key]))
    return Slice(PlannedFile(_Bytes(rows * row_bytes), tuple(parts)), dtype, tuple(native.shape))
