"""Options: each is defined once. The command line, the Python interface and docs/options.md follow."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args, get_origin

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import megaconv
from megaconv.commands.cli import app, load
from megaconv.commands.cli.parameters import with_options
from megaconv.errors import UsageError
from megaconv.options import LoadOptions, SaveOptions, options_of
from megaconv.options.option import Listed, Option, Range, built, listed, option
from tests.doc_scripts import DOCS, script

COMMANDS = ("convert", "merge", "push", "inspect", "plan", "fingerprint", "verify", "diff")
load()
SHOWN: Any = typer.main.get_command(app)


def missing(function: Callable[..., Any], options: Mapping[str, Listed]) -> list[str]:
    """Options that aren't parameters of a function of the Python interface, or that have another default there."""
    parameters = inspect.signature(function).parameters
    return [
        name
        for name, each in options.items()
        if name not in parameters or not agree(parameters[name].default, each)
    ]


def agree(default: object, each: Listed) -> bool:
    return default == each.default or (default, each.default) == ((), None)


def members(kind: Any) -> set[Any]:
    """The types of a union."""
    return set(get_args(kind)) if get_origin(kind) is UnionType else {kind}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_a_parameter_with_the_same_default_in_python(command: str) -> None:
    assert missing(getattr(megaconv, command), options_of(command)) == []


@pytest.mark.parametrize("command", SHOWN.commands)
def test_help_has_a_word_for_each_value_and_no_type_of_python(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).output
    found = re.findall(r"--[a-z-]+ (?:<[a-z_ ]+>|INTEGER|FLOAT)", text)
    assert found == []


def test_open_has_the_options_for_reading() -> None:
    options = {each.option.parameter: each for each in listed(LoadOptions, "inspect")}
    assert missing(megaconv.open, options) == []


def test_convert_has_no_other_options_in_python() -> None:
    parameters = inspect.signature(megaconv.convert).parameters
    assert parameters.keys() - options_of("convert") == {
        "load_dir",
        "save_dir",
        "saver",
        "dry_run",
        "progress",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_python_takes_every_type_that_the_command_line_takes(command: str) -> None:
    parameters = inspect.signature(getattr(megaconv, command)).parameters
    for name, each in options_of(command).items():
        words = members(each.words)
        if list[str] not in words:  # a sequence or a mapping in Python
            assert words <= members(parameters[name].annotation), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_its_options_as_they_are_defined(command: str) -> None:
    shown = {each.name: each for each in SHOWN.commands[command].params}
    for name, each in options_of(command).items():
        assert "/".join([*shown[name].opts, *shown[name].secondary_opts]) in (
            "/".join(each.option.names),
            *each.option.names,
        )
        assert (shown[name].help, shown[name].default) == (each.option.help, each.default)
        assert getattr(shown[name].type, "min", None) == (
            each.option.range.least if each.option.range else None
        )


def test_the_page_of_options_is_written_from_them() -> None:
    """`python docs/build_options.py` writes it."""
    assert (DOCS / "options.md").read_text(encoding="utf-8") == script(
        "build_options"
    ).options_page()


# An option that is added.


@dataclass(frozen=True)
class More(SaveOptions):
    """The options for writing an output, and one more."""

    copies: int = option(1, "--copies", "-c", range=Range(1, 9), help="Copies of the output.")


def run_with(*words: str) -> tuple[int, str, list[More]]:
    """(exit status, output, options) of a command that has the options of `convert` and `More`."""
    taken: list[More] = []

    def convert(*, save: More) -> None:
        taken.append(save)

    application = typer.Typer(rich_markup_mode=None)
    application.command()(with_options(convert))
    outcome = CliRunner().invoke(application, words)
    return outcome.exit_code, outcome.output, taken


def test_one_field_makes_an_option_of_the_command_line() -> None:
    status, _, (save,) = run_with("-c", "3", "--tp", "2")
    assert (status, save.copies, save.tp) == (0, 3, 2)
    assert run_with()[2] == [More()]
    assert "Copies of the output." in run_with("--help")[1]
    assert run_with("--copies", "10")[0] == 2


def test_one_field_makes_an_option_of_python() -> None:
    save = built(More, "convert", {"copies": np.int64(3), "tp": None})
    assert (save.copies, type(save.copies), save.tp) == (3, int, None)
    with pytest.raises(UsageError, match="--copies 10: expected 1 to 9"):
        More(copies=10)


def test_an_option_without_its_parameter_in_python_is_named() -> None:
    options = {each.option.parameter: each for each in listed(More, "convert")}
    assert missing(megaconv.convert, options) == ["copies"]


def test_a_parameter_is_named_as_on_the_command_line() -> None:
    assert Option(("--dist-files",), "").parameter == "dist_files"
    assert Option(("--card/--no-card",), "").parameter == "card"
    assert Option(("--option",), "", python="options").parameter == "options"
