"""The existing families as precedents: their keys, and their functions in the installed transformers."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from megaconv.drafting.computation import Function, functions_of, source_of
from megaconv.families import Family

_PACKAGE = "megaconv.families"
_MOST_LEVELS = 2
"""A draft stands on its base, which may stand on one other family (tests/package/test_architecture.py)."""


@dataclass(frozen=True)
class Known:
    """A family of megaconv, with its class in transformers."""

    family: Family
    models: Path
    """transformers' folder of models."""

    @cached_property
    def source(self) -> Path | None:
        """The file of the class; None without a class, or if the class computes the models of another family."""
        if not self.family.describes({}):
            return None
        return source_of(self.family.architectures[0], self.family.model_type, self.models)

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """Empty without a class in transformers."""
        if self.source is None:
            return {}
        return functions_of(self.source, self.family.architectures[0])

    @cached_property
    def keys(self) -> set[str]:
        """Every key that the family reads or checks."""
        declared = {name for each in self.family.keys for name in each.names}
        return declared | set(self.family.only)

    @cached_property
    def constant(self) -> str:
        """The name under which a draft imports the family."""
        return self.family.name.upper()


def known_families(
    families: Mapping[str, Family], models: Path, hidden: frozenset[str] = frozenset()
) -> tuple[Known, ...]:
    """The families that a draft may stand on, in alphabetical order. hidden: names of families that don't count."""
    found = []
    for name, family in sorted(families.items()):
        is_hidden = name in hidden or bool(hidden & _bases(name))
        has_class = family.architectures and not family.no_class
        if not is_hidden and has_class and _level(name) <= _MOST_LEVELS:
            found.append(Known(family, models))
    return tuple(found)


def _bases(name: str) -> set[str]:
    """The families that a family's file imports. Other packages' families have none of ours."""
    if find_spec(f"{_PACKAGE}.{name}") is None:
        return set()
    file = import_module(f"{_PACKAGE}.{name}").__file__
    assert file is not None
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    inside = {
        module.removeprefix(f"{_PACKAGE}.")
        for module in modules
        if module.startswith(f"{_PACKAGE}.")
    }
    return {module for module in inside if not module.startswith("parts")}


def _level(name: str) -> int:
    """1 for a family that imports no other family."""
    return 1 + max(map(_level, _bases(name)), default=0)
