"""Makes an output in a store visible: uploads become objects, then small files are written, then selectors.

Each object appears on condition that nobody has written it since the run began.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from formats.errors import TargetExists
from formats.stores import selectors
from formats.stores.claim import PUBLISHING, Claim
from formats.stores.leftovers import at_once
from formats.stores.objects import Listed
from formats.stores.store_journal import SentFile
from formats.stores.writing import ABSENT, Conflict, WritableStore

Contents = Mapping[str, Callable[[], bytes]]
"""The content of small files by name."""


class Publication:
    """The end of a run at a prefix."""

    def __init__(
        self, store: WritableStore, prefix: str, claim: Claim, before: Mapping[str, Listed]
    ) -> None:
        """before: the objects at the prefix when the run began, by name."""
        self._store, self._prefix, self._claim, self._before = store, prefix, claim, before
        self._is_done = False

    def show(self, sent: Sequence[SentFile], small: Contents) -> None:
        """Make everything visible but the selectors. It may be called again."""
        if self._is_done:
            return
        self._claim.change(phase=PUBLISHING)
        if self._before and self._claim.holder.replaces:
            for name in reversed(selectors.in_order(self._before)):
                self._store.delete(f"{self._prefix}/{name}")
        at_once(self._complete, sent)
        at_once(lambda name: self._put(name, small[name]()), selectors.others(small))
        self._is_done = True

    def remove_others(self, names: Iterable[str]) -> None:
        """Delete the files of a replaced output that the new one doesn't have. names: all files of the new output.

        This comes before the selectors: transformers prefers an old `model.safetensors` to the index of new shards.
        """
        if self._claim.holder.replaces:
            others = set(self._before).difference(names)
            at_once(self._store.delete, [f"{self._prefix}/{name}" for name in sorted(others)])

    def show_selectors(self, small: Contents) -> None:
        """Make the selectors visible, one after another."""
        for name in selectors.in_order(small):
            self._put(name, small[name]())

    def _complete(self, file: SentFile) -> None:
        if not file.upload.identity:  # an earlier run has completed it
            return
        try:
            self._store.complete(
                file.upload, file.parts, file.whole, only=self._condition(file.name)
            )
        except Conflict:
            raise self._taken(file.name) from None

    def _put(self, name: str, content: bytes) -> None:
        is_door = selectors.is_selector(name)
        condition = ABSENT if is_door else self._condition(name)
        try:
            self._store.put(f"{self._prefix}/{name}", content, only=condition)
        except Conflict:
            raise self._taken(name) from None

    def _condition(self, name: str) -> str:
        """The condition for an object to appear: the object that this run replaces is there, or nothing."""
        there = self._before.get(name)
        return there.tag if there is not None else ABSENT

    def _taken(self, name: str) -> TargetExists:
        return TargetExists(
            f"{self._store.uri}/{self._prefix}/{name}: another program has written it since this run began; choose another place"
        )
