"""Kills and faults of runs that write into a store, for `make test` (a sample) and `make trust`.

A kill comes before or after the effect of one request. A fault makes one request fail, once or from then on. Afterwards
the same command runs again. The target must hold nothing, or the complete output; nothing else may stay.
"""

import faulthandler
import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from formats import partial_files
from formats.stores import selectors, windows
from formats.stores.claim import CLAIM
from megaconv.engine import transfer
from megaconv.errors import CODES
from megaconv.patches import blocks_file
from tests.runs import Outcome, run
from tests.stores.small_store import Asked, Fault, SmallStore

PATIENCE = 60.0
"""Seconds after which a run counts as hung. A busy machine needs more."""
_TERMINATED = 143
_SPREAD = 0.05
"""Seconds within which the two runs of a race begin."""
FAULTS = {
    "503": Fault("status", 503, "SlowDown"),
    "500": Fault("status", 500, "InternalError"),
    "500 after": Fault("status", 500, "InternalError", after=True),
    "reset": Fault("reset"),
    "reset after": Fault("reset", after=True),
    "half": Fault("half"),
    "other bytes": Fault("other"),
    "stall": Fault("stall", seconds=0.02),
    "412": Fault("status", 412, "PreconditionFailed"),
    "403": Fault("status", 403, "AccessDenied"),
    "expired": Fault("status", 400, "ExpiredToken"),
    "skewed": Fault("status", 403, "RequestTimeTooSkewed"),
    "404": Fault("status", 404, "NoSuchUpload"),
}


class Scenario(NamedTuple):
    """A conversion into a store."""

    words: tuple[object, ...]
    """The command line without --resume."""
    expected: dict[str, bytes]
    """The files of an undisturbed run."""


class Broken(AssertionError):
    """The promise was broken."""


def _ran(*words: object) -> Outcome:
    """Run a command. If a signal ended it, end this process too: the command took the signal as its own."""
    outcome = run(*words)
    if outcome.status == CODES["interrupted"].exit_status:
        sys.exit(_TERMINATED)
    return outcome


def _start_afresh(store: SmallStore) -> None:
    """Empty the store, and free the clients of earlier runs. A process keeps them for tensors that somebody may hold."""
    store.clear()
    partial_files._files.clear()
    partial_files._roots.clear()
    windows._SHARED = windows._Shared()


def undisturbed(store: SmallStore, words: tuple[object, ...]) -> tuple[Scenario, int]:
    """(the scenario, the number of its requests)."""
    _start_afresh(store)
    outcome = _ran(*words)
    assert outcome.status == 0, outcome.err
    return Scenario(words, store.below("out/")), len(store.asked)


def kill(store: SmallStore, scenario: Scenario, number: int, *, after: bool, resume: bool) -> str:
    """Kill a run at a request, and run it again. Returns the state in between. Raises Broken."""
    _start_afresh(store)
    what = f"killed {'after' if after else 'before'} request {number}, resume={resume}"
    words = (*scenario.words, "--resume") if resume else scenario.words
    process: list[int] = []

    def strike(asked: Asked) -> None:
        if asked.number == number:
            os.kill(process[0], signal.SIGKILL)

    if after:
        store.done = strike  # type: ignore[assignment]
    else:
        store.hook = strike  # type: ignore[assignment]
    status = _in_a_child(words, process.append)
    store.restart()
    state = _state(store, scenario, what)
    again = _ran(*words)
    _judge_repetition(store, scenario, again, f"{what}, then {state}", was=state)
    if status >= 0 and state != "complete":
        raise Broken(f"{what}: ended with {status} before the kill, {state}")
    return state


def fault(
    store: SmallStore, scenario: Scenario, number: int, kind: str, *, lasting: bool
) -> Outcome:
    """Let a request fail, once or from then on. Raises Broken."""
    _start_afresh(store)
    hit: list[Asked] = []

    def fail(asked: Asked) -> Fault | None:
        is_hit = asked.number >= number if lasting else asked.number == number
        if not is_hit:
            return None
        hit.append(asked)
        # A store that says that an object to delete isn't there has none.
        is_deleted = kind == "404" and asked.action == "delete"
        return FAULTS[kind]._replace(after=True) if is_deleted else FAULTS[kind]

    store.hook = fail
    outcome = _ran(*scenario.words)
    store.restart()
    first = f" ({hit[0].action} {hit[0].key})" if hit else ""
    what = f"{kind} at request {number}{first}{' and later' if lasting else ''}"
    state = _state(store, scenario, what)
    if outcome.status == 0 and state != "complete":
        raise Broken(f"{what}: ended with 0, and the output is {state}")
    if outcome.status and outcome.err.count("\n") > 2:
        raise Broken(f"{what}: {outcome.err}")
    again = _ran(*scenario.words)
    _judge_repetition(store, scenario, again, what, was=state)
    return outcome


def race(store: SmallStore, scenario: Scenario, pauses: tuple[float, float]) -> None:
    """Let two processes write to one target, which begin after these seconds. Raises Broken unless exactly one wins."""
    _start_afresh(store)
    pids = [_forked(scenario.words, partial(time.sleep, pause)) for pause in pauses]
    statuses = sorted([_status_of(pid, scenario.words) for pid in pids])
    what = f"two runs after {pauses} seconds"
    if statuses != [0, 2]:
        raise Broken(f"{what}: ended with {statuses}")
    if not _same(store.below("out/"), scenario.expected) or store.unfinished:
        raise Broken(f"{what}: {store.all_keys()}, uploads {store.unfinished}")


