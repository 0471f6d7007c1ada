"""Shared by all tests: where the fixtures are, and small models to convert."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.megatron_oracle import Megatron

# The same examples in every run, so that a change is judged by what it changed; `make explore` looks for new ones.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("same")

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    """Its processes start with the first question."""
    with Megatron(tmp_path_factory.mktemp("megatron")) as running:
        yield running
