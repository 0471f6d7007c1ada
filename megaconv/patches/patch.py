"""A patch on the disk, and the newer checkpoint that it makes of its base.

    PATCH/delta.json         format, version, fingerprints of both checkpoints, and each tensor's blocks
    PATCH/blocks.bin         the blocks, one after the other (blocks.py)
    PATCH/header.pt          configuration and training state of the newer checkpoint, as torch.save writes them
    PATCH/files/NAME         its small files, such as the tokenizer
    PATCH/megaconv.json      the record of the newer checkpoint: the fingerprint of each tensor

delta.json:

    {"format": "megaconv-delta", "version": 1,
     "base": {"weights": FINGERPRINT, "optimizer": FINGERPRINT or null}, "new": {...},
     "tensors": [[NAME, SLOT, DTYPE, SHAPE, HAS_BASE, [SIZE, ...], HASH], ...],
     "removed": [[NAME, SLOT], ...], "options": {"optimizer": true, "text_only": false}}

Tensors are in model order, and so are their blocks in blocks.bin. A SIZE is that of a block in bytes. HASH is BLAKE3 over
all blocks of a tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from blake3 import blake3

from formats import torch_zip
from formats.ceilings import RECORD_BYTES
from formats.errors import CorruptCheckpoint
from formats.lazy_numpy import Bytes, np
from formats.regular_files import read_json
from formats.tensor import (
    ITEMSIZE,
    Box,
    InputFile,
    LazyTensor,
    Shape,
    as_shape,
    byte_count,
    row_blocks,
)
from megaconv.engine.fingerprints import Fingerprint
from megaconv.engine.plan import BLOCK_BYTES
from megaconv.errors import ModelsDiffer, UnknownFormat, UsageError
from megaconv.hub import nothing_at, resolve
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Header, Key, Source, TensorInfo
from megaconv.model.layout import layout_for
from megaconv.model.own_names import OwnNames
from megaconv.model.training import TrainingState
from megaconv.options import LoadOptions
from megaconv.patches.blocks import damaged, decode
from megaconv.patches.described import built
from megaconv.values.shifted import PlainSource

INDEX, BLOCKS, HEADER, FILES = "delta.json", "blocks.bin", "header.pt", "files"
SPARSE_INDEX = "sparse.json"
"""The index of a sparse update (sparse.py), which is no patch."""
FORMAT, VERSION = "megaconv-delta", 1


@dataclass(frozen=True)
class Entry:
    """One tensor of the newer checkpoint."""

    key: Key
    info: TensorInfo
    has_base: bool
    """True if the blocks follow from a tensor of the base of the same name, shape and dtype."""
    sizes: tuple[int, ...]
    """The size of each block in bytes."""
    digest: str
    offset: int = 0
    """The first block's place in blocks.bin."""

    def to_json(self) -> list[Any]:
        """The entry's line in delta.json."""
        name, slot = self.key
        return [
            name,
            slot,
            self.info.dtype,
            list(self.info.shape),
            self.has_base,
            list(self.sizes),
            self.digest,
        ]

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The rectangles that the blocks hold."""
        return tuple(row_blocks(self.info.shape, self.info.dtype, BLOCK_BYTES))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The place of each block in blocks.bin."""
        return tuple(accumulate(self.sizes, initial=self.offset))


@dataclass(frozen=True)
class Patch:
    """A patch, opened."""

    path: Path
    base: Mapping[str, str | None]
    """Fingerprints of the base: `weights` and `optimizer`."""
    new: Mapping[str, str | None]
    entries: tuple[Entry, ...]
    removed: tuple[Key, ...]
    header: Header
    """The header of the newer checkpoint."""
    blocks: InputFile
    options: LoadOptions
    """The options with which both checkpoints were read."""
    whole: Mapping[str, Any] | None = None
    """The config.json of the newer checkpoint if it is a multimodal model. The encoders' tables are those of the base."""

    def require_base(self, found: Fingerprint, name: str) -> None:
        """Raises ModelsDiffer if a checkpoint isn't the base of the patch. name: how the message calls it."""
        for what, expected in self.base.items():
            if expected is not None and getattr(found, what) != expected:
                raise ModelsDiffer(
                    f"{name}: is not the base of {self.path}: its fingerprint of {what} is {getattr(found, what)}, "
                    f"expected {expected}; apply the patch to the checkpoint that it was made from",
                    code="wrong-base",
                )


