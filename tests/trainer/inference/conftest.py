"""What tests of inference share: processes, one thread, since many processes run tests at the same time, a chat's server, and texts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.inference.conversations import save
from tests.trainer.inference.serving import ForkedServing, Serving
from tests.trainer.parallel.conftest import _one_thread, world

__all__ = ["_one_thread", "world"]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny chat model (conversations.py)."""
    directory: Path = tmp_path_factory.mktemp("chat")
    save(directory)
    return directory


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three texts, by which parts of a model are ranked."""
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    records = [{"text": "the cat sat on the mat " * n} for n in (1, 2, 5)]
    file.write_text("\n".join(map(json.dumps, records)))
    return file


@pytest.fixture(scope="session")
def chat_server(chat_model: Path) -> Iterator[Serving]:
    """A server of this model, with the name `tiny`."""
    running = ForkedServing(chat_model, "--slots", "2", "--served-model-name", "tiny")
    yield running
    assert running.end() == (0, "")
