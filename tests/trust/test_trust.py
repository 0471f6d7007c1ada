"""The attacks of this directory, a few seconds of each: the same code that `make trust` runs for an hour."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SEED = 1

SAMPLE = {
    "kills": 5, "faults": 8, "mutations": 10, "foreign": 8, "seals": 15, "pickles": 12, "archives": 6, "files": 12,
    "patches": 20, "requests": 60, "moving": 16, "fuzz": 1000,
}  # fmt: skip
"""Cases of each attack."""


@dataclass(frozen=True)
class Attacked:
    """The result of some attacks: the report of `python -m tests.trust`, and its output."""

    report: Mapping[str, Any]
    said: str

    def assert_held(self, *attacks: str) -> None:
        """All cases of these attacks ran, and no promise was broken. Says how to repeat what failed."""
        failed = {failure["attack"] for failure in self.report["failures"]}
        assert not failed & set(attacks), self.said
        for attack in attacks:
            assert self.report["cases"].get(attack, 0) >= SAMPLE.get(attack, 1), self.said


def attacked(directory: Path, counts: Mapping[str, int]) -> Attacked:
    words = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    report = directory / "report.json"
    options = ["--seed", str(SEED), "--jobs", "1", "--report", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.trust", *words, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = done.stderr + done.stdout
    assert report.is_file(), said
    found = json.loads(report.read_text())
    assert done.returncode == bool(found["failures"]), said
    return Attacked(found, said)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    """One run of all attacks: each start imports everything, and makes the checkpoints that are attacked."""
    return attacked(tmp_path_factory.mktemp("trust"), SAMPLE)


def test_conversions_that_are_killed_leave_the_old_output_or_the_new_one_and_can_be_repeated(
    sample: Attacked,
) -> None:
    sample.assert_held("kills")


def test_conversions_in_which_a_system_call_fails_leave_the_old_output_or_the_new_one(
    sample: Attacked,
) -> None:
    if "faults" in sample.report["skipped"]:
        pytest.skip(sample.report["skipped"]["faults"])
    sample.assert_held("faults")


def test_damage_to_a_checkpoint_is_noticed_or_harmless(sample: Attacked) -> None:
    sample.assert_held("mutations")


def test_damage_to_a_file_of_other_software_is_noticed_or_harmless(sample: Attacked) -> None:
    sample.assert_held("foreign")


def test_damage_to_a_sealed_checkpoint_and_hostile_signatures_are_noticed(
    sample: Attacked,
) -> None:
    sample.assert_held("seals")


def test_hostile_checkpoints_run_nothing_and_are_refused_in_one_line(sample: Attacked) -> None:
    sample.assert_held("pickles", "archives", "files")


def test_damaged_and_hostile_patches_make_nothing_wrong(sample: Attacked) -> None:
    sample.assert_held("patches")


def test_hostile_requests_are_refused_and_the_server_continues(sample: Attacked) -> None:
    sample.assert_held("requests")


def test_a_source_that_changes_while_it_is_read_gives_no_mixture(sample: Attacked) -> None:
    sample.assert_held("moving")


def test_parsers_raise_nothing_but_their_own_errors(sample: Attacked) -> None:
    sample.assert_held("fuzz")


@pytest.mark.slow
def test_ranks_of_which_some_are_killed_end_and_can_be_started_again(tmp_path: Path) -> None:
    attacked(tmp_path, {"ranks": 8}).assert_held("ranks")


@pytest.mark.slow
def test_training_runs_that_are_killed_while_they_save_end_with_the_same_bits(
    tmp_path: Path,
) -> None:
    attacked(tmp_path, {"trainer": 6}).assert_held("trainer")