def is_patch(path: Path) -> bool:
    """True if a directory looks like a patch."""
    return (path / INDEX).is_file() and (path / BLOCKS).is_file()


def patch_at(place: str | Path) -> Path:
    """The local path of a patch; a patch in a store becomes a directory of stand-ins. Raises UsageError for other URIs."""
    path = resolve(place)
    if isinstance(path, str):
        raise UsageError(
            f"{place}: is no place of a patch; expected a directory, or a URI of a store"
        )
    if not path.exists():
        raise nothing_at(path)
    return path


def open_patch(path: Path) -> Patch:
    """Open a patch. Reads no block.

    Raises UnknownFormat for something else, UsageError for an update of `--sparse`, and CorruptCheckpoint.
    """
    if not is_patch(path) and (path / SPARSE_INDEX).is_file():
        raise UsageError(
            f"{path}: is a sparse update for an engine; `apply` takes patches of `delta` without --sparse"
        )
    index = path / INDEX
    if not index.is_file():
        raise UnknownFormat(
            f"{path}: is no patch; expected a directory of `megaconv delta`, with a {INDEX}"
        )
    found = read_json(index, RECORD_BYTES)
    try:
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError(f"expected {FORMAT} of version {VERSION}")
        entries = tuple(_placed(entry_of(line) for line in found["tensors"]))
        removed = tuple(Key(str(name), str(slot)) for name, slot in found["removed"])
        ends = [
            {what: side[what] for what in ("weights", "optimizer")}
            for side in (found["base"], found["new"])
        ]
        read = found["options"]
        blocks = InputFile.open(path / BLOCKS)
        _require_size(blocks, entries)
        header, whole = _header(path, entries)
        by_own_names = header.config.own_names is not None
        options = LoadOptions(
            optimizer=read["optimizer"] is True,
            text_only=read["text_only"] is True,
            own_names=by_own_names,
            whole=not by_own_names,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(str(index), ValueError(f"is not the index of a patch ({error})")) from error
    return Patch(path, ends[0], ends[1], entries, removed, header, blocks, options, whole)


def entry_of(line: Any) -> Entry:
    """The entry of a line of delta.json. Raises ValueError and TypeError for another line."""
    name, slot, dtype, shape, has_base, sizes, digest = line
    info = TensorInfo(as_shape(shape), str(dtype))
    byte_count(info.shape, info.dtype)
    if not all(type(size) is int and size > 0 for size in sizes) or type(has_base) is not bool:
        raise ValueError(f"{name}: its blocks have no natural sizes")
    return Entry(Key(str(name), str(slot)), info, has_base, tuple(sizes), str(digest))


def _placed(entries: Iterator[Entry]) -> Iterator[Entry]:
    """The entries with their places. Raises ValueError if an entry has another number of blocks than its tensor."""
    offset = 0
    for entry in entries:
        # Counted only as far as needed: a hostile shape has more blocks than memory can hold.
        boxes = row_blocks(entry.info.shape, entry.info.dtype, BLOCK_BYTES)
        count = sum(1 for _ in islice(boxes, len(entry.sizes) + 1))
        if count != len(entry.sizes):
            expected = count if count < len(entry.sizes) else "more"
            raise ValueError(f"{entry.key}: {len(entry.sizes)} blocks, expected {expected}")
        yield replace(entry, offset=offset)
        offset += sum(entry.sizes)


def _require_size(blocks: InputFile, entries: tuple[Entry, ...]) -> None:
    expected = sum(sum(entry.sizes) for entry in entries)
    if blocks.size != expected:
        raise CorruptCheckpoint(
            f"{blocks.path}: {blocks.size} bytes, expected {expected}; copy the patch again",
            code="damaged-patch",
        )


def _header(path: Path, entries: tuple[Entry, ...]) -> tuple[Header, Mapping[str, Any] | None]:
    """(the header without encoders, config.json of a multimodal model or None)."""
    saved: Any = torch_zip.read(path / HEADER)
    whole = saved["config"].pop("whole", None)
    own_names = _own_names(saved["config"].pop("own_names", None), entries, path)
    training = built(TrainingState, saved["training"])
    files = {name: path / FILES / _below(name) for name in saved["files"]}
    header = Header(
        config=replace(built(ModelConfig, saved["config"]), own_names=own_names),
        manifest={entry.key: entry.info for entry in entries},
        training=training,
        files=files,
        named_tokenizer=saved["named_tokenizer"],
        source=f"patch of {saved['source']}",
        has_optimizer=training.optimizer is not None,
    )
    return header, None if whole is None else dict(whole["config"])


def _own_names(saved: Any, entries: tuple[Entry, ...], path: Path) -> OwnNames | None:
    """The description of a model that no family describes; None for other models."""
    if saved is None:
        return None
    if not isinstance(saved["config"], dict) or not isinstance(saved["reason"], str):
        raise ValueError("own_names: expected a configuration and a reason")
    shapes = {entry.key.name: entry.info.shape for entry in entries}
    return built(OwnNames, saved).with_tensors(shapes, str(path / INDEX))


def _below(name: str) -> PurePosixPath:
    """The path of a small file. Raises ValueError if it leaves the patch."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"names the file {name!r:.200}")
    return path


class _Blocks:
    """Reads the blocks of a tensor. It keeps the last one, since neighbouring rows are read next."""

    def __init__(self, patch: Patch, entry: Entry, base: LazyTensor | None) -> None:
        self._patch, self._entry, self._base = patch, entry, base
        self._lock = Lock()
        self._last: tuple[int, Bytes] | None = None

    def read(self, number: int) -> Bytes:
        """A block's bytes as rows. Raises CorruptCheckpoint for a damaged block."""
        with self._lock:
            if self._last is None or self._last[0] != number:
                self._last = number, self._decoded(number)
            return self._last[1]

    def _decoded(self, number: int) -> Bytes:
        entry, box = self._entry, self._entry.boxes[number]
        itemsize = ITEMSIZE[entry.info.dtype]
        size = box.rows * box.cols * itemsize
        content = self._patch.blocks.read(entry.offsets[number], entry.sizes[number])
        base = None
        if self._base is not None:
            rows = np.empty((box.rows, box.cols * itemsize), np.uint8)
            self._base.read_into(box, rows)
            base = rows.reshape(-1)
        try:
            found = decode(bytes(content), base, itemsize, size)
        except ValueError as error:
            raise damaged(f"{self._patch.blocks.path}: {entry.key}", error) from error
        return found.reshape(box.rows, box.cols * itemsize)


@dataclass(frozen=True)
class PatchedTensor:
    """A tensor of the newer checkpoint, computed from the base when it is read."""

    shape: Shape
    dtype: str
    boxes: tuple[Box, ...]
    blocks: _Blocks = field(repr=False)

    def read_into(self, box: Box, out: Bytes) -> None:
        """Fill the buffer from all blocks that overlap the rectangle."""
        for number, held in enumerate(self.boxes):
            shared = _overlap(box, held)
            if shared.rows > 0 and shared.cols > 0:
                block = self.blocks.read(number)
                _part(out, shared, box, self.dtype)[:] = _part(block, shared, held, self.dtype)


def _overlap(one: Box, other: Box) -> Box:
    """The rectangle that lies in both; it has no rows or no columns if there is none."""
    return Box(
        max(one.row0, other.row0),
        min(one.row1, other.row1),
        max(one.col0, other.col0),
        min(one.col1, other.col1),
    )


def _part(rows: Bytes, wanted: Box, held: Box, dtype: str) -> Bytes:
    """The bytes of a rectangle. rows: the bytes of the rectangle `held`, which contains it."""
    itemsize = ITEMSIZE[dtype]
    first, end = wanted.row0 - held.row0, wanted.row1 - held.row0
    left, right = wanted.col0 - held.col0, wanted.col1 - held.col0
    return rows[first:end, left * itemsize : right * itemsize]


@dataclass(frozen=True)
class PatchedSource:
    """The newer checkpoint, in the layout of the base."""

    base: Source
    patch: Patch

    @cached_property
    def header(self) -> Header:
        """The header of the newer checkpoint. Layout and padding are those of the base."""
        old, config = self.base.header, self._config()
        return replace(
            self.patch.header,
            config=config,
            layout=old.layout and layout_for(old.layout, config.layer_count),
            vocab_divisor=old.vocab_divisor,
            padded_vocab=old.padded_vocab,
        )

    def _config(self) -> ModelConfig:
        """The newer checkpoint's configuration. Raises ModelsDiffer if its encoders are missing in the base."""
        config, described = self.patch.header.config, self.patch.whole
        if described is None:
            return config
        whole = self.base.header.config.whole
        if whole is None:
            raise ModelsDiffer(
                f"{self.patch.path}: changes a multimodal model, and the base has no encoder; apply the patch to the "
                "checkpoint that it was made from",
                code="wrong-base",
            )
        return replace(config, whole=replace(whole, config=described))

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """The tensors in model order. Raises ModelsDiffer if the base lacks one of them."""
        old = dict(PlainSource(self.base, exact=True).tensors())
        for entry in self.patch.entries:
            base = old.get(entry.key) if entry.has_base else None
            if entry.has_base and (
                base is None or (tuple(base.shape), base.dtype) != tuple(entry.info)
            ):
                raise ModelsDiffer(
                    f"{entry.key}: the base of {self.patch.path} has no such {entry.info.dtype} tensor of shape "
                    f"{list(entry.info.shape)}; apply the patch to the checkpoint that it was made from",
                    code="wrong-base",
                )
            blocks = _Blocks(self.patch, entry, base)
            yield entry.key, PatchedTensor(entry.info.shape, entry.info.dtype, entry.boxes, blocks)


@dataclass(frozen=True)
class WeightsAlone:
    """A source without the optimizer state that it holds."""

    whole: Source

    @cached_property
    def header(self) -> Header:
        """The header with the weights alone. The training state keeps the settings of the optimizer."""
        header = self.whole.header
        weights = {key: info for key, info in header.manifest.items() if key.slot == WEIGHT}
        return replace(header, manifest=weights)

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        """The weights in model order."""
        return (found for found in self.whole.tensors() if found[0].slot == WEIGHT)


def require_chain(patches: Sequence[Patch]) -> None:
    """Raises ModelsDiffer unless each patch was made from the checkpoint that the one before makes."""
    for earlier, later in pairwise(patches):
        if earlier.new != later.base:
            raise ModelsDiffer(
                f"{later.path}: was not made from the checkpoint that {earlier.path} makes; give the patches in their order",
                code="wrong-base",
            )


def require_sound(patch: Patch) -> None:
    """Read all blocks, and compare them with the hashes. Raises CorruptCheckpoint for a damaged patch."""
    for entry in patch.entries:
        hasher = blake3()
        for offset, size in zip(entry.offsets, entry.sizes, strict=False):
            hasher.update(patch.blocks.read(offset, size))
        if hasher.hexdigest() != entry.digest:
            raise damaged(
                f"{patch.blocks.path}: {entry.key}", ValueError("other bytes than were written")
            )
