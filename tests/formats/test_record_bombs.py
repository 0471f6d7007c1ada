"""The content of inert records may multiply to any length. Nothing walks it, prints it or hashes it."""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from formats import dcp_metadata, torch_dist, torch_zip
from formats.chunked import require_cover
from formats.dtensor import part_of
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.pickle_records import Opaque
from formats.pickle_writer import PickleWriter
from formats.stored_zip import directory, local_header, place
from formats.wording import brief
from megaconv.commands import stored

_METADATA = "torch.distributed.checkpoint.metadata"
_LEVELS = 60


def bomb(kind: type = tuple) -> Any:
    """Sixty levels of pairs: 2^60 values when walked."""
    value: Any = 1
    for _ in range(_LEVELS):
        value = {"a": value, "b": value} if kind is dict else kind((value, value))
    return value


@cache
def pairs_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Different pairs of natural numbers below 2^60 that have one hash. CPython hashes tuples by xxHash, with known keys."""
    mask, first, second, start = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261  # fmt: skip
    found: list[tuple[int, int]] = []
    number = 0
    while len(found) < count:
        number += 1
        state = start + number * second & mask
        state = (state << 31 | state >> 33) * first & mask
        other = (12345 - state) * pow(
            second, -1, 2**64
        ) & mask  # the state before the last rotation is 12345
        if other < 2**60:
            found.append((number, other))
    assert len(set(map(hash, found[:100]))) == 1
    return found


class _Sharing(PickleWriter):
    """A writer that writes every container once, as Python's pickle does."""

    def write(self, value: object) -> None:
        shared = isinstance(value, (tuple, list, dict)) and value
        if not (shared and self.fetch(id(value))):
            super().write(value)
            if shared:
                self.remember(id(value))


def pickled(value: object) -> bytes:
    writer = _Sharing()
    writer.write(value)
    return writer.finish()


def _record(name: str, **state: object) -> Opaque:
    return Opaque(_METADATA, name, (), state)


def _metadata(**changes: object) -> Opaque:
    """The metadata of one tensor of one chunk, with one value changed."""
    found: dict[str, Any] = {
        "fqn": "a", "offset": (0,), "relative_path": "__0_0.distcp", "start": 0, "length": 9, "size": (1,), "offsets": (0,),
        "properties": (Opaque("torch", "x", ()),), "transforms": None, **changes,
    }  # fmt: skip
    chunk = _record("ChunkStorageMetadata", offsets=found["offsets"], sizes=(1,))
    properties = Opaque(_METADATA, "TensorProperties", (), found["properties"])
    tensor = _record(
        "TensorStorageMetadata", properties=properties, size=found["size"], chunks=[chunk]
    )
    index = _record("MetadataIndex", fqn=found["fqn"], offset=found["offset"])
    info = _record(
        "_StorageInfo", relative_path=found["relative_path"], offset=found["start"], length=found["length"],
        transform_descriptors=found["transforms"],
    )  # fmt: skip
    return _record("Metadata", state_dict_metadata={"a": tensor}, storage_data={index: info})


def _quickly(read: Callable[[], object]) -> None:
    start = time.process_time()
    with pytest.raises(CheckpointError) as error:
        read()
    assert time.process_time() - start < 3
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize(
    "field", ["fqn", "offset", "relative_path", "start", "length", "size", "offsets", "properties", "transforms"]
)  # fmt: skip
def test_metadata_of_values_that_multiply_is_refused_quickly(
    field: str, kind: type, tmp_path: Path
) -> None:
    path = tmp_path / ".metadata"
    value = (bomb(kind),) if field == "properties" else bomb(kind)
    path.write_bytes(pickled(_metadata(**{field: value})))
    _quickly(lambda: dcp_metadata.read(path))


def test_offsets_that_have_one_hash_take_no_longer_than_others(tmp_path: Path) -> None:
    offsets = pairs_of_one_hash(25_000)
    place = _record("_StorageInfo", relative_path="f", offset=0, length=1)
    places = {_record("MetadataIndex", fqn="a", offset=offset): place for offset in offsets}
    path = tmp_path / ".metadata"
    path.write_bytes(pickled(_record("Metadata", state_dict_metadata={}, storage_data=places)))
    start = time.process_time()
    dcp_metadata.read(path)
    assert time.process_time() - start < 3


def test_chunks_whose_offsets_have_one_hash_take_no_longer_than_others() -> None:
    offsets = pairs_of_one_hash(25_000)
    start = time.process_time()
    with pytest.raises(CorruptCheckpoint, match="reaches out"):
        require_cover("tensor", (len(offsets), 1), [(offset, (1, 1)) for offset in offsets])
    assert time.process_time() - start < 1


def _archive(value: object) -> bytes:
    """A torch file of one pickle."""
    content = pickled(value)
    (entry,) = place([("archive/data.pkl", len(content))])
    crc = torch_zip.crc32(content)
    end = entry.payload + len(content)
    return local_header(entry, crc) + content + directory([(entry, crc)], end)


def test_a_chunk_that_holds_such_a_record_is_refused_quickly(tmp_path: Path) -> None:
    archive = _archive(Opaque("megatron.x", "Thing", (), {"a": bomb(list)}))
    (tmp_path / "__0_0.distcp").write_bytes(archive)
    dtype = dcp_metadata.TorchDtype("float32")
    metadata = _metadata(properties=(dtype,), length=len(archive))
    (tmp_path / ".metadata").write_bytes(pickled(metadata))
    opened = torch_dist.open_directory(tmp_path)
    _quickly(lambda: opened.tensors()["a"].chunks[0].stored.tensor())


def test_a_list_of_tensors_enters_each_object_once(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    objects: object = {"a": 1}
    for _ in range(_LEVELS):
        objects = Opaque("megatron.x", "Thing", (), {"a": objects, "b": objects})
    file.write_bytes(_archive([objects, Opaque("megatron.x", "Thing", (), bomb(dict))]))
    start = time.process_time()
    assert stored.read_file(file).tensors == ()
    assert time.process_time() - start < 3


def test_a_dtensor_of_such_values_is_refused_quickly() -> None:
    value = Opaque("torch.distributed.tensor", "_rebuild_wrapper_subclass", (1, 2, bomb(list)), {})
    _quickly(lambda: part_of(value, "x.pt: a"))


def test_values_are_shown_briefly() -> None:
    assert brief([1, "a"]) == "[1, 'a']"
    assert len(brief(bomb(list))) <= 80
    assert len(brief("x" * 1000, 40)) == 40
