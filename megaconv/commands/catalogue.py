"""What `megaconv formats` lists: loaders, savers and model families, ours and those of other packages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaconv import registry
from megaconv.families import PROOFS, all_families, families
from megaconv.families.parts.towers import TOWERS
from megaconv.families.parts.whole_model import NAMED_AS_IN_BRIDGE
from megaconv.model.naming import Naming
from megaconv.model.table import expressible

NAMINGS = ("hf", "core", "legacy", "meta")
"""Every naming scheme that is read is written too."""


@dataclass(frozen=True)
class Entry:
    """A loader or a saver."""

    description: str
    options: Mapping[str, str]
    """Of its own: key -> what it does."""


@dataclass(frozen=True)
class Catalogue:
    loaders: Mapping[str, Entry]
    savers: Mapping[str, Entry]
    families: Mapping[str, list[str]]
    """transformers' classes."""
    matrix: Mapping[str, Mapping[str, bool]]
    """Family -> whether each naming scheme can represent it; from the tables themselves."""
    proven: Mapping[str, str]
    """Family -> by what, any of PROOFS; "-" of other packages' families, which we have not tried."""

    def to_json(self) -> dict[str, Any]:
        kinds = {"loaders": self.loaders, "savers": self.savers}
        described = {kind: {name: one.description for name, one in entries.items()} for kind, entries in kinds.items()}
        options = {
            kind: {name: dict(one.options) for name, one in entries.items() if one.options}
            for kind, entries in kinds.items()
        }
        return {
            **described,
            "options": options,
            "families": dict(self.families),
            "matrix": dict(self.matrix),
            "proven": dict(self.proven),
            "whole": list(NAMED_AS_IN_BRIDGE),
        }

    def lines(self) -> Iterator[str]:
        for kind, entries in (("loaders", self.loaders), ("savers", self.savers)):
            yield kind
            for name, entry in entries.items():
                yield f"  {name:<13} {entry.description}"
                for key, meaning in entry.options.items():
                    yield f"                --option {key}=...: {meaning}"
        yield "families        " + "".join(f"{naming:<12}" for naming in NAMINGS) + "proven by"
        for name, cells in self.matrix.items():
            words = (f"{'read, write' if cells[naming] else '-':<12}" for naming in NAMINGS)
            yield f"  {name:<13} {''.join(words)}{self.proven[name]:<14} {', '.join(self.families[name])}"
        yield "models that see or hear, whole"
        yield "  hf, core; proven by names; what lies beside the language model is called as in Megatron-Bridge:"
        yield f"    {', '.join(NAMED_AS_IN_BRIDGE)}"
        yield f"    of these with a tower of Megatron's own layers, which megatron-core computes: {', '.join(TOWERS)}"
        yield "  and all others whose text_config is of one of these families, by their files' names"
        yield "proven by"
        for word, meaning in PROOFS.items():
            yield f"  {word:<13} {meaning}"


def catalogue() -> Catalogue:
    """Loads everything; plugins that can't be loaded are left out with a warning."""
    ours, all_of = families(), all_families()
    return Catalogue(
        {name: _entry(found) for name, found in registry.all_loaders().items()},
        {name: _entry(found) for name, found in registry.all_savers().items()},
        {name: list(family.architectures) for name, family in all_of.items()},
        {
            name: {naming: expressible(family.rows, Naming(naming), family.features) for naming in NAMINGS}
            for name, family in all_of.items()
        },
        {name: family.proven if name in ours else "-" for name, family in all_of.items()},
    )


def _entry(found: registry.Loader | registry.Saver) -> Entry:
    return Entry(found.DESCRIPTION, registry.options_of(found))
