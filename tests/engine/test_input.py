"""An input is found once, at the door of a command: its place, and the loader that reads it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import megaconv
from megaconv import hub, registry
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run

CORE = FIXTURES / "core-llama-tp2pp2" / "checkpoint"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls that find a place or a loader."""
    found: Counter[str] = Counter()
    in_cache, choose = hub._in_cache, registry.choose

    def resolving(path: Path) -> Path:
        found["resolve"] += 1
        return in_cache(path)

    def choosing(*arguments: Any) -> Any:
        found["choose"] += 1
        return choose(*arguments)

    monkeypatch.setattr(hub, "_in_cache", resolving)  # resolve() calls it once for each path
    monkeypatch.setattr(registry, "choose", choosing)
    return found


@pytest.mark.parametrize("words", [("--quiet",), ("--dry-run",), ("--optimizer",)], ids=" ".join)
def test_a_conversion_finds_its_input_once(
    calls: Counter[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    source = FIXTURES / "core-llama-distopt-tp1pp2dp2" / "checkpoint"
    outcome = run("convert", source, tmp_path / "out", "--saver", "core", *words)
    assert outcome.status == 0, outcome.err
    assert calls == {"resolve": 1, "choose": 1}


def test_a_conversion_from_python_finds_its_input_once(calls: Counter[str], tmp_path: Path) -> None:
    megaconv.convert(write_llama(tmp_path / "model"), tmp_path / "out", saver="core", tp=2)
    assert calls == {"resolve": 1, "choose": 1}


def test_a_verified_conversion_finds_its_output_too(calls: Counter[str], tmp_path: Path) -> None:
    megaconv.convert(
        write_llama(tmp_path / "model"), tmp_path / "out", saver="core", tp=2, verify=True
    )
    assert calls == {"resolve": 2, "choose": 2}


def test_without_a_saver_the_format_is_found_before_the_conversion(
    calls: Counter[str], tmp_path: Path
) -> None:
    assert run("convert", CORE, tmp_path / "out", "--tp", 1).status == 0
    assert calls == {"resolve": 2, "choose": 2}


@pytest.mark.parametrize(
    "command", ["inspect", "inspect --stats --tree", "plan", "fingerprint", "scan"]
)
def test_a_command_finds_its_input_once(calls: Counter[str], command: str) -> None:
    name, *words = command.split()
    assert run(name, CORE, *words).status == 0
    assert calls == ({"resolve": 1} if name == "scan" else {"resolve": 1, "choose": 1})


def test_verify_finds_its_input_once(calls: Counter[str], tmp_path: Path) -> None:
    megaconv.convert(CORE, tmp_path / "out", saver="hf")
    calls.clear()
    assert run("verify", tmp_path / "out").status == 0
    assert calls == {"resolve": 1, "choose": 1}


def test_diff_finds_each_input_once(calls: Counter[str]) -> None:
    assert run("diff", CORE, CORE).status == 0
    assert calls == {"resolve": 2, "choose": 2}
