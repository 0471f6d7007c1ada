"""Conversions in which one system call fails: every kind of call, each of them in turn, with each error that it may have.

failing_calls.c is compiled and preloaded into the harness; the fork that runs a case arms it. Where there is no C compiler
these cases are skipped.
"""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.trust import server
from tests.trust.bench import Bench
from tests.trust.checkpoints import PATCHES, SAVERS
from tests.trust.judging import ABSENT, Failure, check_conduct, check_nothing_left, check_one_of
from tests.trust.kills import journal_every_tensor

SHORT = -1
"""Half of what was to be read or written, instead of an error."""

KINDS = {
    "open": ("EIO", "EACCES", "EMFILE", "ENOSPC", "EINTR"), "read": ("EIO", "EINTR", "SHORT"),
    "write": ("EIO", "ENOSPC", "EDQUOT", "EINTR", "SHORT"), "fsync": ("EIO", "ENOSPC", "EINTR"),
    "truncate": ("EIO", "EINVAL"), "allocate": ("EIO", "ENOSPC", "EINTR", "EOPNOTSUPP"), "rename": ("EIO", "ENOSPC", "EACCES"),
    "exchange": ("ENOSYS", "EINVAL", "EOPNOTSUPP", "EIO", "EACCES"), "unlink": ("EIO", "EACCES"), "rmdir": ("EIO", "EBUSY"),
    "mkdir": ("EIO", "ENOSPC", "EACCES"), "close": ("EIO", "EINTR"), "lock": ("EIO", "ENOLCK", "EOPNOTSUPP", "EINTR"),
    "list": ("EIO", "EMFILE"), "stat": ("EIO", "EACCES"),
}  # fmt: skip
"""The errors of each call, in the order of the enum in failing_calls.c."""

FOR_GOOD = {
    "exchange": ("ENOSYS", "EINVAL", "EOPNOTSUPP"), "lock": ("ENOLCK", "EOPNOTSUPP"), "allocate": ("EOPNOTSUPP",),
    "write": ("EIO", "ENOSPC"), "fsync": ("EIO",), "read": ("EIO",), "open": ("EIO",),
}  # fmt: skip
"""Errors that go on from the n-th call: a file system that can't, a disk that is full or broken."""

UNSUPPORTED = {
    ("exchange", "ENOSYS"), ("exchange", "EINVAL"), ("exchange", "EOPNOTSUPP"), ("allocate", "EOPNOTSUPP"),
    ("lock", "ENOLCK"), ("lock", "EOPNOTSUPP"),
}  # fmt: skip
"""The calls that a file system may lack. The conversion succeeds without them."""

WAYS = {
    "fresh": "",
    "overwrite": "--overwrite",
    "resume": "--resume",
    "verify": "--overwrite --verify",
}
_REMOVING = ("unlink", "rmdir", "list", "open", "stat")
"""Calls that tidying up is made of: where one of them fails, something may stay."""

_PRELOADED = "MEGACONV_FAILING_CALLS"


class Fault(NamedTuple):
    saver: str
    way: str
    kind: str
    call: int
    """The number of the call, from 1."""
    error: str
    for_good: bool

    def __str__(self) -> str:
        which = f"{self.kind} {self.call}{' and later' if self.for_good else ''}"
        return f"{self.saver}, {self.way}; {which}: {self.error}"


def preloaded() -> bool:
    return _PRELOADED in os.environ


def preload_and_start_again() -> str:
    """Replaces this process by one with the library. Returns the reason if the library can't be built."""
    if not sys.platform.startswith("linux"):
        return "only for Linux"
    compilers = [shutil.which(name) for name in ("cc", "gcc", "clang")]
    compiler = next(filter(None, compilers), None)
    if compiler is None:
        return "no C compiler"
    directory = Path(tempfile.mkdtemp(prefix="failing-calls-"))
    library = directory / "failing_calls.so"
    source = Path(__file__).with_name("failing_calls.c")
    options = ["-O1", "-shared", "-fPIC"]
    build = [compiler, *options, "-o", str(library), str(source), "-ldl"]
    compiled = subprocess.run(build, capture_output=True, text=True, check=False)
    if compiled.returncode:
        reason = compiled.stderr.strip()[:300]
        return f"{compiler} can't compile {source.name}: {reason}"
    os.environ[_PRELOADED] = str(library)
    os.environ["LD_PRELOAD"] = str(library)
    return os.execv(sys.executable, [sys.executable, "-m", "tests.trust", *sys.argv[1:]])


