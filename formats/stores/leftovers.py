"""Finds and removes the remains of a killed run at a prefix of a store: its claim, its journal, uploads, and objects of a commit
that it had begun."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from formats.errors import CorruptCheckpoint
from formats.stores import selectors
from formats.stores.claim import COMPLETE, PUBLISHING, Claim, Holder, is_gone, parsed
from formats.stores.directory import CLAIM, JOURNAL, is_part_of_claim
from formats.stores.objects import Listed
from formats.stores.store_journal import names_in
from formats.stores.writing import Upload, WritableStore

THREADS = 16
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Leftovers:
    """Objects and uploads of one run at a prefix."""

    prefix: str
    holder: Holder | None
    """The run, by its claim; None if there is no claim."""
    tag: str
    """The claim's ETag."""
    age: float
    """Seconds since the claim was written."""
    journal: tuple[str, ...]
    """Keys of the journal's objects."""
    uploads: tuple[Upload, ...]
    objects: dict[str, Listed]
    """Objects of the prefix that are neither claim nor journal, by name below the prefix."""
    names: frozenset[str]
    """Names of the files of the output."""

    @property
    def lives(self) -> bool:
        """True if the run of the claim may be at work."""
        return self.holder is not None and not is_gone(self.holder, self.age)

    @property
    def was_published(self) -> bool:
        """True if a run was killed after its last selector: the objects are a complete output, its own or an older one."""
        last = selectors.last(self.names)
        is_there = self._is_publishing and last is not None and last in self.objects
        return is_there or (self.holder is not None and self.holder.phase == COMPLETE)

    @property
    def is_torn(self) -> bool:
        """True if some objects may belong to an output that isn't complete."""
        return self._is_publishing and not self.was_published

    @property
    def _is_publishing(self) -> bool:
        return self.holder is not None and self.holder.phase == PUBLISHING

    @property
    def fragments(self) -> list[str]:
        """Keys of objects of an output that has not become complete."""
        if not self.is_torn:
            return []
        return [self.objects[name].key for name in sorted(self.names) if name in self.objects]


def find(store: WritableStore, prefix: str) -> Leftovers:
    """Look at a prefix. Three requests, and some more if there is a claim."""
    listed = store.listing(f"{prefix}/").objects
    keys = {each.key for each in listed}
    journal = tuple(key for key in sorted(keys) if key.startswith(f"{prefix}/{JOURNAL}/"))
    objects = {
        each.key.removeprefix(f"{prefix}/"): each
        for each in listed
        if not is_part_of_claim(each.key) and not each.key.endswith("/")
    }
    with ThreadPoolExecutor(2) as pool:
        claim = f"{prefix}/{CLAIM}"
        asked = pool.submit(store.get, claim) if claim in keys else None
        begun = pool.submit(store.uploads, f"{prefix}/") if asked and journal else None
        names = frozenset(names_in(store, prefix, journal))
        there = asked.result() if asked is not None else None
        uploads = begun.result() if begun is not None else ()
    holder = parsed(there.content) if there is not None else None
    own = () if holder is None else _own(uploads, prefix, holder, names)
    return Leftovers(
        prefix,
        holder,
        there.tag if there is not None else "",
        there.age if there is not None else 0.0,
        journal,
        tuple(own),
        objects,
        names,
    )


def _own(
    uploads: Iterable[Upload], prefix: str, holder: Holder, names: Iterable[str]
) -> Iterator[Upload]:
    """The uploads of a run: those of its files that were not there before its claim."""
    keys = {f"{prefix}/{name}" for name in names}
    for each in uploads:
        if each.key in keys and each.identity not in holder.foreign:
            yield each


def require_complete(store: WritableStore, prefix: str) -> None:
    """Raise CorruptCheckpoint if a run has not made the output at a prefix complete, and no older one is there."""
    found = find(store, prefix)
    if found.holder is None or not (found.is_torn or not found.objects):
        return
    raise CorruptCheckpoint(
        f"{store.uri}/{prefix}: is not complete: {found.holder.described} has written or is writing there; wait for its end, "
        "or run its command again",
        code="incomplete-output",
    )


def remove(store: WritableStore, found: Leftovers, claim: Claim) -> None:
    """Remove fragments, uploads and the journal, but not the claim. The order keeps every state recognisable.

    claim: this run's, which has taken the place of the other's.
    """
    if found.was_published and claim.holder.phase != COMPLETE:
        claim.change(phase=COMPLETE)  # without the journal, nobody could tell
    # The selectors first: whoever reads meanwhile must not find a door to half a checkpoint.
    names = selectors.in_order(found.names)
    doors = [found.objects[name].key for name in reversed(names) if name in found.objects]
    fragments = set(found.fragments)
    for key in doors:
        if key in fragments:
            store.delete(key)
    at_once(store.delete, fragments.difference(doors))
    at_once(store.abort, found.uploads)
    at_once(store.delete, found.journal)


def at_once(action: Callable[[_Item], object], items: Iterable[_Item]) -> None:
    """Do something with all items, up to 16 at the same time. Raises the first error after the others have ended."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(action, items))
