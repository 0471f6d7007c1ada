"""The order of modules in a Megatron model's own state_dict, in which files list parameters and number optimizer state.

The order follows from the table: a module's place is that of the first row with its name, or with a name in it. In
every module, its own parameters come before those of its submodules, as torch lists them. If Megatron creates modules
in another order than the model computes with them, `Exceptions` contain that order.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megaconv.errors import TensorMismatch
from megaconv.model.naming import Naming
from megaconv.model.patterns import expand
from megaconv.model.table import Row

NameOrder = tuple[tuple[int, int, int], ...]
Order = Callable[[str], NameOrder]

_NUMBERED = re.compile(r"(.*?)(\d+)")
_BEHIND = 1 << 20
"""A position after all names of a table."""


@dataclass(frozen=True)
class Exceptions:
    """Modules by parent module that come before or after all others in it. They may have no parameters."""

    first: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    last: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def place(self, parent: str, part: str) -> tuple[int, int] | None:
        for side, listed in ((0, self.first.get(parent, ())), (2, self.last.get(parent, ()))):
            if part in listed:
                return side, listed.index(part)
        return None


class _Module(NamedTuple):
    """One part of dotted names, and the parts that follow it. A parameter has none."""

    children: dict[str, "_Module"]


@dataclass(frozen=True)
class ModuleOrder:
    """Sorts the names of one family in one naming scheme, as a key for sorted().

    Raises TensorMismatch for unknown names.
    """

    rows: tuple[Row, ...]
    naming: Naming
    exceptions: Exceptions
    _known: dict[str, NameOrder] = field(default_factory=dict)
    _root: _Module = field(default_factory=lambda: _Module({}))

    def __post_init__(self) -> None:
        for name in self._names():
            module = self._root
            for part in name.split("."):
                # Retro's table names one layer by its number. All layers are one module here.
                part = "{l}" if part.isdigit() else part
                module = module.children.setdefault(part, _Module({}))

    def __call__(self, name: str) -> NameOrder:
        if name not in self._known:
            self._known[name] = tuple(self._places(name))
        return self._known[name]

    def _names(self) -> Iterator[str]:
        """Every name of the table in its order. Second names of tensors come last."""
        for row in self.rows:
            for spelling in row.spelling(self.naming):
                yield from expand(spelling.name)
            yield from _copies(row, self.naming, "itself")
        for row in self.rows:
            for place in ("head", "mtp"):
                yield from _copies(row, self.naming, place)

    def _places(self, name: str) -> Iterator[tuple[int, int, int]]:
        module, parent = self._root, ""
        *path, parameter = name.split(".")
        for part in path:
            if part.isdigit():  # the number of a layer, or of an expert
                yield 1, 0, int(part)
                module = module.children.get("{l}") or module.children.get("{e}") or _Module({})
                continue
            exception = self.exceptions.place(parent, part)
            if exception is None and part not in module.children:
                raise TensorMismatch(
                    f"{name}: no row of the table names the module {part}, so its place is unknown"
                )
            yield 1, *(exception or (1, list(module.children).index(part)))
            module, parent = module.children.get(part, _Module({})), part
        yield self._place_of_parameter(module, parameter, name)

    def _place_of_parameter(self, module: _Module, part: str, name: str) -> tuple[int, int, int]:
        names = list(module.children)
        if part == "_extra_state":
            return 0, _BEHIND, 0
        if part in module.children:
            return 0, names.index(part), 0
        numbered = _NUMBERED.fullmatch(part)
        of_each_expert = f"{numbered[1]}{{e}}" if numbered else ""
        if numbered and of_each_expert in module.children:
            # A grouped layer has weight0, bias0, weight1, bias1 ...
            return 0, int(numbered[2]), names.index(of_each_expert)
        raise TensorMismatch(
            f"{name}: no row of the table names {part}, so its place in the model is unknown"
        )


def _copies(row: Row, naming: Naming, place: str) -> Iterator[str]:
    return (
        name for copied in row.copied_with(place) for name in copied.names.get(naming.scheme, ())
    )
