"""The differences of two checkpoints by module, and the layers in which each kind of tensor has moved: for `diff --html`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaconv.commands.comparison import Diff, Difference
from megaconv.commands.movement import Moved, Movement
from megaconv.model.ir import WEIGHT

_LAYER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")
_MOST_NOTES = 5
"""Tensors whose difference is described below their kind, at most."""


@dataclass(frozen=True)
class Place:
    """A tensor's place in the model."""

    stack: str
    """The layers that it belongs to, `layers.*`; empty outside of layers."""
    layer: int
    module: str
    """`layers.*.attn`; the first word of the name outside of layers."""
    kind: str
    """The name with its numbers replaced: `layers.*.mlp.experts.*.up.weight`."""


def place_of(name: str) -> Place:
    """Return the place of a tensor. Its first number is that of its layer."""
    found = _LAYER.search(name)
    if found is None:
        return Place("", 0, name.partition(".")[0], name)
    stack = name[: found.start()] + "*"
    rest = name[found.end() + 1 :]
    kind = f"{stack}.{_LAYER.sub('*', rest)}"
    module = f"{stack}.{rest.partition('.')[0]}"
    return Place(stack, int(found[0]), module, kind)


@dataclass
class Kind:
    """Tensors of one kind in all layers, or those of a module."""

    tensors: int = 0
    different: int = 0
    only_a: int = 0
    only_b: int = 0
    moved: Moved | None = None
    notes: list[str] = field(default_factory=list)

    def add(self, tensor: Moved) -> None:
        self.moved = tensor if self.moved is None else self.moved + tensor

    def count(self, difference: Difference) -> None:
        """Count a difference, and note those that are not about values."""
        self.different += difference.kind not in ("only in A", "only in B")
        self.only_a += difference.kind == "only in A"
        self.only_b += difference.kind == "only in B"
        if difference.kind != "values" and len(self.notes) < _MOST_NOTES:
            words = (f"{difference.key}: {difference.kind}", difference.detail)
            self.notes.append(", ".join(word for word in words if word))

    def to_json(self) -> dict[str, Any]:
        return {
            "tensors": self.tensors,
            "different": self.different,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "stats": None if self.moved is None else self.moved.to_json(),
            "notes": self.notes,
        }


def modules(names: Iterable[str], found: Diff, moved: Movement) -> list[dict[str, Any]]:
    """Return the modules in the order of the model, each with its kinds of tensors.

    names: of the weights in A. Tensors that only B has come last.
    """
    weights = [each for each in found.differences if each.key.slot == WEIGHT]
    added = [each.key.name for each in weights if each.kind == "only in B"]
    of_kind: dict[str, Kind] = {}
    of_module: dict[str, Kind] = {}
    kinds_of: dict[str, dict[str, Kind]] = {}
    for name in [*names, *added]:
        place = place_of(name)
        kind = of_kind.setdefault(place.kind, Kind())
        module = of_module.setdefault(place.module, Kind())
        kinds_of.setdefault(place.module, {})[place.kind] = kind
        kind.tensors += 1
        module.tensors += 1
    for tensor in moved.tensors:
        place = place_of(tensor.name)
        of_kind[place.kind].add(tensor)
        of_module[place.module].add(tensor)
    for difference in weights:
        place = place_of(difference.key.name)
        of_kind[place.kind].count(difference)
        of_module[place.module].count(difference)
    return [
        {"name": name, **module.to_json(), "kinds": _named(kinds_of[name])}
        for name, module in of_module.items()
    ]


def _named(kinds: dict[str, Kind]) -> list[dict[str, Any]]:
    return [{"name": name, **kind.to_json()} for name, kind in kinds.items()]


def maps(moved: Movement) -> list[dict[str, Any]]:
    """Return a map for each stack of layers: a row for each kind of tensor, a cell for each layer.

    A cell sums up the tensors of the kind in the layer, for example all experts. It is None if the layer has none.
    """
    cells: dict[str, dict[Place, Moved]] = {}
    for tensor in moved.tensors:
        place = place_of(tensor.name)
        if place.stack:
            stack = cells.setdefault(place.stack, {})
            stack[place] = stack[place] + tensor if place in stack else tensor
    return [_map(stack, found) for stack, found in cells.items()]


def _map(stack: str, cells: dict[Place, Moved]) -> dict[str, Any]:
    layers = sorted({place.layer for place in cells})
    # Modules stay together, in the order of the model.
    kinds_of: dict[str, dict[str, None]] = {}
    for place in cells:
        kinds_of.setdefault(place.module, {})[place.kind] = None
    rows = [
        _row(stack, module, kind, layers, cells)
        for module, kinds in kinds_of.items()
        for kind in kinds
    ]
    return {"name": stack, "layers": layers, "rows": rows}


def _row(
    stack: str, module: str, kind: str, layers: Sequence[int], cells: dict[Place, Moved]
) -> dict[str, Any]:
    found = [cells.get(Place(stack, layer, module, kind)) for layer in layers]
    return {
        "kind": kind,
        "name": kind.removeprefix(f"{module}.").removesuffix(".weight"),
        "module": module.removeprefix(f"{stack}."),
        "cells": [None if cell is None else cell.to_json() for cell in found],
    }
