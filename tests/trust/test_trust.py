"""The attacks of this directory, a few seconds of each: the same code that `make trust` runs for an hour."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 1


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run so many cases of each attack. Fails with all that failed, and how to repeat it; returns the table."""
    sources = tmp_path_factory.mktemp("sources")

    def run(**counts: int) -> str:
        words = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
        options = ["--seed", str(SEED), "--jobs", "1", "--sources", str(sources)]
        command = [sys.executable, "-m", "tests.trust", *words, *options]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return run


def test_conversions_that_are_killed_leave_the_old_output_or_the_new_one_and_can_be_repeated(
    attack: Callable[..., str],
) -> None:
    attack(kills=8)


def test_conversions_in_which_a_system_call_fails_leave_the_old_output_or_the_new_one(
    attack: Callable[..., str],
) -> None:
    found = re.search(r"faults \| skipped: (.*) \|", table := attack(faults=20))
    if found:
        pytest.skip(found[1])
    assert "| faults | 20 |" in table


def test_damage_to_a_checkpoint_is_noticed_or_harmless(attack: Callable[..., str]) -> None:
    attack(mutations=20)


def test_damage_to_a_file_of_other_software_is_noticed_or_harmless(
    attack: Callable[..., str],
) -> None:
    attack(foreign=16)


def test_damage_to_a_sealed_checkpoint_and_hostile_signatures_are_noticed(
    attack: Callable[..., str],
) -> None:
    attack(seals=15)


def test_hostile_checkpoints_run_nothing_and_are_refused_in_one_line(
    attack: Callable[..., str],
) -> None:
    attack(pickles=12, archives=6, files=12)


def test_damaged_and_hostile_patches_make_nothing_wrong(attack: Callable[..., str]) -> None:
    attack(patches=30)


def test_hostile_requests_are_refused_and_the_server_goes_on(attack: Callable[..., str]) -> None:
    attack(requests=60)


def test_a_source_that_changes_while_it_is_read_gives_no_mixture(
    attack: Callable[..., str],
) -> None:
    attack(moving=16)


def test_parsers_raise_nothing_but_their_own_errors(attack: Callable[..., str]) -> None:
    attack(fuzz=1000)


@pytest.mark.slow
def test_ranks_of_which_some_are_killed_end_and_can_be_started_again(
    attack: Callable[..., str],
) -> None:
    attack(ranks=8)


@pytest.mark.slow
def test_training_runs_that_are_killed_while_they_save_end_with_the_same_bits(
    attack: Callable[..., str],
) -> None:
    attack(trainer=6)
