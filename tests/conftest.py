"""Shared by all tests: where the fixtures are, and small models to convert."""

import gc
import logging
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import unsynced
from tests.browsers import Page, page
from tests.grids import GRIDS
from tests.megatron_oracle import Megatron

# The same examples in every run, so that a change is judged by what it changed; `make explore` looks for new ones.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("same")

# A shell that starts the tests in the background, or nohup, has them ignore these, and every process that a test starts too.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

unsynced.install()

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser for all pages of a file: it takes seconds to start."""
    with page(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture(autouse=True)
def _warnings_are_shown() -> None:
    """Tests share a process, and the fuzzer and comparisons of many models silence warnings."""
    logging.disable(logging.NOTSET)
    for package in ("megaconv", "megatron_lite", "loaders", "savers", "formats"):
        logging.getLogger(package).setLevel(logging.NOTSET)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without the garbage collector: thousands of tests are no garbage, and would be looked through again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Only `-n` asks for it, unless `--dist` names another."""
    if config.getoption("dist") != "load":
        return None
    from tests.units import UnitScheduling

    return UnitScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        grid = item.nodeid.partition("[")[0]
        if grid not in GRIDS or item.get_closest_marker("slow"):
            continue
        if seen[grid] % GRIDS[grid]:
            item.add_marker(pytest.mark.slow)
        seen[grid] += 1


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    """Its processes start with the first question."""
    with Megatron(tmp_path_factory.mktemp("megatron")) as running:
        yield running
