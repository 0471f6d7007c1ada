"""The content of `megaconv formats`: loaders, savers and model families of megaconv and of other packages."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaconv import registry
from megaconv.families import all_families, families
from megaconv.families.parts.family import PROOFS
from megaconv.families.parts.towers import TOWERS
from megaconv.families.parts.whole_model import NAMED_AS_IN_BRIDGE
from megaconv.loader import Loader
from megaconv.model.naming import Naming
from megaconv.model.table import expressible
from megaconv.saver import Saver

NAMINGS = ("hf", "core", "legacy", "meta")
"""Every naming scheme that can be read and written."""


@dataclass(frozen=True)
class Entry:
    """A loader or a saver."""

    description: str
    options: Mapping[str, str]
    """Its own options: key -> description."""


@dataclass(frozen=True)
class Catalogue:
    loaders: Mapping[str, Entry]
    savers: Mapping[str, Entry]
    families: Mapping[str, list[str]]
    """Families, each with transformers' classes."""
    matrix: Mapping[str, Mapping[str, bool]]
    """Family -> whether each naming scheme can represent it, according to the tables."""
    written_only: Collection[str]
    """The families whose Hugging Face directories are written, but not read."""
    proven: Mapping[str, str]
    """Family -> its proof, one of PROOFS; "-" for families of other packages, which megaconv hasn't tried."""
    keeping_names: Mapping[str, list[str]]
    """The loaders and the savers of models that no family describes."""

    def to_json(self) -> dict[str, Any]:
        kinds = {"loaders": self.loaders, "savers": self.savers}
        described = {
            kind: {name: one.description for name, one in entries.items()}
            for kind, entries in kinds.items()
        }
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
            "other_models": dict(self.keeping_names),
        }

    def lines(self) -> Iterator[str]:
        for kind, entries in (("loaders", self.loaders), ("savers", self.savers)):
            yield kind
            for name, entry in entries.items():
                yield f"  {name:<13} {entry.description}"
                for key, meaning in entry.options.items():
                    yield f"                --option {key}=...: {meaning}"
        yield from self._family_lines()
        yield "multimodal models"
        yield "  hf, core; proven by names; tensors outside the language model have Megatron-Bridge's names:"
        yield f"    {', '.join(NAMED_AS_IN_BRIDGE)}"
        yield f"    of these with a vision encoder of Megatron's own layers, which megatron-core computes: {', '.join(TOWERS)}"
        yield "  and all others whose text_config is of one of these families, by their files' names"
        yield "all other models, whose tensors keep their names"
        for kind, names in self.keeping_names.items():
            yield f"  {kind:<13} {', '.join(names)}"
        yield "proven by"
        for word, meaning in PROOFS.items():
            yield f"  {word:<13} {meaning}"

    def _family_lines(self) -> Iterator[str]:
        namings = "".join(f"{naming:<12}" for naming in NAMINGS)
        width = max(map(len, self.matrix)) + 1
        yield f"{'families':<{width + 2}}{namings}proven by"
        for name, cells in self.matrix.items():
            line = f"  {name:<{width}}"
            for naming in NAMINGS:
                line += f"{self._ways(name, naming) if cells[naming] else '-':<12}"
            architectures = ", ".join(self.families[name]) or "-"
            yield f"{line}{self.proven[name]:<14} {architectures}"

    def _ways(self, family: str, naming: str) -> str:
        return "write" if naming == "hf" and family in self.written_only else "read, write"


def catalogue() -> Catalogue:
    """The catalogue. Imports all loaders, savers and families. A warning names a plugin that can't be loaded."""
    ours = families()
    architectures: dict[str, list[str]] = {}
    namings: dict[str, dict[str, bool]] = {}
    proven: dict[str, str] = {}
    for name, family in all_families().items():
        architectures[name] = list(family.architectures)
        namings[name] = {
            naming: expressible(family.rows, Naming(naming), family.features) for naming in NAMINGS
        }
        proven[name] = family.proven if name in ours else "-"
    read, written = registry.all_loaders(), registry.all_savers()
    loaders = {name: _entry(found) for name, found in read.items()}
    savers = {name: _entry(found) for name, found in written.items()}
    keeping = {
        "loaders": [name for name, found in read.items() if found.keeps_names],
        "savers": [name for name, found in written.items() if found.keeps_names],
    }
    written_only = [name for name, family in all_families().items() if not family.reads_hf]
    return Catalogue(loaders, savers, architectures, namings, written_only, proven, keeping)


def _entry(found: Loader | Saver) -> Entry:
    return Entry(found.description, found.options)
