"""The judge: it checks the promises of docs/reliability.md, and gives one Failure for each broken one.

wrong       exit 0 and an output, or an answer, that isn't right
lost        what was at the target before is gone, and nothing complete has taken its place
executed    a checkpoint had code run
outside     a checkpoint had a file read that isn't part of it
traceback   Python's own words instead of a message
hang        no end within the time that each case has
memory      more than 500 MB in one process
left        remains of a run that nobody asked to be kept
message     an exit status or a message that is none of ours
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from tests.runs import snapshot
from tests.trust.server import Outcome

PROMISES = (
    "wrong",
    "lost",
    "executed",
    "outside",
    "traceback",
    "hang",
    "memory",
    "left",
    "message",
)
MEMORY_BYTES = 500 << 20

ABSENT: Mapping[str, str] = {}
"""The snapshot of a target that isn't there, or is an empty directory."""

_PYTHON = re.compile(
    r"Traceback|Exception ignored|Fatal Python error|please report this|Error: \[Errno|Segmentation"
)
_OURS = re.compile(r"megaconv: (error|interrupted|warning)|megatron-lite: |Usage: |usage: ")


class Failure(Exception):
    """A promise that was broken; `promise` is one of PROMISES."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise, self.text = promise, text


def check_conduct(
    outcome: Outcome, what: str = "", *, killed: bool = False, answers: Collection[int] = (0,)
) -> None:
    """Check the rules for every run, whatever disturbed it.

    killed: by the case itself, so that it need not say anything.
    answers: exit statuses that are no errors; 4 is one of commands that compare.
    """
    status = outcome.status
    shown = f"{what}: exit {status}: {outcome.err[-600:]}"
    if outcome.hung:
        raise Failure("hang", f"{what}: no end after {outcome.seconds:.0f} s")
    for event in outcome.events:
        promise = "outside" if event.startswith("open ") else "executed"
        raise Failure(promise, f"{what}: {event}")
    if _PYTHON.search(outcome.err):
        raise Failure("traceback", shown)
    if outcome.peak_bytes > MEMORY_BYTES:
        raise Failure("memory", f"{what}: {outcome.peak_bytes >> 20} MB")
    if killed:
        return
    if status < 0:
        raise Failure("message", f"{what}: ended by signal {-status}")
    says_why = _OURS.search(outcome.err)
    if status not in answers and not says_why:
        raise Failure("message", shown)


def state(target: Path) -> Mapping[str, str]:
    """A target's files by name, hashed; ABSENT where there is none."""
    return snapshot(target) if target.is_dir() else ABSENT


def check_one_of(target: Path, allowed: Collection[Mapping[str, str]], what: str) -> None:
    """The target is, file by file, one of the states that it may have: no mixture of two and no part of one."""
    found = state(target)
    if found in allowed:
        return
    if not found:
        raise Failure("lost", f"{what}: nothing is at the target any more")

    def differing(expected: Mapping[str, str]) -> set[str]:
        changed = set(expected.items()) ^ set(found.items())
        return {name for name, _ in changed}

    fewest = min(map(differing, allowed), key=len)
    names = ", ".join(sorted(fewest)[:5])
    raise Failure("wrong", f"{what}: the target is no complete output: {names} differ")


def check_exists_somewhere(folder: Path, states: Collection[Mapping[str, str]], what: str) -> None:
    """Check that at least one complete checkpoint is left below a folder, under any name."""
    if not any(state(path) in states for path in [folder, *folder.rglob("*")] if path.is_dir()):
        raise Failure("lost", f"{what}: no complete checkpoint is left, under any name")


def check_nothing_left(folder: Path, known: Collection[str], what: str) -> None:
    """Only known names are in the folder of a target."""
    found = sorted(path.name for path in folder.iterdir() if path.name not in known)
    if found:
        held = sum(len(list((folder / name).rglob("*"))) for name in found)
        raise Failure("left", f"{what}: {', '.join(found)}, with {held} entries")
