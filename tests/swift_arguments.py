"""The arguments of ms-swift's Megatron runs, read from its source without importing it.

    python -m tests.swift_arguments PACKAGE      writes tests/fixtures/swift_arguments.json; PACKAGE: the folder `swift`

ms-swift saves every attribute of its arguments: the fields of the dataclasses, and what their methods set. The import needs Transformer
Engine and a GPU.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from tests.conftest import FIXTURES

FILE = FIXTURES / "swift_arguments.json"
RUNS = ("MegatronSftArguments", "MegatronRLHFArguments", "MegatronExportArguments")


def arguments(package: Path) -> dict[str, Any]:
    """Name of each argument -> its default, if it is a plain value."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for file in sorted(package.rglob("*.py")):
        if "arguments" in (*file.relative_to(package).parts, file.stem):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, []).append(node)
    found: dict[str, Any] = {}
    for name in RUNS:
        found |= dict(_of_class(name, classes, set()))
    return dict(sorted(found.items()))


def _of_class(
    name: str, classes: dict[str, list[ast.ClassDef]], seen: set[str]
) -> Iterator[tuple[str, Any]]:
    seen.add(name)
    for node in classes.get(name, []):
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id not in seen:
                yield from _of_class(base.id, classes, seen)
        for each in ast.walk(node):
            if _is_own_attribute(each):
                yield each.attr, None
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                yield each.target.id, _plain(each.value)


def _is_own_attribute(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """True for `self.NAME` that is set."""
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and isinstance(node.value, ast.Name) and node.value.id == "self"


def _plain(value: ast.expr | None) -> Any:
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


if __name__ == "__main__":
    FILE.write_text(json.dumps(arguments(Path(sys.argv[1])), indent=1) + "\n")
