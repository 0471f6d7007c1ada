"""Saves checkpoints to a prefix of an object store, with the promise of `saver.py`: the tracker is written last.

    <temporary>/iter_0000010/                  each rank writes its files here, and sends them as uncompleted uploads
    <uri>/iter_0000010/__0_0.distcp …          appear when all ranks have sent everything; `.metadata` comes after them
    <uri>/hf/config.json
    <uri>/latest_checkpointed_iteration.txt    10

A rank needs room on its disk for its own files of one checkpoint (TMPDIR). They are removed after the save.
"""

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from formats import rank_files
from formats.stores import leftovers
from formats.stores.claim import is_of_this_process, parsed
from formats.stores.directory import CLAIM
from formats.stores.part_file import PartFile, Sender
from formats.stores.slots import Slots
from formats.stores.store_journal import SentFile, StoreJournal
from formats.stores.waiting import MEMORY_BYTES
from formats.stores.writing import Upload, WritableStore
from megatron_lite.checkpoint.saver import SIDECARS, Saver, number_of
from megatron_lite.checkpoint.snapshot import Snapshot
from megatron_lite.checkpoint.together import SaveError, of_all

_BLOCK_BYTES = 1 << 20
_INDEXES = (".metadata", "metadata.json")


@dataclass
class StoreSaver(Saver):
    """Saves the checkpoints of one rank to a store. All ranks make the same calls."""

    store: WritableStore = field(kw_only=True)
    prefix: str = field(kw_only=True)

    def remove_partial(self) -> None:
        """Do nothing: each save removes its temporary directory, and the root is shared with other programs."""

    def _write_to(self, target: Path, snapshot: Snapshot) -> None:
        folder = Path(tempfile.mkdtemp(prefix="megatron-lite-save-"))
        version = rank_files.iteration_directory(snapshot.iteration)
        try:
            self._write_files(folder, snapshot)
            begun: list[Upload] = []
            try:
                sent = of_all(lambda: self._send(folder, version, begun), self.group)
                of_all(lambda: self._publish_all(sent, version, snapshot), self.group)
                self._journal.forget_files()
            except BaseException:
                leftovers.at_once(self.store.abort, begun)
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _journal(self) -> StoreJournal:
        return StoreJournal(self.store, self.prefix, self.rank)

    def _write_files(self, folder: Path, snapshot: Snapshot) -> None:
        """Write this rank's files to the local disk."""
        if self.format == "torch_dist":
            self._write_blocks(folder, snapshot)
        elif snapshot.rank_file is not None:
            self._write_rank_file(folder, snapshot.rank_file)

    def _send(self, folder: Path, version: str, begun: list[Upload]) -> list[SentFile]:
        """Send this rank's files as uploads. begun: receives the uploads."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [f"{version}/{path.relative_to(folder)}" for path in files]
        self._journal.put_files(names)
        sender = Sender(self.store, Slots(MEMORY_BYTES))
        made: list[PartFile] = []
        try:
            for path, name in zip(files, names, strict=True):
                part_file = PartFile(sender, f"{self.prefix}/{name}", path.stat().st_size)
                made.append(part_file)
                begun.append(part_file.begun())
                _copy(path, part_file)
                part_file.finish()
            sender.wait()
        finally:
            sender.close()
        return [
            SentFile(name, file.begun(), file.parts, file.whole())
            for name, file in zip(names, made, strict=True)
        ]

    def _publish_all(
        self, sent: Sequence[Sequence[SentFile]], version: str, snapshot: Snapshot
    ) -> None:
        """Make the checkpoint visible. Only rank 0 does."""
        if self.rank:
            return
        self._require_claim()
        files = [file for of_rank in sent for file in of_rank]
        indexes = [file for file in files if file.name.endswith(_INDEXES)]
        self._remove_earlier(version, [file.name for file in files if file not in indexes])
        leftovers.at_once(self._complete, [file for file in files if file not in indexes])
        for file in indexes:
            self._complete(file)
        for name, content in self.sidecars.items():
            self._put(f"{SIDECARS}/{name}", content)
        self._put(rank_files.TRACKER, str(snapshot.iteration).encode())
        self._tidy(snapshot.iteration)

    def holds(self, iteration: int) -> bool:
        """See Saver.holds."""
        version = rank_files.iteration_directory(iteration)
        return bool(self.store.listing(f"{self.prefix}/{version}/").objects)

    def _remove_earlier(self, version: str, replaced: Iterable[str]) -> None:
        """Delete an earlier save of this iteration, but for the files that the new one replaces.

        It may have another format or layout: readers would take its files for a part of the new one. Its index must not
        point to new files.
        """
        kept = {f"{self.prefix}/{name}" for name in replaced}
        earlier = self.store.listing(f"{self.prefix}/{version}/").objects
        self._delete(each.key for each in earlier if each.key not in kept)

    def _delete(self, keys: Iterable[str]) -> None:
        """Delete objects, the indexes first."""
        rest = set(keys)
        for key in sorted(key for key in rest if key.endswith(_INDEXES)):
            self.store.delete(key)
            rest.remove(key)
        leftovers.at_once(self.store.delete, rest)

    def _require_claim(self) -> None:
        """Raise SaveError if another run has taken over the claim on the prefix."""
        there = self.store.get(f"{self.prefix}/{CLAIM}")
        holder = None if there is None else parsed(there.content)
        if holder is None or not is_of_this_process(holder):
            raise SaveError(
                f"{self.store.uri}/{self.prefix}: another run has taken over this run's claim; give one of them another --save"
            )

    def _complete(self, file: SentFile) -> None:
        self.store.complete(file.upload, file.parts, file.whole, only=None)

    def _get(self, name: str) -> bytes:
        """See Saver._get."""
        found = self.store.get(f"{self.prefix}/{name}")
        if found is None:
            raise FileNotFoundError(name)
        return found.content

    def _put(self, name: str, content: bytes) -> None:
        """See Saver._put."""
        self.store.put(f"{self.prefix}/{name}", content)

    def _prune(self, newest: int) -> None:
        """See Saver._prune."""
        if self.keep_last is None:
            return
        older: dict[int, list[str]] = {}
        for each in self.store.listing(f"{self.prefix}/").objects:
            version = each.key.removeprefix(f"{self.prefix}/").partition("/")[0]
            number = number_of(version)
            if number is not None and number < newest:
                older.setdefault(number, []).append(each.key)
        for number in self._too_many(older):
            self._delete(older[number])


def _copy(path: Path, to: PartFile) -> None:
    """Write a local file to a file of the store."""
    offset = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            to.write(offset, block)
            offset += len(block)


def has_stored_checkpoint(store: WritableStore, prefix: str) -> bool:
    """Return whether a run has saved a complete checkpoint at a prefix."""
    return store.head(f"{prefix}/{rank_files.TRACKER}") is not None
