"""`inspect --tree`: the modules of a model with their parameters and bytes. Equal numbered modules are one line.

layers.0-31        6,476,271,616   12.06 GiB   96%   32 of 202,383,488 each
  attn               ...
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from megaconv.commands.units import readable, share


@dataclass
class Module:
    """A module, or several equal consecutive modules. The sizes are those of all of them together."""

    name: str
    parameters: int = 0
    nbytes: int = 0
    modules: list["Module"] = field(default_factory=list)
    copies: int = 1

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "copies": self.copies,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "modules": [module.to_json() for module in self.modules],
        }


def tree(tensors: Mapping[str, tuple[int, int]]) -> Module:
    """The module tree of these tensors: name -> (elements, bytes).

    The last word of a name is the tensor's, not a module's.
    """
    root = Module("")
    index: dict[tuple[str, ...], Module] = {(): root}
    for name, (elements, nbytes) in tensors.items():
        path = tuple(name.split("."))[:-1]
        for depth in range(len(path) + 1):
            module = _at(index, path[:depth])
            module.parameters += elements
            module.nbytes += nbytes
    return _folded(root)


def _at(index: dict[tuple[str, ...], Module], path: tuple[str, ...]) -> Module:
    if path not in index:
        index[path] = Module(path[-1])
        index[path[:-1]].modules.append(index[path])
    return index[path]


def _folded(module: Module) -> Module:
    inner = [_folded(each) for each in module.modules]
    kept: list[Module] = []
    for numbered, group in groupby(inner, key=lambda each: each.name.isdecimal()):
        if not numbered:
            kept += group
            continue
        for _, equal in groupby(group, key=_kind):
            kept.append(_joined(list(equal)))
    module.modules = kept
    return module


def _kind(module: Module) -> tuple[object, ...]:
    return (
        module.parameters,
        module.nbytes,
        tuple((each.name, each.copies, _kind(each)) for each in module.modules),
    )


def _joined(equal: list[Module]) -> Module:
    first, last, count = equal[0], equal[-1], len(equal)
    if count == 1:
        return first
    return Module(
        f"{first.name}-{last.name}",
        first.parameters * count,
        first.nbytes * count,
        [_times(each, count) for each in first.modules],
        count,
    )


def _times(module: Module, count: int) -> Module:
    inner = [_times(each, count) for each in module.modules]
    return Module(
        module.name, module.parameters * count, module.nbytes * count, inner, module.copies
    )


def lines(root: Module) -> Iterator[str]:
    """Lines for people. An only child shares its parent's line: `layers.0-31`."""
    rows = list(_rows(root, 0))
    width = max((len(label) for label, _ in rows), default=0)
    for label, module in rows:
        each = ""
        if module.copies > 1:
            parameters = module.parameters // module.copies
            each = f"   {module.copies} of {parameters:,} each"
        columns = [
            f"{label:<{width}}",
            f"{module.parameters:>18,}",
            f"{readable(module.nbytes):>11}",
            f"{share(module.nbytes, root.nbytes):>4}{each}",
        ]
        yield "  ".join(columns)


def _rows(module: Module, depth: int) -> Iterator[tuple[str, Module]]:
    for inner in module.modules:
        label = inner.name
        while len(inner.modules) == 1 and inner.modules[0].parameters == inner.parameters:
            inner = inner.modules[0]
            label = f"{label}.{inner.name}"
        yield "  " * depth + label, inner
        yield from _rows(inner, depth + 1)