def attack(bench: Bench, number: int) -> None:
    """Goes through all faults in a random order."""
    plan = _plan(bench)
    fault = plan[number % len(plan)]
    options = WAYS[fault.way]
    folder = bench.fresh_folder()
    target = folder / "out"
    before = ABSENT
    if "--overwrite" in options:
        old = bench.output("other", fault.saver)
        shutil.copytree(old.path, target)
        before = old.files
    new = bench.output("hf", fault.saver).files
    arguments = bench.words(fault.saver, target, options)
    outcome = server.run(*arguments, folder=folder, prepare=lambda: _arm(bench, fault))
    what = f"{fault} (exit {outcome.status}: {outcome.err.strip()[-300:]})"
    check_conduct(outcome, str(fault))
    succeeded = outcome.status == 0
    allowed = (new,) if succeeded else (before, new)
    check_one_of(target, allowed, what)
    if not succeeded and (fault.kind, fault.error) in UNSUPPORTED:
        raise Failure("message", f"{what}: should do without")
    _judge_remains(fault, folder, outcome, what)
    if number % 4 == 0:
        _judge_repetition(folder, arguments, new, what)


def _judge_remains(fault: Fault, folder: Path, outcome: server.Outcome, what: str) -> None:
    """Without --resume no file may stay. A file that can't be removed, because removing fails, must be named."""
    known = ["out"]
    if outcome.status and "--resume" in WAYS[fault.way]:
        known.append(".out.megaconv-partial")
    remains = [path.name for path in folder.iterdir() if path.name not in known]
    if fault.for_good or (fault.kind in _REMOVING and all(name in outcome.err for name in remains)):
        return
    check_nothing_left(folder, known, what)


def _judge_repetition(
    folder: Path, arguments: list[object], new: Mapping[str, str], what: str
) -> None:
    """Without faults, the same command makes the output. It may replace what is there."""
    overwrite = [] if "--overwrite" in arguments else ["--overwrite"]
    again = server.run(*arguments, *overwrite, folder=folder)
    what = f"{what}; then again"
    check_conduct(again, what)
    if again.status:
        raise Failure("message", f"{what}: exit {again.status}: {again.err}")
    check_one_of(folder / "out", (new,), what)
    check_nothing_left(folder, ("out",), what)


def _arm(bench: Bench, fault: Fault | None) -> None:
    journal_every_tensor()
    arm = _library().failing_calls_arm
    directory = os.fsencode(bench.root) + b"/"
    if fault is None:
        arm(directory, -1, ctypes.c_long(0), 0, 0)
        return
    code = SHORT if fault.error == "SHORT" else getattr(errno, fault.error)
    arm(
        directory,
        list(KINDS).index(fault.kind),
        ctypes.c_long(fault.call),
        code,
        int(fault.for_good),
    )


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ[_PRELOADED])


@cache
def _plan(bench: Bench) -> list[Fault]:
    """Every fault of every call that undisturbed runs make, in this seed's order."""
    plan = []
    for saver in (*SAVERS, *PATCHES):
        for way in WAYS:
            if saver == "delta" and "--verify" in WAYS[way]:
                continue  # it has no such option
            for kind, count in zip(KINDS, _counts(bench, saver, way), strict=True):
                calls = range(1, count + 1)
                plan += [
                    Fault(saver, way, kind, call, error, False)
                    for error in KINDS[kind]
                    for call in calls
                ]
                plan += [
                    Fault(saver, way, kind, call, error, True)
                    for error in FOR_GOOD.get(kind, ())
                    for call in calls
                ]
    bench.random("faults", 0).shuffle(plan)
    return plan


def _counts(bench: Bench, saver: str, way: str) -> list[int]:
    """The number of calls of each kind in an undisturbed run."""
    folder = bench.fresh_folder()
    if "--overwrite" in WAYS[way]:
        shutil.copytree(bench.output("other", saver).path, folder / "out")
    reported = os.memfd_create("counts")

    def report() -> None:
        _arm(bench, None)
        ended = server.call_main

        def main() -> int:
            status = ended()
            counts = [_library().failing_calls_count(kind) for kind in range(len(KINDS))]
            os.write(reported, " ".join(map(str, counts)).encode())
            return status

        server.call_main = main

    arguments = bench.words(saver, folder / "out", WAYS[way])
    outcome = server.run(*arguments, folder=folder, prepare=report)
    counts = [int(word) for word in os.pread(reported, 4096, 0).split()]
    os.close(reported)
    assert outcome.status == 0, outcome.err
    assert sum(counts), "the preloaded library sees no calls"
    return counts
