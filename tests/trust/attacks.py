"""The kinds of attack, in the order in which the runner takes them; those that import torch come last."""

from collections.abc import Callable
from typing import NamedTuple

from tests.trust import (
    faults,
    fuzz,
    hostile_archives,
    hostile_files,
    hostile_patches,
    hostile_pickles,
    hostile_requests,
    kills,
    moving_sources,
    mutations,
    rank_kills,
    seals,
    trainer_kills,
)
from tests.trust.bench import Bench


class Attack(NamedTuple):
    run: Callable[[Bench, int], None]
    """One case by its number. Raises judging.Failure."""
    what: str
    batch: int = 1
    """Inputs that one case takes."""

    def cases(self, count: int) -> int:
        """The number of cases for this number of inputs."""
        return -(-count // self.batch)


ATTACKS = {
    "kills": Attack(
        kills.attack, "conversions, deltas and applies that are killed or interrupted, and repeated"
    ),
    "faults": Attack(faults.attack, "system calls that fail"),
    "mutations": Attack(mutations.attack, "damaged checkpoints and remains"),
    "foreign": Attack(
        mutations.attack_foreign, "damaged files of GGUF, NeMo, Orbax and Megatron-Bridge"
    ),
    "seals": Attack(seals.attack, "damaged sealed checkpoints and hostile signatures"),
    "patches": Attack(hostile_patches.attack, "damaged and hostile patches"),
    "pickles": Attack(hostile_pickles.attack, "hostile pickles"),
    "archives": Attack(hostile_archives.attack, "hostile archives"),
    "files": Attack(
        hostile_files.attack, "special files, gigantic numbers, hostile names, precious targets"
    ),
    "requests": Attack(hostile_requests.attack, "hostile requests to serve-hf"),
    "moving": Attack(moving_sources.attack, "sources that change while they are read"),
    "fuzz": Attack(fuzz.attack, "inputs of parsers", fuzz.BATCH),
    "ranks": Attack(rank_kills.attack, "conversions by several processes of which some are killed"),
    "trainer": Attack(trainer_kills.attack, "training runs that are killed while they save"),
}
