"""The attacks of this directory, a few seconds of each: the same code that `make trust` runs for an hour."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 1


def attack(**counts: int) -> str:
    """Run so many cases of each attack. Fails with all that failed, and how to repeat it; returns the table."""
    words = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    command = [sys.executable, "-m", "tests.trust", *words, "--seed", str(SEED), "--jobs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_conversions_that_are_killed_leave_the_old_output_or_the_new_one_and_can_be_repeated() -> None:
    attack(kills=49)


def test_conversions_in_which_a_system_call_fails_leave_the_old_output_or_the_new_one() -> None:
    found = re.search(r"faults \| skipped: (.*) \|", table := attack(faults=80))
    if found:
        pytest.skip(found[1])
    assert "| faults | 80 |" in table


def test_damage_to_a_checkpoint_is_noticed_or_harmless() -> None:
    attack(mutations=120)


def test_hostile_checkpoints_run_nothing_and_are_refused_in_one_line() -> None:
    attack(pickles=60, archives=30, files=60)


def test_a_source_that_changes_while_it_is_read_gives_no_mixture() -> None:
    attack(moving=40)


def test_parsers_raise_nothing_but_their_own_errors() -> None:
    attack(fuzz=5000)


@pytest.mark.slow
def test_ranks_of_which_some_are_killed_end_and_can_be_started_again() -> None:
    attack(ranks=8)


@pytest.mark.slow
def test_training_runs_that_are_killed_while_they_save_end_with_the_same_bits() -> None:
    attack(trainer=6)
