"""Plans the files of a distributed checkpoint: torch zip archives, one for each chunk and object, and `.metadata`.

    __0_0.distcp      archive · archive · archive ...
    __1_0.distcp      each is what torch.save makes of a tensor or an object

Large clusters read a checkpoint faster if it has more files, of about one size.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import partial
from heapq import heapreplace

from formats import dcp_metadata, torch_zip
from formats.dcp_metadata import METADATA_NAME, DcpMetadata, Range, StoredChunk, StoredTensor
from formats.output import FileLayout, Piece, PlainFile, Record
from formats.pickle_writer import Constant, Placeholder, dumps
from formats.tensor import Shape
from formats.torch_zip import TorchZipLayout


class DistcpLayout:
    """A file of zip archives (a formats.output.FileLayout).

    Archives of one shape and dtype differ only in the tensor and its checksum, so they share a plan.
    """

    needs_checksums = True

    def __init__(self) -> None:
        self.size = 0
        self.records: dict[str, Record] = {}
        # Two lists in file order: one list of (archive, key) took 20 MB more for DeepSeek-V3.
        self._archives: list[TorchZipLayout] = []
        self._keys: list[str] = []

    def add(self, key: str, archive: TorchZipLayout) -> tuple[int, int]:
        """Append an archive, and return its (offset, bytes). key: the key of the tensor's record, if there is a tensor."""
        offset = self.size
        self._archives.append(archive)
        self._keys.append(key)
        for inner in archive.records.values():
            self.records[key] = Record(offset + inner.offset, inner.nbytes)
        self.size += archive.size
        return offset, archive.size

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        for piece in self.pieces():
            yield piece.offset, piece.content(checksums)

    def pieces(self) -> Iterator[Piece]:
        """The pieces of the archives, one after another."""
        start = 0
        for archive, key in zip(self._archives, self._keys, strict=True):
            for piece in archive.pieces():
                needs = (key,) if piece.needs else ()
                content = partial(_of_archive, archive, key, piece)
                yield Piece(start + piece.offset, piece.nbytes, needs, content)
            start += archive.size


def _of_archive(
    archive: TorchZipLayout, key: str, piece: Piece, checksums: Mapping[str, int]
) -> bytes:
    """The bytes of an archive's piece. Archives of one shape and dtype have one plan, whose record has another key."""
    return piece.content(dict.fromkeys(archive.records, checksums.get(key, 0)))


class DistcpFiles:
    """Distributes everything that is added over `count` files. Each archive goes to the smallest file."""

    def __init__(self, count: int) -> None:
        self._layouts = [DistcpLayout() for _ in range(count)]
        self._emptiest = [(0, number) for number in range(count)]  # (bytes, file), a heap
        self._names = [f"__{number}_0.distcp" for number in range(count)]
        self._archives: dict[tuple[Shape, str], TorchZipLayout] = {}
        self._chunks: dict[str, list[StoredChunk]] = {}
        self._tensors: dict[str, tuple[Shape, str]] = {}
        self._objects: dict[str, Range] = {}
        self._values: dict[Hashable, TorchZipLayout] = {}

    def add_chunk(
        self, key: str, whole: Shape, dtype: str, offset: Shape, shape: Shape
    ) -> tuple[str, str]:
        """Add one chunk of the tensor `key`, which has the shape `whole`. Returns (file, record)."""
        record, kind = f"{key}/{'.'.join(map(str, offset))}", (shape, dtype)
        if kind not in self._archives:
            self._archives[kind] = torch_zip.plan(Placeholder("tensor", shape, dtype), "archive")
        place = self._place(record, self._archives[kind])
        self._tensors[key] = whole, dtype
        self._chunks.setdefault(key, []).append(StoredChunk(offset, shape, place))
        return place.file, record

    def add_object(self, name: str, value: object) -> None:
        """Add an object. value: it contains no tensors; Megatron requires a list of one."""
        self._objects[name] = self._place(name, self._planned(value))

    def add_constant(self, key: str, value: Constant) -> None:
        """Add a small tensor with known bytes, as one chunk."""
        place = self._place(key, self._planned(value))
        corner = (0,) * len(value.shape)
        self._tensors[key] = value.shape, value.dtype
        self._chunks[key] = [StoredChunk(corner, value.shape, place)]

    def _planned(self, value: object) -> TorchZipLayout:
        """The archive of a value. Most values of an optimizer are equal, and equal values share one plan."""
        pickled = dumps(value)
        written = pickled.content, tuple(pickled.storages.values())
        if written not in self._values:
            self._values[written] = torch_zip.plan(value, "archive")
        return self._values[written]

    def _place(self, record: str, archive: TorchZipLayout) -> Range:
        _, number = self._emptiest[0]
        place = self._layouts[number].add(record, archive)
        heapreplace(self._emptiest, (self._layouts[number].size, number))
        return Range(self._names[number], *place)

    def layouts(
        self, *, nested_keys: bool, containers: Collection[str] = ()
    ) -> dict[str, FileLayout]:
        """File name -> layout, without empty files. nested_keys, containers: as for formats.dcp_metadata.write."""
        tensors = {
            key: StoredTensor(*kind, tuple(self._chunks[key]))
            for key, kind in self._tensors.items()
        }
        metadata = DcpMetadata(tensors, self._objects)
        described = dcp_metadata.write(metadata, nested_keys=nested_keys, containers=containers)
        files = {
            name: layout
            for name, layout in zip(self._names, self._layouts, strict=True)
            if layout.size
        }
        return files | {METADATA_NAME: PlainFile(described)}
