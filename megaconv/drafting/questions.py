"""Questions about the computation of a drafted family: each function that its base doesn't have unchanged.

Other families may have the same function. If they all fix a field that the base doesn't, the question names it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from megaconv.drafting.computation import Function, differing
from megaconv.drafting.known import Known

_NAMED = 4
"""Families that a question names."""
_ENOUGH = 2
"""Families whose common fields may follow from a common function."""


def of_computation(
    functions: Mapping[str, Function], base: Known, known: Sequence[Known]
) -> Iterator[str]:
    """Yield a question for each function that the base lacks or has otherwise."""
    if not base.functions:
        yield f"transformers has no class of {base.family.name}, so that no functions were compared."
    for function in differing(functions, base.functions):
        yield "\n".join(_question(function, base, known))


def _question(function: Function, base: Known, known: Iterable[Known]) -> Iterator[str]:
    theirs = base.functions.get(function.name)
    verb = "differs from" if theirs else "is not in"
    precedents = [each for each in known if _has(each, function)]
    as_in = f" It is the same in {_listed(precedents)}." if precedents else ""
    fixed = _common_fields(precedents, base)
    hint = f" These have fixed: {fixed}." if fixed else ""
    yield f"{function.shown} (line {function.line}) {verb} {base.family.name}.{as_in}{hint}"
    yield from function.new_lines(theirs)


def _has(known: Known, function: Function) -> bool:
    theirs = known.functions.get(function.name)
    return theirs is not None and theirs.text == function.text


def _listed(known: Sequence[Known]) -> str:
    names = [each.family.name for each in known]
    return ", ".join(names[:_NAMED]) + (" and others" if len(names) > _NAMED else "")


def _common_fields(known: Sequence[Known], base: Known) -> str:
    """The fields that all of these families fix to one value, which isn't the base's."""
    if len(known) < _ENOUGH:
        return ""
    first, *others = [each.family.fixed for each in known]
    common = []
    for name, value in first.items():
        is_in_all = all(each.get(name) == value for each in others)
        if is_in_all and base.family.fixed.get(name) != value:
            common.append(f"{name} = {value!r}")
    return ", ".join(common)
