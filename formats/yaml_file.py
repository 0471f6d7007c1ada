"""Reads YAML files of others as plain values. No tag makes this module construct anything.

    window_size: !!python/tuple [4095, 0]           a list, as with every tag that only names a kind of list
    backend: !!python/object/apply:os.system [x]    Tagged("tag:yaml.org,2002:python/object/apply:os.system", ["x"])

The file is read event by event, so that depth and size are limited before a value is made. The value of an alias counts
every time that it is named: a file of a kilobyte can name a billion values. Merge keys (`<<`) stay keys. Source: YAML
1.1, as PyYAML reads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.ceilings import YAML_BYTES, YAML_DEPTH, YAML_NUMBER, YAML_VALUES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_small

if TYPE_CHECKING:
    import yaml

_OWN = "tag:yaml.org,2002:"
_LISTS = (f"{_OWN}seq", f"{_OWN}python/tuple", f"{_OWN}python/list")
_MAPPINGS = (f"{_OWN}map", f"{_OWN}python/dict")
_SCALARS = tuple(_OWN + name for name in ("null", "bool", "int", "float"))
_TEXTS = tuple(_OWN + name for name in ("str", "timestamp", "value", "merge", "binary"))


@dataclass(frozen=True)
class Tagged:
    """A value with a tag that only its writer understands."""

    tag: str
    value: Any


def yaml_bytes(value: Any) -> bytes:
    """A YAML document of plain values for every YAML reader. Numbers like 1e-05 get a dot, without which PyYAML would
    read a text."""
    import yaml

    return bytes(yaml.safe_dump(value, sort_keys=False, width=130), "utf-8")


class _Bounds(ValueError):
    """The document is larger, deeper or has more alias values than any checkpoint's document."""


def read_yaml(path: Path) -> Any:
    """The value of a small YAML file of one document. Raises CorruptCheckpoint for a file that is too large or is not
    YAML."""
    return parse_yaml(read_small(path, YAML_BYTES), str(path))


def parse_yaml(content: bytes, where: str) -> Any:
    """The value of a YAML document. where: its name in messages. Raises CorruptCheckpoint, as read_yaml does."""
    import yaml

    try:
        return _Reader(_events(content)).document()
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        what = " ".join(str(error).split())
        raise CorruptCheckpoint(f"{where}: is not a readable YAML file ({what:.200})") from error


def _events(content: bytes) -> "Iterator[yaml.Event]":
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    events: Iterator[yaml.Event] = yaml.parse(content.decode("utf-8"), Loader=loader)
    return events


@dataclass
class _Reader:
    """Makes values from a parser's events. The parsers of libyaml and PyYAML give the same events."""

    events: "Iterator[yaml.Event]"
    anchors: dict[str, tuple[Any, int] | None] = field(default_factory=dict)
    """Anchor -> (value, number of values in it); None while it is being read."""
    values: int = 0

    def document(self) -> Any:
        import yaml

        found: list[Any] = []
        for event in self.events:
            if isinstance(event, yaml.NodeEvent):
                if found:
                    raise _Bounds("it holds several documents, where one is expected")
                found.append(self._value(event, 0))
        return found[0] if found else None

    def _value(self, event: Any, depth: int) -> Any:
        import yaml

        if depth > YAML_DEPTH:
            raise _Bounds(f"it is nested more than {YAML_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            return self._named(event.anchor)
        self._count(1)
        before = self.values
        if event.anchor:
            self.anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = _tagged(event.tag, _LISTS, self._items(depth))
        else:
            value = _tagged(event.tag, _MAPPINGS, self._pairs(depth))
        if event.anchor:
            self.anchors[event.anchor] = value, 1 + self.values - before
        return value

    def _items(self, depth: int) -> list[Any]:
        import yaml

        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._value(event, depth + 1))
        return items

    def _pairs(self, depth: int) -> dict[Any, Any]:
        import yaml

        pairs: dict[Any, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            value = self._value(next(self.events), depth + 1)
            if isinstance(key, (list, dict, Tagged)):
                raise _Bounds("it has a key that is no word")
            if key in pairs:
                raise _Bounds(f"it has the key {key!r:.60} twice")
            pairs[key] = value
        return pairs

    def _named(self, anchor: str) -> Any:
        known = self.anchors.get(anchor)
        if known is None:
            raise _Bounds(
                f"the alias {anchor:.60} is not defined, or refers to a value that contains it"
            )
        self._count(known[1])
        return known[0]

    def _count(self, values: int) -> None:
        self.values += values
        if self.values > YAML_VALUES:
            raise _Bounds(f"it has more than {YAML_VALUES:,} values, aliases counted out")


def _scalar(event: "yaml.ScalarEvent") -> Any:
    """The value of a scalar. Raises ValueError for an invalid number."""
    import yaml

    tag = event.tag
    if tag is None or tag == "!":
        tag = yaml.resolver.Resolver().resolve(yaml.ScalarNode, event.value, event.implicit)
    if tag not in _SCALARS:
        return event.value if tag in _TEXTS else Tagged(tag, event.value)
    if len(event.value) > YAML_NUMBER:
        raise _Bounds(f"it has a number of {len(event.value):,} characters")
    try:
        return yaml.constructor.SafeConstructor().construct_object(
            yaml.ScalarNode(tag, event.value)
        )
    except (ArithmeticError, LookupError, ValueError) as error:
        raise ValueError(f"{event.value!r:.60} is no !!{tag.removeprefix(_OWN)}") from error


def _tagged(tag: str | None, plain: tuple[str, ...], value: Any) -> Any:
    return value if tag is None or tag == "!" or tag in plain else Tagged(tag, value)
