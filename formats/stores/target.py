"""Writes an output to a prefix of a store, completely or not at all, as `formats.staging` does on a disk.

    1  claim        ckpt/.megaconv-partial.json, on condition that there is none
    2  send         parts of uploads, in any order; nobody can see them
    3  publish      uploads become objects, 16 at a time, each on condition that there is none; then small files.
                    Further files of an output that is replaced are deleted
    4  selectors    the files by which readers find the rest, one after another (formats/stores/selectors.py)
    5  tidy         journal and claim are deleted

A run that is killed in step 2 leaves nothing that readers see but the claim. In step 3 it leaves objects that nothing
points to; megaconv refuses to read them. From the last selector on the output is complete.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from formats import signals
from formats.errors import CheckpointError, CorruptCheckpoint, NotEnoughSpace
from formats.journal import changes, warn_of_discarded
from formats.output import Unwritten
from formats.stores import leftovers, selectors
from formats.stores.claim import PUBLISHING, Claim
from formats.stores.directory import stand_in_files
from formats.stores.growing_file import GrowingPartFile
from formats.stores.objects import Listed
from formats.stores.opening import Opening, Parts
from formats.stores.part_file import PartFile, Sender, SmallFile
from formats.stores.part_sizes import PART_BYTES
from formats.stores.publication import Publication
from formats.stores.slots import Slots, Spool, require_space
from formats.stores.store_journal import SentFile, StoreJournal
from formats.stores.waiting import NOTHING, Terms, Waiting
from formats.stores.writing import Held, Upload, WritableStore, is_same

_log = logging.getLogger("megaconv")


class StoreTarget:
    """The output of a run at a prefix. It has the interface of `formats.staging.Staging`."""

    journal_pause = 6.0

    def __init__(
        self,
        store: WritableStore,
        prefix: str,
        terms: Terms,
        *,
        member: int = 0,
        members: int = 1,
        record: str = "megaconv.json",
    ) -> None:
        """Raises TargetExists if objects are there, unless terms.overwrite.

        prefix: without slashes at its ends, and not empty. member: number of this process among `members` that write
        the output together. Number 0 opens first and commits last. record: the file that member 0 adds at the end.
        """
        self.target = f"{store.uri}/{prefix}"
        self.committed = False
        self._store, self._prefix, self._terms = store, prefix, terms
        self._member, self._members, self._record_name = member, members, record
        self._opening = Opening(store, prefix, terms)
        self._journal = StoreJournal(store, prefix, member)
        self._sender: Sender | None = None
        self._waiting = NOTHING
        self._files: dict[str, PartFile] = {}
        self._small: dict[str, SmallFile] = {}
        self._earlier: dict[str, Parts] = {}
        self._objects: dict[str, Listed] = {}
        """Objects at the prefix when this run began, by name."""
        self._sent: list[SentFile] = []
        self._publication: Publication | None = None
        self._finished = self._claiming = False
        if not member:
            self._opening.look()

    @property
    def _claim(self) -> Claim:
        return self._opening.claim

    # Before the first byte.

    def expect(self, waiting: Waiting) -> None:
        """Set the number of parts that wait. Raises NotEnoughSpace if the spool can't hold them."""
        self._waiting = waiting

    def require_space(self, size: int) -> None:
        """Raise an error if the spool can't hold the parts that wait. The store's own space can't be asked for."""
        needed, most = self._waiting.spool_bytes, self._terms.most_spool_bytes
        if needed > most:
            raise NotEnoughSpace(
                f"--max-spool: {needed:,} bytes of parts wait at most, and {most:,} are allowed; allow more, or give a larger --max-memory"
            )
        if needed:
            require_space(self._spool_directory, needed)

    @property
    def _spool_directory(self) -> Path:
        return self._terms.spool or Path(tempfile.gettempdir())

    def open(
        self, plan: Mapping[str, str], *, resume: bool, sizes: Mapping[str, int] | None = None
    ) -> list[dict[str, Any]]:
        """Claim the prefix, or take over the work of a run with the same plan. Returns its journal's entries."""
        names = dict(sizes or {})
        self._claiming = True
        found = self._opening.found() if self._member else self._opening.claimed()
        entries = self._journal.read(found.journal) if resume else []
        if not self._fits(entries, plan):
            entries = []
            if not self._member:
                found = self._opening.begin_again(found)
        self._objects = found.objects
        if entries:
            sums = None if self._store.lists_checksums else self._journal.sums()
            self._earlier = self._opening.parts(found, names, sums)
        else:
            self._journal.append([{"plan": dict(plan)}])
        own = [] if self._member else [self._record_name]
        self._journal.put_files([*names, *own])
        self._sender = Sender(self._store, self._slots(), self._waiting.connections)
        if not self._member:
            self._claim.keep_renewed(self.fail)
        return entries[1:]

    def _fits(self, entries: Sequence[dict[str, Any]], plan: Mapping[str, str]) -> bool:
        """True if an earlier run's entries and parts can be used."""
        if not entries:
            return False
        before = entries[0].get("plan")
        if before != dict(plan) and not self._member:
            warn_of_discarded(self.target, changes(before, plan))
        return bool(before == dict(plan))

    def _slots(self) -> Slots:
        waiting = self._waiting
        if waiting.is_spooled:
            return Spool(waiting.spool_parts, waiting.part_bytes, self._spool_directory)
        return Slots(waiting.memory_bytes)

    def fail(self, error: BaseException) -> None:
        """End all writers that wait for a place, because the run ends with this error."""
        if self._sender is not None:
            self._sender.error = self._sender.error or error
            self._sender.slots.fail(error)

    # While tensors arrive.

    def file(
        self, name: str, size: int, *, keep: bool = False, unwritten: Unwritten | None = None
    ) -> PartFile | SmallFile:
        """A new file of the output.

        unwritten: the ranges that nobody writes, for a file with tensors; None for a file without. keep: has no meaning
        here, since the store knows its parts.
        """
        key = f"{self._prefix}/{name}"
        is_small = size < PART_BYTES or selectors.is_selector(name)
        if not size or (unwritten is None and is_small):
            small = self._small[name] = SmallFile(key, size)
            return small
        assert self._sender is not None
        upload, parts = self._earlier.get(name, (None, {}))
        gaps, known = unwritten or Unwritten()
        made = PartFile(self._sender, key, size, gaps, known, upload, dict(parts))
        self._files[name] = made
        if upload is None and name in self._objects and self._claim_is_publishing():
            made.done = self._completed(name, size)
        return made

    def grow(self, name: str, most_bytes: int) -> GrowingPartFile:
        """A new file of the output that grows at its end. most_bytes: the largest possible size."""
        planned = self.file(name, most_bytes, unwritten=Unwritten())
        assert isinstance(planned, PartFile)
        assert self._sender is not None
        return GrowingPartFile(planned, self._journal, self._sender.wait)

    def _claim_is_publishing(self) -> bool:
        holder = self._claim.holder
        if self._member:
            found = self._claim.look()
            holder = found[0] if found is not None else holder
        return holder.phase == PUBLISHING

    def _completed(self, name: str, size: int) -> Held | None:
        """The state of an object that an earlier run has completed; None if the object is another."""
        sent, _ = self._journal.sent(self._member)
        expected = next((file.whole for file in sent if file.name == name), None)
        there = self._store.head(f"{self._prefix}/{name}")
        if expected is None or there is None or not is_same(there, expected):
            return None
        return there

    def record(self, entries: list[dict[str, Any]]) -> None:
        """Append to the journal. The store has to have the data that the entries describe."""
        if not self._store.lists_checksums:
            self._journal.put_sums({name: file.sums() for name, file in self._files.items()})
        self._journal.append(entries)

    # The end.

    def finish(self) -> None:
        """Send everything that this process has. Nothing is written to its files after this call."""
        if self._finished:
            return
        assert self._sender is not None
        for file in self._files.values():
            if file.done is None:
                file.finish()
        self._sender.wait()
        self._sent = []
        for name, file in self._files.items():
            if file.done is None:
                self._sent.append(SentFile(name, file.begun(), file.parts, file.whole()))
            else:
                self._sent.append(SentFile(name, Upload(file.key, "", 0.0), {}, file.done))
        if self._members > 1:
            for name, small in self._small.items():
                self._journal.put_small(name, small.content)
        self._journal.put_sent(self._sent, self._small)
        self._finished = True

    def readable(self) -> Path:
        """A directory that stands for the output, to read it back before readers can find it.

        Member 0 makes the objects visible that selectors will point to; the others call this after it.
        """
        sent, small = self._everything()
        if not self._member:
            self._published().show(sent, small)
        root = stand_in_files(
            self._store,
            self._prefix,
            [
                Listed(f"{self._prefix}/{file.name}", file.whole.size, self._tag_of(file))
                for file in sent
            ],
        )
        for name, content in small.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content())
        return root

    def _tag_of(self, file: SentFile) -> str:
        there = self._store.head(f"{self._prefix}/{file.name}")
        if there is None or not is_same(there, file.whole):
            raise CorruptCheckpoint(
                f"{self.target}/{file.name}: isn't the object that was written; another program has changed it"
            )
        return there.tag

    def _everything(self) -> tuple[list[SentFile], dict[str, Callable[[], bytes]]]:
        """(files in parts, content of small files by name) of all processes."""
        sent = list(self._sent)
        small: dict[str, Callable[[], bytes]] = {}
        for name, file in self._small.items():
            small[name] = lambda file=file: file.content  # type: ignore[misc]
        for member in range(self._members):
            if member == self._member:
                continue
            theirs, names = self._journal.sent(member)
            sent += theirs
            for name in names:
                small[name] = lambda member=member, name=name: self._journal.small(member, name)  # type: ignore[misc]
        return sent, small

    def commit(self) -> None:
        """Make the output visible. A signal that arrives too late to stop this is delivered at its end."""
        self.finish()
        sent, small = self._everything()
        publication = self._published()
        publication.show(sent, small)
        names = [*(file.name for file in sent), *small]
        with signals.held():
            publication.remove_others(names)
            publication.show_selectors(small)
            self.committed = True
            self._tidy()

    def _published(self) -> Publication:
        if self._publication is None:
            place = self._store, self._prefix
            self._publication = Publication(*place, self._claim, self._objects)
        return self._publication

    def _tidy(self) -> None:
        """Remove everything but the output."""
        self._claim.stop_renewing()
        self._close_sender()
        leftovers.remove(self._store, self._opening.found(), self._claim)
        self._claim.remove()

    def discard(self) -> bool:
        """Remove everything that this run has written, unless it is complete. Other members leave that to member 0.

        Returns False if something is left, because the store can't be asked.
        """
        self._end()
        try:
            self._remove_all()
            return True
        except CheckpointError as error:
            _log.warning(
                "%s: what this run has written can't be removed (%s); `megaconv clean %s` does",
                self.target,
                error,
                self.target,
            )
            return False
        finally:
            self._claim.stop()

    def _remove_all(self) -> None:
        if self._member or self.committed or not self._claiming:
            return
        found = self._opening.found()
        if found.holder is None or found.holder.run != self._claim.holder.run:
            return
        self._claim.adopt(found.tag)
        leftovers.remove(self._store, found, self._claim)
        self._claim.remove()

    def keep(self) -> None:
        """Leave parts and journal to a run that resumes, or to member 0."""
        self._end()
        try:
            if self._claim.is_held:
                self._claim.change(released=True)
        except CheckpointError as error:
            _log.warning("%s: %s", self.target, error)
        finally:
            self._claim.stop()

    def _end(self) -> None:
        self._claim.stop_renewing()
        self._close_sender()

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
