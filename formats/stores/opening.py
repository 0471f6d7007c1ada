"""Begins an output at a prefix of a store: looks at what is there, claims the prefix, and finds the parts of an earlier run."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from formats.errors import TargetExists
from formats.stores import leftovers
from formats.stores.claim import SENDING, Claim, is_gone
from formats.stores.leftovers import Leftovers, at_once
from formats.stores.part_sizes import part_bytes, part_count
from formats.stores.store_journal import Sums
from formats.stores.waiting import Terms
from formats.stores.writing import Held, Upload, WritableStore

Parts = tuple[Upload, Mapping[int, Held]]
"""An upload, and the parts that the store has of it."""


class Opening:
    """The begin of a run at a prefix."""

    def __init__(self, store: WritableStore, prefix: str, terms: Terms) -> None:
        self._store, self._prefix, self._terms = store, prefix, terms
        self.claim = Claim(store, prefix, terms.version)
        self._took_over = False

    def look(self) -> None:
        """Raise TargetExists if the prefix isn't free. Removes what is left of a run that was complete."""
        with ThreadPoolExecutor(1) as pool:
            same_key = pool.submit(self._store.head, self._prefix)
            found = leftovers.find(self._store, self._prefix)
            is_object = same_key.result() is not None
        if not found.objects and is_object:
            raise TargetExists(f"{self._target}: is an object; choose another place")
        holder = found.holder
        if holder is not None and found.was_published and is_gone(holder, found.age):
            self.claim.take_over(holder, found.tag, take=False, age=found.age)
            leftovers.remove(self._store, found, self.claim)
            self.claim.remove()
            self.claim = Claim(self._store, self._prefix, self._terms.version)
        self._require_free(found)

    def _require_free(self, found: Leftovers) -> None:
        """Raise TargetExists if something is at the prefix that isn't part of a killed run's commit."""
        fragments = set(found.fragments)
        kept = [each for each in found.objects.values() if each.key not in fragments]
        if kept and not self._terms.overwrite:
            raise TargetExists(
                f"{self._target}: already exists; choose another place, or give --overwrite, which replaces a checkpoint"
            )

    def found(self) -> Leftovers:
        return leftovers.find(self._store, self._prefix)

    def claimed(self) -> Leftovers:
        """Hold the claim. Returns what another run has left."""
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(self._store.uploads, f"{self._prefix}/")
            found = self.found()
            uploads = begun.result()
        if found.holder is None:
            foreign = tuple(each.identity for each in uploads)
            self.claim.take(replaces=bool(found.objects), foreign=foreign)
        else:
            take = self._terms.take_over
            self.claim.take_over(found.holder, found.tag, take=take, age=found.age)
            self._took_over = True
        # Another run may have become complete before this run had the claim.
        now = self.found()
        try:
            self._require_free(now)
        except TargetExists:
            if found.holder is None:
                self.claim.remove()
            raise
        return now

    def begin_again(self, found: Leftovers) -> Leftovers:
        """Remove the work of an earlier run. Returns what is at the prefix now."""
        holder = self.claim.holder
        if found.journal or found.uploads or found.fragments:
            leftovers.remove(self._store, found, self.claim)
            found = self.found()
        begun = replace(
            holder, phase=SENDING, replaces=bool(found.objects), foreign=self._foreign()
        )
        if begun != holder:
            self.claim.change(phase=SENDING, replaces=begun.replaces, foreign=begun.foreign)
        return found

    def _foreign(self) -> tuple[str, ...]:
        """The uploads that no run with this claim may use.

        Azure can't remove the blocks of a discarded run. A later run with `--resume` must not take them for its own.
        """
        foreign = self.claim.holder.foreign
        if not self._took_over:
            return foreign
        left = [each.identity for each in self._store.uploads(f"{self._prefix}/")]
        return tuple(dict.fromkeys([*foreign, *left]))

    @property
    def _target(self) -> str:
        return f"{self._store.uri}/{self._prefix}"

    def parts(
        self, found: Leftovers, sizes: Mapping[str, int], sums: Sums | None
    ) -> dict[str, Parts]:
        """The parts that the store has of files of these sizes, by name.

        sums: the checksums that the journal knows, for a store that doesn't list them. Parts without one don't count.
        """
        uploads: dict[str, list[Upload]] = {}
        for each in found.uploads:
            uploads.setdefault(each.key.removeprefix(f"{self._prefix}/"), []).append(each)
        best: dict[str, Parts] = {}

        def look(name: str) -> None:
            for upload in uploads[name]:
                parts = _fitting(self._store.parts(upload) or {}, sizes[name])
                if sums is not None:
                    parts = _with_sums(parts, sums.get(name, {}))
                if name not in best or len(parts) > len(best[name][1]):
                    best[name] = upload, parts

        at_once(look, [name for name in uploads if name in sizes])
        return best


def _fitting(parts: Mapping[int, Held], size: int) -> Mapping[int, Held]:
    """The parts of a file of this size that have the expected length."""
    step, count = part_bytes(size), part_count(size)
    found: dict[int, Held] = {}
    for number, part in parts.items():
        expected = min(step, size - (number - 1) * step)
        if 1 <= number <= count and part.size == expected:
            found[number] = part
    return found


def _with_sums(parts: Mapping[int, Held], sums: Mapping[str, int]) -> Mapping[int, Held]:
    """The parts whose checksums are known."""
    known = {number: part for number, part in parts.items() if part.tag in sums}
    return {number: part._replace(crc=sums[part.tag]) for number, part in known.items()}