def _in_a_child(words: tuple[object, ...], started: Callable[[int], None]) -> int:
    """Run a command in a forked process. Returns its status, negative for a signal."""
    reading, writing = os.pipe()

    def wait() -> None:
        """Wait until the parent knows this process."""
        os.close(writing)
        os.read(reading, 1)

    pid = _forked(words, wait)
    os.close(reading)
    started(pid)
    os.close(writing)
    return _status_of(pid, words)


def _forked(words: tuple[object, ...], before: Callable[[], None]) -> int:
    """Begin a command in a forked process. before: called there first. Returns its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        before()
        transfer.JOURNAL_SECONDS = blocks_file.JOURNAL_SECONDS = 0
        faulthandler.dump_traceback_later(PATIENCE - 5)
        with redirect_stderr(StringIO()):
            status = run(*words).status
    finally:
        sys.stdout.flush()
        os._exit(status)


def _status_of(pid: int, words: tuple[object, ...]) -> int:
    """The exit status of a process, negative for a signal. Raises Broken for one that hangs."""
    until, done = time.monotonic() + PATIENCE, 0
    try:
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
    finally:
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    raise Broken(f"hung for {PATIENCE:.0f} seconds: {words}")


def _visible(store: SmallStore) -> dict[str, bytes]:
    return {
        name: content for name, content in store.below("out/").items() if ".megaconv-" not in name
    }


def _same(found: dict[str, bytes], expected: dict[str, bytes]) -> bool:
    return found == expected


def _state(store: SmallStore, scenario: Scenario, what: str) -> str:
    """nothing, fragments (with a claim, and without the last selector), or complete."""
    found = _visible(store)
    if not found:
        return "nothing"
    if _same(found, scenario.expected):
        return "complete"
    last = selectors.last(scenario.expected)
    if last in found:
        raise Broken(f"{what}: the last selector is there, and {sorted(found)} are not the output")
    if f"out/{CLAIM}" not in store.all_keys():
        raise Broken(f"{what}: objects without a claim: {sorted(found)}")
    for name, content in found.items():
        if content != scenario.expected.get(name):
            raise Broken(f"{what}: {name} is torn")
    return "fragments"


def _judge_repetition(
    store: SmallStore, scenario: Scenario, again: Outcome, what: str, *, was: str
) -> None:
    """The same command makes the output complete, or finds it complete, and tidies up."""
    expected = 2 if was == "complete" else 0
    if again.status != expected:
        raise Broken(f"{what}: the repetition ended with {again.status}: {again.err}")
    if not _same(store.below("out/"), scenario.expected):
        raise Broken(f"{what}: after the repetition: {sorted(store.below('out/'))}")
    if store.unfinished:
        raise Broken(f"{what}: uploads stay: {store.unfinished}")


def _tell(count: int, counts: dict[str, int]) -> None:
    if count % 100 == 99:
        print(json.dumps(counts), file=sys.stderr, flush=True)


def main() -> int:
    """`python -m tests.stores.attacks --kills 500 --faults 5000 --races 200 [--seconds 600]`: the full numbers."""
    import argparse
    import tempfile

    from formats.stores import part_sizes, patience
    from tests.conftest import FIXTURES
    from tests.stores import small_store

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--races", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds until a run counts as hung"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    dice, until = random.Random(options.seed), time.monotonic() + options.seconds
    part_sizes.PART_BYTES = 16 << 10
    patience._FIRST_PAUSE, patience._LONGEST_PAUSE = 0.001, 0.01
    counts: dict[str, int] = {}
    global PATIENCE
    PATIENCE = options.patience
    with tempfile.TemporaryDirectory() as home, small_store.running(SmallStore("models")) as store:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": store.url, "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1",
            "AWS_CONFIG_FILE": str(Path(home) / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(Path(home) / "none"),
        }  # fmt: skip
        source = FIXTURES / "peft-llama-all-linear/base"
        ways = ("--saver core --tp 2", "--saver hf --max-shard-size 20KB", "--saver hf --verify")
        scenarios = [
            undisturbed(store, ("convert", source, "s3://models/out", *way.split())) for way in ways
        ]
        gc.freeze()  # keeps the collector from visiting all modules again and again
        for count in range(options.kills):
            if time.monotonic() > until:
                break
            scenario, requests = scenarios[count % len(scenarios)]
            number, after, resume = (
                dice.randrange(requests),
                dice.random() < 0.5,
                dice.random() < 0.5,
            )
            state = kill(store, scenario, number, after=after, resume=resume)
            counts[f"killed: {state}"] = counts.get(f"killed: {state}", 0) + 1
            _tell(count, counts)
        for count in range(options.faults):
            if time.monotonic() > until:
                break
            scenario, requests = scenarios[count % len(scenarios)]
            kind, lasting = dice.choice(list(FAULTS)), dice.random() < 0.3
            outcome = fault(store, scenario, dice.randrange(requests), kind, lasting=lasting)
            counts[f"fault: exit {outcome.status}"] = (
                counts.get(f"fault: exit {outcome.status}", 0) + 1
            )
            _tell(count, counts)
        for count in range(options.races):
            if time.monotonic() > until:
                break
            race(store, scenarios[1][0], (dice.random() * _SPREAD, dice.random() * _SPREAD))
            counts["races"] = counts.get("races", 0) + 1
            _tell(count, counts)
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
