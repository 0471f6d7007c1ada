"""Memory, connections and hashes that a transfer saves, without a loss of a promise."""

import re
from pathlib import Path

import pytest

from formats.partial_files import RemoteState
from formats.stores import buffers, windows
from formats.stores.buffers import BUFFER_BYTES
from formats.stores.s3_writing import WritableS3Bucket
from formats.stores.slots import Slots
from formats.stores.stand_in import fetch
from formats.stores.windows import Windows
from formats.stores.writing import Upload
from tests.stores.conftest import BUCKET, point_at
from tests.stores.small_store import Asked, Fault, SmallStore, running


@pytest.fixture(autouse=True)
def _no_idle_memory() -> None:
    buffers._idle.clear()


def test_a_window_that_is_still_read_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_SHARED", windows._Shared())

    def fill(start: int, out: memoryview) -> None:
        out[:1] = b"\7"

    of_object = Windows(BUFFER_BYTES, fill)
    window = of_object._window_at(0, 1, BUFFER_BYTES // windows.PAGE)
    windows._SHARED.remove(window)
    other = buffers.take(BUFFER_BYTES)
    assert other is not window.content
    first = id(window.content)
    del window
    assert id(buffers.take(BUFFER_BYTES)) == first


def test_an_answer_that_breaks_off_leaves_no_former_bytes_in_the_memory(
    writable: SmallStore,
) -> None:
    content = bytes(range(1, 256)) * (BUFFER_BYTES // 255 + 1)
    writable.put("run/object", content)
    buffers.give_back(bytearray(BUFFER_BYTES))
    bucket = WritableS3Bucket(BUCKET)
    listed = bucket.listing("run/").objects[0]
    state = RemoteState("s3://models/run/object", listed.size, listed.tag)
    halves: list[Asked] = []

    def break_off(asked: Asked) -> Fault | None:
        if asked.action != "get" or len(halves) == 3:
            return None
        halves.append(asked)
        return Fault("half")

    writable.hook = break_off
    out = buffers.take(BUFFER_BYTES)
    fetch(bucket, "run/object", state, 0, memoryview(out))
    assert len(halves) == 3
    assert out == content[:BUFFER_BYTES]


def test_the_place_of_a_part_begins_as_zeros_in_memory_of_another_part() -> None:
    slots = Slots(2 * BUFFER_BYTES)
    slot = slots.take(BUFFER_BYTES)
    slot.put(5, memoryview(b"another part"))
    former = slot.content()
    slot.free()
    again = slots.take(BUFFER_BYTES)
    assert again.content() is former
    assert not any(again.content()[:100])


def test_ranges_are_read_over_one_connection(writable: SmallStore) -> None:
    content = bytes(range(256)) * 4096
    writable.put("run/object", content)
    bucket, connections = WritableS3Bucket(BUCKET), []
    listed = bucket.listing("run/").objects[0]
    state = RemoteState("s3://models/run/object", listed.size, listed.tag)
    pool = bucket._client._endpoint.http_session._manager.connection_from_url(writable.url)
    for start in (0, 1, 300_000):
        out = bytearray(500_001)
        fetch(bucket, "run/object", state, start, memoryview(out))
        assert out == content[start : start + len(out)]
        connections.append(pool.num_connections)
    assert connections == [1, 1, 1]


@pytest.mark.parametrize("has_tls", [True, False])
def test_only_parts_without_tls_are_signed_with_their_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tls: bool
) -> None:
    pytest.importorskip("boto3")
    with running(SmallStore(BUCKET)) as store:
        if has_tls:
            store.encrypt(tmp_path)
        point_at(
            store.url.replace("http:", "https:" if has_tls else "http:"), tmp_path, monkeypatch
        )
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "certificate.pem"))
        monkeypatch.setattr(store, "headers", [])
        bucket = WritableS3Bucket(BUCKET)
        upload = Upload("out/file", bucket.begin_upload("out/file"), 0.0)
        bucket.put_part(upload, 1, b"content", bucket.checksum.of(b"content"))
        headers = store.headers[-1]
    signed = re.search("(?i)x-amz-content-sha256: (.*)", headers)
    assert signed is not None
    assert (signed[1] == "UNSIGNED-PAYLOAD") == has_tls
    assert "x-amz-checksum-crc32" in headers.lower()
