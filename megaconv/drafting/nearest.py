"""The existing family that is nearest to an architecture: by tensor names, by keys, and by the computation."""

import re
from collections.abc import Collection, Mapping, Sequence

from megaconv.drafting.computation import Function, share_of_equal
from megaconv.drafting.known import Known
from megaconv.drafting.reference import Reference
from megaconv.families.parts.harmless_keys import HARMLESS
from megaconv.model.table import expand

_COMPARED = 12
"""Families with the nearest names and keys, whose computation is compared as well."""


def by_nearness(
    reference: Reference, functions: Mapping[str, Function], known: Sequence[Known]
) -> tuple[Known, ...]:
    """The families, the nearest first. functions: those of the architecture's file."""
    tensors = frozenset(template(name) for name in reference.tensors)
    likeness = {each.family.name: _likeness_of_names(reference, tensors, each) for each in known}

    def farness(each: Known) -> float:
        return -likeness[each.family.name]

    by_names = sorted(known, key=farness)
    for each in by_names[:_COMPARED]:
        likeness[each.family.name] += share_of_equal(functions, each.functions)
    return tuple(sorted(by_names[:_COMPARED], key=farness) + by_names[_COMPARED:])


def template(name: str) -> str:
    """A tensor's name without its numbers: `model.layers.{n}.mlp.up_proj.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{n}", name)


def _likeness_of_names(reference: Reference, tensors: Collection[str], known: Known) -> float:
    """tensors: templates of the class's tensors."""
    names: set[str] = set()
    for row in known.family.rows:
        for spelling in row.names.get("hf", ()):
            found = {re.sub(r"\{[a-z]\S{0,2}\}", "{n}", name) for name in expand(spelling.name)}
            # A row with a condition counts only if the class has its tensors.
            names |= found if row.when is None else found.intersection(tensors)
    return _overlap(tensors, names) + _overlap(reference.own_keys, known.keys - HARMLESS)


def _overlap(ours: Collection[str], theirs: Collection[str]) -> float:
    """The share of common elements, between 0 and 1."""
    together = set(ours) | set(theirs)
    return len(set(ours) & set(theirs)) / max(1, len(together))
