"""Python source as ruff formats it: calls, dictionaries and imports of a drafted file."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

WIDTH = 100
_INDENT = 4


@dataclass(frozen=True)
class Call:
    """Brackets with items: a call, or a dictionary. An item has text before it, such as `keys=`."""

    opening: str
    items: tuple[tuple[str, "Node"], ...]
    closing: str = ")"
    exploded: bool = False
    """True for one item per line, however short."""

    def __str__(self) -> str:
        items = ", ".join(f"{before}{node}" for before, node in self.items)
        return f"{self.opening}{items}{self.closing}"


Node = str | Call


def call(function: str, *arguments: Node) -> Call:
    """A call with positional arguments."""
    return Call(f"{function}(", tuple(("", argument) for argument in arguments))


def dictionary(values: Mapping[str, Node], *, first: str = "") -> Call:
    """A dictionary. values: source of each value. first: a dictionary that it extends, such as `LLAMA.fixed`."""
    extended = (("**", first),) if first else ()
    items = tuple((f"{literal(key)}: ", value) for key, value in values.items())
    return Call("{", (*extended, *items), "}")


def literal(value: Any) -> str:
    """The source of a value of JSON. Strings have double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, Mapping):
        inside = ", ".join(f"{literal(key)}: {literal(each)}" for key, each in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        items = [literal(each) for each in value]
        inside = ", ".join(items)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(items) == 1 else f"({inside})"
    return repr(value)


def node_of(value: Any) -> Node:
    """A value of JSON. A long one gets a line for each of its items."""
    if isinstance(value, Mapping) and value:
        return dictionary({str(key): node_of(each) for key, each in value.items()})
    if isinstance(value, list) and value:
        return Call("[", tuple(("", node_of(each)) for each in value), "]")
    return literal(value)


def statement(before: str, node: Node) -> Iterator[str]:
    """Yield the lines of an assignment. before: `FAMILY = `."""
    yield from _lines(before, node, "", 0)


def _lines(before: str, node: Node, after: str, indent: int) -> Iterator[str]:
    space = " " * indent
    short = f"{space}{before}{node}{after}"
    fits = len(short) <= WIDTH and not _is_exploded(node)
    if isinstance(node, str) or fits:
        yield short
        return
    yield f"{space}{before}{node.opening}"
    for inside, item in node.items:
        yield from _lines(inside, item, ",", indent + _INDENT)
    yield f"{space}{node.closing}{after}"


def _is_exploded(node: Node) -> bool:
    if isinstance(node, str):
        return False
    return node.exploded or any(_is_exploded(item) for _, item in node.items)


def imports(wanted: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of imports. wanted: (module, name). A name may have the form `FAMILY as LLAMA`."""
    modules: dict[str, set[str]] = {}
    for module, name in wanted:
        modules.setdefault(module, set()).add(name)
    for module, names in sorted(modules.items(), key=_is_ours):
        renamed = sorted(name for name in names if " as " in name)
        plain = sorted((name for name in names if " as " not in name), key=_import_order)
        for name in renamed:
            yield f"from {module} import {name}"
        if plain:
            yield from _import(module, plain)
        if not _is_ours((module, names))[0]:
            yield ""


def _is_ours(entry: tuple[str, Any]) -> tuple[bool, str]:
    """A sort key: the standard library's only module, `dataclasses`, is first."""
    return entry[0] != "dataclasses", entry[0]


def _import_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    if name.isupper():
        return 0, name
    is_class = name[:1].isupper()
    return (1 if is_class else 2), name


def _import(module: str, names: list[str]) -> Iterator[str]:
    short = f"from {module} import {', '.join(names)}"
    if len(short) <= WIDTH:
        yield short
        return
    yield f"from {module} import ("
    yield from (f"{' ' * _INDENT}{name}," for name in names)
    yield ")"


def comment(text: str) -> Iterator[str]:
    """Yield the lines of a comment. Further lines are indented."""
    first, *rest = text.splitlines()
    yield from wrap(
        first, WIDTH, initial_indent="# ", subsequent_indent="#     ", break_on_hyphens=False
    )
    for line in rest:
        yield f"#     {line}"[:WIDTH].rstrip()
