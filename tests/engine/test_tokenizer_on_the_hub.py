"""`convert --tokenizer` with a Hub id: only small files are downloaded, and a Hub that isn't there is one line."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hub_server
from tests.engine.test_new_tokenizer import embedding, write_tokenizer
from tests.forks import start
from tests.hub_server import File, Hub
from tests.models import write_llama
from tests.runs import Outcome, assert_refused, finish

NAME = "org/name"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(write_llama(tmp_path / "hf", layers=1, vocab=263))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub with a model whose tokenizer has two more tokens."""
    other = write_tokenizer(write_llama(tmp_path / "other", layers=1, vocab=265), ("<a>", "<b>"))
    files = {file.name: File(file.read_bytes(), False) for file in other.iterdir()}
    with hub_server.running() as server:
        server.commit(NAME, "main", files)
        hub_server.prepare_client(monkeypatch, server.address, tmp_path)
        yield server


def converted(model: Path, out: Path, tokenizer: str) -> Outcome:
    """The outcome of a fork, because huggingface_hub reads its environment at import."""
    words = ["convert", model, out, "--saver", "hf", "--tokenizer", tokenizer]
    return finish(start(*words), 60)


@pytest.mark.parametrize("place", [NAME, f"hf://{NAME}@main", "{hub}/org/name"])
def test_the_tokenizer_of_a_hub_id_is_downloaded_without_weights(
    place: str, hub: Hub, model: Path, tmp_path: Path
) -> None:
    outcome = converted(model, tmp_path / "out", place.format(hub=hub.address))
    assert outcome.status == 0, outcome.err
    assert embedding(tmp_path / "out").shape[0] == 265
    copied = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert copied == (tmp_path / "other" / "tokenizer.json").read_bytes()
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert "tokenizer.json" in hub.served
    assert "model.safetensors" not in hub.served
    record = json.loads((tmp_path / "out" / "megaconv.json").read_text())
    assert NAME in record["provenance"]["options"]["--tokenizer"]


def test_a_tokenizer_that_was_downloaded_is_used_without_the_hub(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converted(model, tmp_path / "first", NAME).status == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = converted(model, tmp_path / "second", NAME)
    assert outcome.status == 0, outcome.err
    assert embedding(tmp_path / "second").shape[0] == 265


@pytest.mark.parametrize(("place", "status"), [(NAME, 2), (f"hf://{NAME}", 1)])
def test_a_hub_that_is_not_there_is_one_line(
    place: str, status: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.prepare_client(monkeypatch, "http://127.0.0.1:9", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused = converted(model, tmp_path / "out", place)
    assert_refused(refused, status, f"--tokenizer {place}: ", "Hugging Face Hub")
    assert not (tmp_path / "out").exists()


def test_an_id_that_the_hub_does_not_have_is_one_line(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    refused = converted(model, tmp_path / "out", "hf://org/other")
    assert_refused(refused, 1, "--tokenizer hf://org/other: ", "Hugging Face Hub")


def test_a_uri_is_one_line(model: Path, tmp_path: Path) -> None:
    refused = converted(model, tmp_path / "out", "s3://bucket/tokenizer")
    assert_refused(refused, 2, "--tokenizer s3://bucket/tokenizer: is a URI")
