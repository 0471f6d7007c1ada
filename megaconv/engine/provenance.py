"""Checks that an adapter belongs to a base: the model that it was trained on, and the adapters in the base.

An adapter contains no proof of its base: all models of a size have the same shapes, and a copy may have the same name.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.rank_files import run_of
from megaconv.engine.record import Record, source_of
from megaconv.errors import UsageError
from megaconv.hub import Place

if TYPE_CHECKING:
    from megaconv.adapters.merging import Merged

_SNAPSHOT = re.compile(r"models--(?:.*--)?(?P<name>[^/]+)/snapshots/[^/]+")
"""A path in the Hub's cache."""


def earlier_adapters(record: Record | None) -> tuple[Mapping[str, Any], ...]:
    """The adapters that are merged into a source's weights, according to its megaconv.json."""
    found = source_of(record).get("adapters", ()) if record is not None else ()
    return tuple(each for each in found if isinstance(each, dict))


def refuse_again(
    base: str, earlier: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]
) -> None:
    """Raises UsageError for an adapter that is merged into the base already, or given twice with one weight."""
    hashes = {each.get("sha256") for each in earlier}
    given = Counter((each["sha256"], each["weight"]) for each in added)
    for adapter in added:
        if given[adapter["sha256"], adapter["weight"]] > 1:
            raise UsageError(
                f"--adapter {adapter['path']}: is given twice, and would be added twice; leave one out, or give one weight, as in "
                "DIR:2"
            )
        if adapter["sha256"] in hashes:
            raise UsageError(
                f"--adapter {adapter['path']}: {base} has it merged into its weights already (megaconv.json); merge it into the "
                "model that it was trained on"
            )


def other_bases(
    merged: "Sequence[Merged]",
    base: str,
    place: Place,
    config: Mapping[str, Any] | None,
    record: Record | None,
) -> tuple[str, ...]:
    """A warning for each adapter whose configuration names another base than the given one.

    base: the base as the user gave it. place: the resolved base. config: the base's config.json.
    """
    origin = source_of(record).get("path") if record is not None else None
    names = [base.partition("@")[0], str(place), (config or {}).get("_name_or_path"), origin]
    found: list[str] = []
    for each in merged:
        wanted = each.adapter.config.base
        if names_another(wanted, names):
            found.append(
                f"adapter {each.choice.place} was trained on {wanted!r}, and the base here is {base}: make sure that this is the same model"
            )
    return tuple(found)


def names_another(wanted: str | None, given: Iterable[object]) -> bool:
    """True if a path or Hub id names another model than all that are given. None and "" name no model."""
    names = {_name(str(each)) for each in given if each}
    return bool(wanted) and _name(str(wanted)) not in names


def _name(place: str) -> str:
    """The last part of a path or a Hub id, in lower case.

    For a path in the Hub's cache or in a run: the name of the repository or the run.
    """
    cached = _SNAPSHOT.search(place)
    if cached is not None:
        return cached["name"].lower()
    path = Path(place)
    return run_of(path).name.lower()
