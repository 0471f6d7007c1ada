"""The draft of a family's file: the nearest existing family, the differences from it, and the open questions."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megaconv.drafting.code import (
    Call,
    Node,
    comment,
    dictionary,
    imports,
    literal,
    node_of,
    statement,
)
from megaconv.drafting.computation import Function, functions_of
from megaconv.drafting.keys import DraftedKeys, drafted_keys, only_source
from megaconv.drafting.known import Known, known_families
from megaconv.drafting.nearest import by_nearness
from megaconv.drafting.questions import of_computation
from megaconv.drafting.reference import Reference
from megaconv.drafting.rows import DraftedRows, drafted_rows, spelling_source
from megaconv.errors import CheckpointError
from megaconv.families import Family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.check import well_formed
from megaconv.model.table import Fused, Transposed

MARKER = "DECIDE"
"""The word that begins each question in a draft."""


@dataclass(frozen=True)
class Draft:
    """A drafted family."""

    family: Family
    text: str
    """The content of the file."""
    base: str
    """The name of the nearest existing family."""
    questions: tuple[str, ...]
    existing: tuple[str, ...] = ()
    """Names of families that the architecture has already. The draft is made as if they didn't exist."""


def draft_of(
    reference: Reference, families: Mapping[str, Family], hidden: frozenset[str] = frozenset()
) -> Draft:
    """The draft for an architecture.

    families: the existing ones. hidden: names of families that are treated as if they didn't exist.
    """
    models = reference.source.parents[1]
    known = known_families(families, models, hidden)
    functions = functions_of(reference.source, reference.architecture)
    known = by_nearness(reference, functions, known)
    base = known[0]
    keys = drafted_keys(reference, base, known)
    family = _family(reference, base, keys)
    rows = _rows(reference, base, family)
    fixed = {**keys.fixed, **rows.fixed}
    family = replace(family, rows=rows.rows, fixed={**base.family.fixed, **fixed})
    asked = (
        *keys.questions,
        *rows.questions,
        *of_computation(functions, base, known),
    )
    writer = _Writer(reference, base, keys, rows, fixed, functions, asked)
    return Draft(family, writer.text(), base.family.name, asked)


def _family(reference: Reference, base: Known, keys: DraftedKeys) -> Family:
    """The drafted family with its base's rows."""
    return replace(
        base.family,
        name=name_of(reference),
        architectures=(reference.architecture,),
        model_type=reference.model_type,
        keys=keys.keys,
        fixed={**base.family.fixed, **keys.fixed},
        only=keys.only,
        aliases=reference.aliases,
        other_types=(),
        recognized=None,
        proven="names",
    )


def name_of(reference: Reference) -> str:
    """The name of the family, which is the name of its file."""
    return reference.model_type.replace("-", "_").replace(".", "_")


def _rows(reference: Reference, base: Known, family: Family) -> DraftedRows:
    source = f"{base.constant}.rows"
    try:
        with well_formed(CONFIG_NAME):
            return drafted_rows(reference, family, source)
    except CheckpointError as error:
        question = (
            f"the draft can't read the config.json, so that no tensor names were compared: {error}. When the keys are "
            "declared, `megaconv inspect` of a small model that transformers saved names the tensors that differ."
        )
        return DraftedRows(family.rows, source, questions=(question,))


@dataclass(frozen=True)
class _Writer:
    """Writes the file of a draft."""

    reference: Reference
    base: Known
    keys: DraftedKeys
    rows: DraftedRows
    fixed: Mapping[str, Any]
    functions: Mapping[str, Function]
    questions: tuple[str, ...]

    def text(self) -> str:
        lines = [*self._docstring(), "", *imports(self._imports()), ""]
        for part in (self._defaults(), self._names()):
            lines += [*part, ""] if part else []
        for question in self.questions:
            lines += comment(f"{MARKER}: {question}")
        if self.questions:
            lines.append("")
        lines += statement("FAMILY = ", self._family())
        return "\n".join(lines) + "\n"

    def _docstring(self) -> Iterable[str]:
        name, base = self.reference.architecture, self.base.family.name
        yield f'"""{name}: a draft of `megaconv new-family`, as a difference from {base}.'
        yield ""
        yield f"Names and keys are those of transformers {self.reference.version}. Answer each {MARKER}, and delete it."
        yield '"""'

    def _imports(self) -> Iterator[tuple[str, str]]:
        yield "dataclasses", "replace"
        for each in (self.base, *self.keys.standing_on):
            yield f"megaconv.families.{each.family.name}", f"FAMILY as {each.constant}"
        yield from self.keys.imports
        yield from self.rows.imports
        if self.rows.names:
            yield "megaconv.model.table", "Spelling"
        for kind in (Fused, Transposed):
            if any(isinstance(each, kind) for each in self.rows.names.values()):
                yield "megaconv.model.table", kind.__name__

    def _defaults(self) -> list[str]:
        if not self.keys.defaults:
            return []
        values = {key: node_of(value) for key, value in self.keys.defaults.items()}
        return [*statement("_DEFAULTS = ", dictionary(values))]

    def _names(self) -> list[str]:
        if not self.rows.names:
            return []
        entries: dict[str, Node] = {
            canonical: dictionary({"hf": spelling_source(name)})
            for canonical, name in self.rows.names.items()
        }
        return [*statement("_NAMES: dict[str, dict[str, Spelling]] = ", dictionary(entries))]

    def _family(self) -> Call:
        base = self.base
        settings: dict[str, Node] = {
            "name": literal(name_of(self.reference)),
            "architectures": literal((self.reference.architecture,)),
            "model_type": literal(self.reference.model_type),
            "rows": self.rows.source,
            "keys": self.keys.source,
        }
        if self.fixed:
            fixed = {name: node_of(value) for name, value in self.fixed.items()}
            settings["fixed"] = dictionary(fixed, first=f"{base.constant}.fixed")
        if self.keys.only != base.family.only:
            settings["only"] = only_source(self.keys)
        if self.reference.aliases != base.family.aliases:
            aliases = {name: node_of(value) for name, value in self.reference.aliases.items()}
            settings["aliases"] = dictionary(aliases)
        if base.family.other_types:
            settings["other_types"] = "()"
        settings |= {"recognized": "None", "proven": literal("names")}
        items = (("", base.constant), *((f"{name}=", node) for name, node in settings.items()))
        return Call("replace(", items, exploded=True)
