"""The files of a distributed checkpoint, planned: torch zip archives, one for each chunk and object, and `.metadata`.

    __0_0.distcp      archive · archive · archive ...
    __1_0.distcp      each what torch.save makes of a tensor, or of an object

Large clusters read a checkpoint the faster the more files of about one size it has.
"""

from collections.abc import Iterator, Mapping

from formats import dcp_metadata, torch_zip
from formats.dcp_metadata import METADATA_NAME, DcpMetadata, Range, StoredChunk, StoredTensor
from formats.output import FileLayout, PlainFile, Record
from formats.pickle_writer import Placeholder
from formats.tensor import Shape
from formats.torch_zip import TorchZipLayout


class DistcpLayout:
    """A file of zip archives (a formats.output.FileLayout).

    Archives of one shape and dtype are the same bytes but for the tensor and its checksum, so that they share a plan.
    """

    needs_checksums = True

    def __init__(self) -> None:
        self.size = 0
        self.records: dict[str, Record] = {}
        self._archives: list[tuple[int, TorchZipLayout, str]] = []

    def add(self, key: str, archive: TorchZipLayout) -> tuple[int, int]:
        """Append; returns (offset, bytes) of the archive. key: of the tensor's record, if there is a tensor."""
        offset = self.size
        self._archives.append((offset, archive, key))
        for inner in archive.records.values():
            self.records[key] = Record(offset + inner.offset, inner.nbytes)
        self.size += archive.size
        return offset, archive.size

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        for start, archive, key in self._archives:
            for offset, data in archive.headers(dict.fromkeys(archive.records, checksums.get(key, 0))):
                yield start + offset, data


class DistcpFiles:
    """Everything that is added, over `count` files: each goes to the one that has least."""

    def __init__(self, count: int) -> None:
        self._layouts = [DistcpLayout() for _ in range(count)]
        self._archives: dict[tuple[Shape, str], TorchZipLayout] = {}
        self._chunks: dict[str, list[StoredChunk]] = {}
        self._tensors: dict[str, tuple[Shape, str]] = {}
        self._objects: dict[str, Range] = {}
        self._nothing: TorchZipLayout | None = None

    def add_chunk(self, key: str, whole: Shape, dtype: str, offset: Shape, shape: Shape) -> tuple[str, str]:
        """(file, record) of one chunk of the tensor `key`, which is of shape `whole`."""
        record, kind = f"{key}/{'.'.join(map(str, offset))}", (shape, dtype)
        if kind not in self._archives:
            self._archives[kind] = torch_zip.plan(Placeholder("tensor", shape, dtype), "archive")
        place = self._place(record, self._archives[kind])
        self._tensors[key] = whole, dtype
        self._chunks.setdefault(key, []).append(StoredChunk(offset, shape, place))
        return place.file, record

    def add_object(self, name: str, value: object) -> None:
        """value: without tensors; Megatron wants it in a list of one."""
        if value != [None]:
            self._objects[name] = self._place(name, torch_zip.plan(value, "archive"))
            return
        self._nothing = self._nothing or torch_zip.plan(value, "archive")  # most are, and there are many
        self._objects[name] = self._place(name, self._nothing)

    def _place(self, record: str, archive: TorchZipLayout) -> Range:
        number = min(range(len(self._layouts)), key=lambda index: self._layouts[index].size)
        return Range(f"__{number}_0.distcp", *self._layouts[number].add(record, archive))

    def layouts(self, *, nested_keys: bool) -> dict[str, FileLayout]:
        """By file name; none is empty. nested_keys: as for formats.dcp_metadata.write."""
        tensors = {key: StoredTensor(*kind, tuple(self._chunks[key])) for key, kind in self._tensors.items()}
        described = dcp_metadata.write(DcpMetadata(tensors, self._objects), nested_keys=nested_keys)
        files = {f"__{number}_0.distcp": layout for number, layout in enumerate(self._layouts) if layout.size}
        return files | {METADATA_NAME: PlainFile(described)}
