"""The claim of a run on a prefix: an object that only one run can write.

    ckpt/.megaconv-partial.json      {"run": …, "host": …, "boot": …, "process": [pid, start], "phase": "sending"}

It appears by a put on condition that there is none, and changes on condition of its ETag. The run renews it every two
minutes. All ages are by the store's clock.
"""

import json
import os
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError, TargetExists
from formats.stores.directory import CLAIM
from formats.stores.writing import ABSENT, Conflict, WritableStore

RENEWED_SECONDS = 120.0
STALE_SECONDS = 600.0
"""Age without renewal from which on another host's run counts as dead."""
SENDING, PUBLISHING, COMPLETE = "sending", "publishing", "complete"


@dataclass(frozen=True)
class Holder:
    """The run that holds a claim, as the claim's object describes it."""

    run: str
    version: str
    host: str
    boot: str
    """Boot id and process namespace: two processes with the same one can see each other."""
    process: tuple[int, int]
    """Number of the process, and its start in clock ticks since the boot."""
    phase: str = SENDING
    """SENDING: nothing of the output is visible. PUBLISHING: objects of it may be. COMPLETE: all are."""
    replaces: bool = False
    """True if objects of an older output may lie there."""
    released: bool = False
    """True if the run has ended and left its work to another run."""
    foreign: tuple[str, ...] = ()
    """Uploads of other programs, which were there before the first claim, and those of runs whose work was discarded."""

    def content(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @property
    def described(self) -> str:
        return f"process {self.process[0]} on {self.host}"


def parsed(content: bytes) -> Holder | None:
    """The holder in a claim's object; None if it is no claim."""
    try:
        found = json.loads(content)
        sequences = {name: tuple(found[name]) for name in ("process", "foreign")}
        return Holder(**{**found, **sequences})
    except (ValueError, TypeError, KeyError):
        return None


def this_process(version: str) -> Holder:
    """A new run of this process."""
    return Holder(
        uuid.uuid4().hex,
        version,
        socket.gethostname(),
        _boot(),
        (os.getpid(), _start_of(os.getpid())),
    )


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


def _start_of(pid: int) -> int:
    """The start of a process in clock ticks since the boot; 0 if there is no such process, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_of_this_process(holder: Holder) -> bool:
    """True for a claim of this process."""
    here = holder.host == socket.gethostname() and holder.boot == _boot()
    return here and holder.process == (os.getpid(), _start_of(os.getpid()))


_active: set[str] = set()
"""The runs of this process that have not ended."""


def is_gone(holder: Holder, age: float) -> bool:
    """True if the run of a claim has ended. age: seconds since the claim was written."""
    if holder.released:
        return True
    if holder.boot and holder.boot == _boot() and holder.host == socket.gethostname():
        pid, start = holder.process
        is_own = pid == os.getpid()
        return holder.run not in _active if is_own else _start_of(pid) != start
    return age > STALE_SECONDS


def is_here(holder: Holder) -> bool:
    """True if the run of a claim lives on this host."""
    same = bool(holder.boot) and (holder.boot, holder.host) == (_boot(), socket.gethostname())
    return same and not is_gone(holder, 0.0)


class Claim:
    """This run's claim on a prefix."""

    def __init__(self, store: WritableStore, prefix: str, version: str) -> None:
        self._store, self.key = store, f"{prefix}/{CLAIM}"
        self.holder = this_process(version)
        _active.add(self.holder.run)
        self._tag = ""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._lost: Callable[[BaseException], None] = lambda error: None
        self._thread: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        return bool(self._tag)

    def look(self) -> tuple[Holder, str, float] | None:
        """(holder, ETag, age in seconds) of the claim that is there; None if there is none."""
        there = self._store.get(self.key)
        if there is None:
            return None
        holder = parsed(there.content)
        if holder is None:
            raise TargetExists(
                f"{self._store.uri}/{self.key}: is not a claim of megaconv; remove it, or choose another place"
            )
        return holder, there.tag, there.age

    def take(self, *, replaces: bool, foreign: tuple[str, ...]) -> None:
        """Claim a prefix that nobody has. Raises TargetExists if another run is faster."""
        self.holder = replace(self.holder, replaces=replaces, foreign=foreign)
        self._put(ABSENT)

    def take_over(self, before: Holder, tag: str, *, take: bool, age: float) -> None:
        """Replace the claim of a run that has ended. take: also of one that may live on another host.

        Raises TargetExists for a run that lives, or if another run is faster.
        """
        if not is_gone(before, age) and (not take or is_here(before)):
            hint = (
                "wait for its end, or end it"
                if is_here(before)
                else f"it was renewed {age:.0f} seconds ago; wait, or give --take-over if it has ended"
            )
            raise TargetExists(
                f"{self._store.uri}/{self.key}: {before.described} is writing there; {hint}",
                code="target-busy",
            )
        kept = {name: getattr(before, name) for name in ("phase", "replaces", "foreign")}
        self.holder = replace(self.holder, **kept)
        self._put(tag)

    def change(self, **values: Any) -> None:
        """Write the claim again with other values. Raises CheckpointError if another run has taken it over."""
        with self._lock:
            self.holder = replace(self.holder, **values)
            self._put(self._tag)

    def _put(self, only: str) -> None:
        try:
            self._tag = self._store.put(self.key, self.holder.content(), only=only)
        except Conflict:
            self._tag = ""
            raise TargetExists(
                f"{self._store.uri}/{self.key}: another run is writing there; wait for its end, or choose another place",
                code="target-busy",
            ) from None

    def adopt(self, tag: str) -> None:
        """Note the ETag of this run's claim, whose answer may have been lost."""
        self._tag = tag

    def keep_renewed(self, lost: Callable[[BaseException], None]) -> None:
        """Renew the claim in a thread. lost: called with the error if that isn't possible any more."""
        self._lost = lost
        self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._over.wait(RENEWED_SECONDS):
            try:
                self.change()
            except CheckpointError as error:
                self._lost(error)
                return

    def stop_renewing(self) -> None:
        self._over.set()

    def stop(self) -> None:
        """End the renewal, and the run as others in this process see it."""
        self.stop_renewing()
        _active.discard(self.holder.run)

    def remove(self) -> None:
        """Delete the claim, if it still is this run's."""
        self.stop_renewing()
        with self._lock:
            if self._tag:
                self._store.delete(self.key)
                self._tag = ""
        self.stop()
