"""One set of processes for all tests of a session."""

from collections.abc import Iterator

import pytest

from tests.trainer.parallel.worlds import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as world:
        yield world
