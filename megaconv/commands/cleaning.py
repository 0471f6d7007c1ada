"""Lists and removes what a run that was killed has left at a prefix of an object store."""

from dataclasses import dataclass
from typing import Any

from formats.stores import leftovers
from formats.stores.addresses import is_store
from formats.stores.claim import Claim
from formats.stores.leftovers import Leftovers
from megaconv._version import __version__
from megaconv.errors import UsageError
from megaconv.store_inputs import parsed, writable_store


@dataclass(frozen=True)
class Cleaned:
    """The remains of a killed run."""

    place: str
    run: str
    """The run that has the claim: its process and its host; empty if there is no claim."""
    lives: bool
    """True if the run may still be at work."""
    uploads: tuple[str, ...]
    """Keys of uncompleted uploads. The store bills their parts."""
    objects: tuple[str, ...]
    """Keys of objects of an output that isn't complete, of the journal and of the claim."""
    kept: tuple[str, ...]
    """Keys of other objects there, if the run has begun to replace an output: without its indexes, this is no checkpoint."""
    removed: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "run": self.run,
            "lives": self.lives,
            "uploads": list(self.uploads),
            "objects": list(self.objects),
            "kept": list(self.kept),
            "removed": self.removed,
        }


def clean(place: str, *, yes: bool = False, take_over: bool = False) -> Cleaned:
    """The remains of a killed run at a URI. yes: remove it. take_over: also that of a run on another host that may live.

    Raises UsageError for a local path, and TargetExists for a run that lives.
    """
    if not is_store(place):
        raise UsageError(
            f"{place}: is no URI of a store; on a disk, the next run on the same path removes what a killed run has left"
        )
    store, prefix = writable_store(place), parsed(place).prefix
    if not prefix:
        raise UsageError(f"{place}: names a whole bucket; expected s3://bucket/prefix")
    found = leftovers.find(store, prefix)
    claim = Claim(store, prefix, __version__)
    held = () if found.holder is None else (claim.key,)
    shown = Cleaned(
        place,
        "" if found.holder is None else found.holder.described,
        found.lives,
        tuple(upload.key for upload in found.uploads),
        (*found.fragments, *found.journal, *held),
        _of_a_replaced_output(found),
        removed=yes and found.holder is not None,
    )
    if shown.removed and found.holder is not None:
        claim.take_over(found.holder, found.tag, take=take_over, age=found.age)
        leftovers.remove(store, found, claim)
        claim.remove()
    claim.stop()
    return shown


def _of_a_replaced_output(found: Leftovers) -> tuple[str, ...]:
    """Keys of what a killed run has left of the output that it replaces. Its indexes are gone."""
    if not found.is_torn:
        return ()
    fragments = set(found.fragments)
    return tuple(each.key for each in found.objects.values() if each.key not in fragments)
