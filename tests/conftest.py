"""Shared by all tests: where the fixtures are, and small models to convert."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron_oracle import Megatron

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    """Its processes start with the first question."""
    with Megatron(tmp_path_factory.mktemp("megatron")) as running:
        yield running
