"""One option of a command: a dataclass field that defines its name, range, default, help and commands.

    files: int | None = option(None, "--dist-files", range=Range(1, 65536), help="Files of a torch_dist output.")

The command line, the Python interface, the checks of values and docs/options.md read these fields. Nothing else spells
an option.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

from megaconv.errors import UsageError
from megaconv.options.commands import CONVERT
from megaconv.options.values import plain

T = TypeVar("T")

INPUT_AND_OUTPUT, LAYOUT, FORM, VALUES, RUN = HEADINGS = (
    "Input and output",
    "Layout",
    "Form of the output",
    "Values",
    "The run",
)
"""Headings of `--help` and of docs/options.md, in their order."""


class Range(NamedTuple):
    """The range of numbers that an option accepts."""

    least: int
    most: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.least:,} or more" if self.most is None else f"{self.least:,} to {self.most:,}"
        )

    def __contains__(self, value: Any) -> bool:
        return bool(self.least <= value and (self.most is None or value <= self.most))


class Option(NamedTuple):
    """The entry of one option."""

    names: tuple[str, ...]
    """Spellings on the command line, the usual one first. `--card/--no-card` can be turned on and off."""
    help: str
    heading: str = RUN
    commands: tuple[str, ...] = CONVERT
    """The commands that have the option, by name. The functions of the Python interface have the same names."""
    python: str = ""
    """The name in the Python interface; empty: that of the command line."""
    range: Range | None = None
    metavar: str | None = None
    words: Any = None
    """The type of the value on the command line; None: the type of the field."""
    read: Callable[[Any], Any] | None = None
    """Turns a caller's value into the field's value. Raises UsageError."""
    tracked: bool = False
    """True if callers see None as the default, so that a given value is known even if it equals the default."""

    @property
    def name(self) -> str:
        """The usual spelling on the command line, such as `--dist-files`."""
        return self.names[0].partition("/")[0]

    @property
    def parameter(self) -> str:
        """The parameter's name in the Python interface, such as `dist_files`."""
        return self.python or self.name.removeprefix("--").replace("-", "_")

    def value(self, given: Any) -> Any:
        """The field's value for a caller's value. None stays None. Raises UsageError for a value out of range."""
        if given is None:
            return None
        value = self._read(plain(given))
        if self.range is not None and value not in self.range:
            raise UsageError(f"{self.name} {value}: expected {self.range}")
        return value

    def _read(self, given: Any) -> Any:
        if self.read is None:
            return given
        try:
            return self.read(given)
        except UsageError as error:
            raise UsageError(f"{self.name} {error}") from None


def option(default: Any, *names: str, help: str, **entry: Any) -> Any:  # noqa: A002
    """A dataclass field that is an option. entry: further attributes of its Option."""
    return field(default=default, metadata={"option": Option(names, help, **entry)})


def inner(kind: type, entries: Mapping[str, Option] | None = None) -> Any:
    """A dataclass field with its own options.

    kind: a dataclass. entries: its options by field, if its fields don't define them.
    """
    return field(default_factory=kind, metadata={"entries": entries or {}})


class Listed(NamedTuple):
    """An option of a command, as the command line and the Python interface need it."""

    field: str
    option: Option
    words: Any
    """The type of the value on the command line."""
    default: Any
    """The default that callers see."""


def listed(
    kind: type, command: str, entries: Mapping[str, Option] | None = None
) -> Iterator[Listed]:
    """The options of a dataclass, and of the dataclasses in it, that a command has."""
    for each in fields(kind):
        if _is_inner(each):
            yield from listed(_inner_kind(each), command, each.metadata["entries"])
            continue
        entry = entry_of(each, entries)
        if entry is not None and command in entry.commands:
            starts_as_none = entry.tracked or each.default == ()  # typer lists nothing as None
            default = None if starts_as_none else each.default
            yield Listed(each.name, entry, entry.words or each.type, default)


def built(
    kind: type[T],
    command: str,
    values: Mapping[str, Any],
    entries: Mapping[str, Option] | None = None,
) -> T:
    """The dataclass, with a command's values by parameter. None stands for the default.

    Raises UsageError for a value that an option can't have.
    """
    chosen: dict[str, Any] = {}
    tracked: list[str] = []
    for each in fields(kind):  # type: ignore[arg-type]
        if _is_inner(each):
            chosen[each.name] = built(_inner_kind(each), command, values, each.metadata["entries"])
            continue
        entry = entry_of(each, entries)
        if entry is None or command not in entry.commands or values.get(entry.parameter) is None:
            continue
        chosen[each.name] = values[entry.parameter]
        if entry.tracked:
            tracked.append(each.name)
    if tracked:
        chosen["given"] = tuple(tracked)
    return kind(**chosen)


def options_given(options: object, entries: Mapping[str, Option] | None = None) -> dict[str, Any]:
    """The options of a dataclass that differ from their defaults: values by the usual spelling."""
    found: dict[str, Any] = {}
    usual = type(options)()
    for each in fields(options):  # type: ignore[arg-type]
        value = getattr(options, each.name)
        if _is_inner(each):
            found |= options_given(value, each.metadata["entries"])
            continue
        entry = entry_of(each, entries)
        if entry is not None and value != getattr(usual, each.name):
            found[entry.name] = value
    return found


def normalize(options: object, entries: Mapping[str, Option] | None = None) -> None:
    """Read and check the options of a frozen dataclass that is being made. Raises UsageError."""
    for each in fields(options):  # type: ignore[arg-type]
        given = getattr(options, each.name)
        entry = entry_of(each, entries)
        if entry is not None:
            object.__setattr__(options, each.name, entry.value(given))
        elif _is_inner(each) and each.metadata["entries"]:
            copied = replace(given)  # the caller's object stays as it is
            normalize(copied, each.metadata["entries"])
            object.__setattr__(options, each.name, copied)


def entry_of(each: "Field[Any]", entries: Mapping[str, Option] | None = None) -> Option | None:
    """The option that a field defines; None for a field that isn't an option."""
    found: Option | None = each.metadata.get("option") or (entries or {}).get(each.name)
    return found


def _is_inner(each: "Field[Any]") -> bool:
    return is_dataclass(each.default_factory)


def _inner_kind(each: "Field[Any]") -> type:
    kind: Any = each.default_factory
    return kind  # type: ignore[no-any-return]
