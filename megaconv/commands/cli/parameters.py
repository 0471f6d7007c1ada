"""Adds a function to the application as a command, with the options of `megaconv.options` as its parameters.

    def verify(*, path: Input, loader: str | None, load: LoadOptions, quiet: NoProgress = False) -> None

`path` and `quiet` are typer's, as written. `loader` is the option of that name. `load` stands for all options of its
class that `verify` has.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from megaconv.commands.cli.app import app
from megaconv.local_paths import local_path
from megaconv.options import options_of
from megaconv.options.option import Listed, Option, built, listed

Command = Callable[..., None]

_SHOWN: dict[type, str] = {int: "N", float: "X", str: "NAME", Path: "FILE"}
"""The word for a value in `--help`, by its type, for options that don't have their own."""


def command(**settings: Any) -> Callable[[Command], Command]:
    """Add a function to the application. settings: as of `typer.Typer.command`."""

    def add(function: Command) -> Command:
        app.command(**settings)(with_options(function))
        return function

    return add


def with_options(function: Command) -> Command:
    """The function as typer calls it: with each option as a keyword."""
    name = function.__name__
    wanted = inspect.signature(function).parameters
    shown = [parameter for each in wanted.values() for parameter in _parameters(each, name)]

    def call(**words: Any) -> None:
        function(**{each.name: _argument(each, name, words) for each in wanted.values()})

    call.__name__, call.__doc__, call.__module__ = name, function.__doc__, function.__module__
    call.__annotations__ = {each.name: each.annotation for each in shown}
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return call


def _parameters(wanted: inspect.Parameter, command: str) -> Iterator[inspect.Parameter]:
    """typer's parameters for one parameter of a command's function."""
    if get_origin(wanted.annotation) is Annotated:
        words, described = get_args(wanted.annotation)
        if isinstance(described, OptionInfo) and described.metavar is None:
            described.metavar = _metavar(words)
        yield wanted
    elif is_dataclass(wanted.annotation):
        yield from map(_parameter, listed(wanted.annotation, command))  # type: ignore[arg-type]
    else:
        yield _parameter(options_of(command)[wanted.name])


def _argument(wanted: inspect.Parameter, command: str, words: Mapping[str, Any]) -> Any:
    """The value of one parameter of a command's function. Raises UsageError."""
    if is_dataclass(wanted.annotation):
        return built(wanted.annotation, command, words)  # type: ignore[arg-type]
    return words[wanted.name]


def _parameter(each: Listed) -> inspect.Parameter:
    return inspect.Parameter(
        each.option.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=each.default,
        annotation=Annotated[each.words, _typer_option(each.option, each.words)],
    )


def _metavar(words: Any) -> str | None:
    """The word for a value of a type, or of this type or None; None for a flag."""
    kinds = [kind for kind in get_args(words) or (words,) if kind in _SHOWN]
    return _SHOWN[kinds[0]] if kinds else None


def _typer_option(option: Option, words: Any) -> Any:
    least, most = option.range or (None, None)
    is_path = Path in (words, *get_args(words))
    return typer.Option(
        *option.names,
        help=option.help,
        metavar=option.metavar or _metavar(words),
        min=least,
        max=most,
        parser=local_path if is_path else None,
        rich_help_panel=option.heading,
    )
