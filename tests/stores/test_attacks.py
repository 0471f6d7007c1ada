"""A sample of kills and faults of runs that write into a store. `make trust` runs the full numbers."""

import random
from pathlib import Path

import pytest

from megaconv.engine import transfer
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run
from tests.stores.attacks import FAULTS, fault, kill, undisturbed
from tests.stores.conftest import BUCKET
from tests.stores.small_store import Asked, Fault, SmallStore

LLAMA = FIXTURES / "peft-llama-all-linear/base"
WORDS = ("convert", LLAMA, f"s3://{BUCKET}/out", "--saver", "hf", "--max-shard-size", "20KB")
KILLS, OF_FAULTS = 4, 6


def test_killed_runs_leave_nothing_or_everything(writable: SmallStore) -> None:
    """Acceptance 6, a sample: kills around the commit, where most can go wrong, and anywhere."""
    scenario, count = undisturbed(writable, WORDS)
    dice = random.Random(1)
    late = [count - 1 - dice.randrange(count // 2) for _ in range(KILLS // 2)]
    for place, number in enumerate([*late, *(dice.randrange(count) for _ in range(KILLS // 2))]):
        kill(writable, scenario, number, after=bool(place % 2), resume=bool(place % 3))


def test_files_of_a_replaced_output_are_gone_before_readers_find_the_new_one(
    writable: SmallStore,
) -> None:
    """transformers prefers an old `model.safetensors` to the index of new shards."""
    assert run(*WORDS[:5]).status == 0
    assert "model.safetensors" in writable.below("out/")
    seen: list[set[str]] = []

    def look(asked: Asked) -> None:
        if asked.action == "put" and asked.key.endswith((".index.json", "/config.json")):
            seen.append(set(writable.below("out/")))

    writable.restart()
    writable.done = look
    assert run(*WORDS, "--overwrite", "--yes-replace-objects").status == 0
    assert len(seen) == 2
    assert not any("model.safetensors" in names for names in seen)


def test_faults_never_leave_a_torn_output_behind_exit_status_zero(writable: SmallStore) -> None:
    """Acceptance 5, a sample: some kinds of fault, once each."""
    scenario, count = undisturbed(writable, WORDS)
    dice = random.Random(2)
    for kind in dice.sample(list(FAULTS), OF_FAULTS):
        fault(writable, scenario, dice.randrange(count), kind, lasting=dice.random() < 0.3)


def test_a_resumed_run_sends_only_what_is_missing(
    writable: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance 11: after half of the parts, at most 60% are sent again."""
    monkeypatch.setattr(transfer, "JOURNAL_SECONDS", 0)
    source = write_llama(tmp_path / "model", layers=4, hidden=128, vocab=512)
    words = (
        "convert",
        source,
        f"s3://{BUCKET}/out",
        *["--saver", "core", "--tp", "2", "--workers", "1"],
    )
    scenario, _ = undisturbed(writable, words)
    parts = writable.of("part")
    total = sum(each.nbytes for each in parts)
    half = parts[len(parts) // 2].number
    writable.clear()

    def fail(asked: Asked) -> Fault | None:
        is_late = asked.number >= half and asked.action == "part"
        return Fault("status", 403, "AccessDenied") if is_late else None

    writable.hook = fail
    from formats.stores.target import StoreTarget

    with monkeypatch.context() as patch:
        patch.setattr(StoreTarget, "discard", StoreTarget.keep)
        assert run(*words, "--resume").status == 1
    assert writable.uploads
    writable.restart()
    outcome = run(*words, "--resume")
    assert outcome.status == 0, outcome.err
    assert writable.below("out/") == scenario.expected
    assert sum(each.nbytes for each in writable.of("part")) <= 0.6 * total
    assert not writable.uploads


def test_a_resumed_run_with_another_plan_begins_again(
    writable: SmallStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from formats.stores.target import StoreTarget

    with monkeypatch.context() as patch:
        patch.setattr(StoreTarget, "discard", StoreTarget.keep)
        writable.hook = lambda asked: (
            Fault("status", 403, "AccessDenied") if asked.action == "complete" else None
        )
        assert run(*WORDS, "--resume").status == 1
    writable.restart()
    outcome = run(*WORDS, "--dtype", "fp32", "--resume")
    assert outcome.status == 0, outcome.err
    assert "--dtype is fp32, was None" in caplog.text
    assert not writable.uploads
