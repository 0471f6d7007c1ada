"""Reads and writes checkpoints in a real bucket. `tests/stores/real.sh URI` runs this; other runs skip it."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from formats.stores.target import StoreTarget
from megaconv.engine import transfer
from megaconv.engine.conversion import fingerprint
from megaconv.errors import CheckpointError, CorruptCheckpoint
from megaconv.hub import resolve
from megaconv.store_inputs import writable_store
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run
from tests.stores.plain_clients import Plain, plain
from tests.stores.test_reading import FORMATS

_BUCKET = os.environ.get("MEGACONV_TEST_BUCKET", "")
URI = _BUCKET if "://" in _BUCKET else f"s3://{_BUCKET}"
PREFIX = os.environ.get("MEGACONV_TEST_PREFIX", "megaconv-tests")
LLAMA = FIXTURES / "peft-llama-all-linear/base"

pytestmark = pytest.mark.skipif(not _BUCKET, reason="tests/stores/real.sh names a bucket")


@pytest.fixture
def client() -> Iterator[Plain]:
    """The store's own client. Objects below the prefix are deleted afterwards."""
    made = plain(URI)
    yield made
    for key in made.keys(f"{PREFIX}/"):
        made.delete(key)


@pytest.fixture
def target() -> str:
    """The URI of an output."""
    return f"{URI}/{PREFIX}/written"


def upload(client: Plain, source: Path) -> str:
    files = [source] if source.is_file() else [each for each in source.rglob("*") if each.is_file()]
    for file in files:
        client.put(f"{PREFIX}/{file.relative_to(source.parent)}", file.read_bytes())
    return f"{URI}/{PREFIX}/{source.name}"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_as_from_the_disk(client: Plain, name: str) -> None:
    source = FIXTURES / FORMATS[name]
    assert fingerprint(upload(client, source)) == fingerprint(source)


def test_an_object_that_was_replaced_is_not_read(client: Plain) -> None:
    place = resolve(upload(client, LLAMA))
    file = next(LLAMA.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    client.put(f"{PREFIX}/{LLAMA.name}/{file.name}", bytes(content))
    assert isinstance(place, Path)
    with pytest.raises(CorruptCheckpoint, match="replaced or deleted"):
        fingerprint(place)


@pytest.mark.parametrize("words", ["--saver hf --verify", "--saver core --tp 2"])
def test_an_output_is_written_and_read_back(client: Plain, target: str, words: str) -> None:
    outcome = run("convert", LLAMA, target, *words.split())
    assert outcome.status == 0, outcome.err
    assert fingerprint(target).weights == fingerprint(LLAMA).weights
    assert not client.unfinished(f"{PREFIX}/")
    assert not [key for key in client.keys(f"{PREFIX}/") if ".megaconv-" in key]


def test_an_output_is_replaced_only_on_demand(client: Plain, target: str) -> None:
    words = ("convert", LLAMA, target, "--saver", "hf")
    assert run(*words).status == 0
    assert run(*words).status == 2
    outcome = run(*words, "--overwrite", "--yes-replace-objects")
    assert outcome.status == 0, outcome.err
    assert fingerprint(target).weights == fingerprint(LLAMA).weights


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model of several parts."""
    return write_llama(tmp_path / "large", layers=2, hidden=512, vocab=16384)


def interrupted(monkeypatch: pytest.MonkeyPatch, target: str, words: tuple[object, ...]) -> None:
    """Run a command that fails after three parts, and leaves what it has sent."""
    store = type(writable_store(target))
    put_part, numbers = store.put_part, count()

    def refuse(*arguments: object) -> str:
        if next(numbers) >= 3:
            raise CheckpointError("the test ends this run", code="store-refused")
        return put_part(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "JOURNAL_SECONDS", 0)
        patch.setattr(StoreTarget, "discard", StoreTarget.keep)
        patch.setattr(store, "put_part", refuse)
        assert run(*words, "--resume").status == 1


def test_a_resumed_run_continues(
    client: Plain, target: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("convert", large, target, "--saver", "hf", "--workers", "1")
    interrupted(monkeypatch, target, words)
    with pytest.raises(CorruptCheckpoint, match="is not complete"):
        fingerprint(target)
    outcome = run(*words, "--resume")
    assert outcome.status == 0, outcome.err
    assert fingerprint(target).weights == fingerprint(large).weights
    assert not client.unfinished(f"{PREFIX}/")


def test_clean_removes_what_a_run_has_left(
    client: Plain, target: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, target, ("convert", large, target, "--saver", "hf"))
    assert client.keys(f"{PREFIX}/")
    outcome = run("clean", target, "--yes")
    assert outcome.status == 0, outcome.err
    assert not client.keys(f"{PREFIX}/")
    assert not client.unfinished(f"{PREFIX}/")


def test_a_prefix_without_objects_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no object has this name"):
        resolve(f"{URI}/{PREFIX}/nothing-is-here")
