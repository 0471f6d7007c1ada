"""docs/megatron.md: all ninety promises have a row. Each command is parsed by the command itself, and each script and test exists."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_lite.data.preprocess import make_parser as preprocess_parser
from megatron_lite.data.recipes.command import make_parser as recipes_parser
from megatron_lite.inference.commands import calibrate, chat, evaluate, generate, serve
from megatron_lite.inference.flags import parse_with_training_flags
from megatron_lite.retrieval.commands import embed, retrieve, retro
from megatron_lite.retrieval.commands.model_flags import parse_with_model_flags
from megatron_lite.settings.arguments import parse
from tests.runs import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
MARKS = ("yes", "partly", "no")


PROMISES = range(1, 91)
LATER = "\N{EN DASH}"
"""A mark in place of a number, for a row that is no such promise."""


class Promise(NamedTuple):
    numbers: str
    """Such as `4, 6, 9`."""
    text: str
    mark: str
    command: str
    test: str
    difference: str


def rows() -> list[Promise]:
    """The rows of all tables."""
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if line.startswith("|")
    ]
    return [Promise(*cells) for cells in found if len(cells) == 6 and cells[2] in MARKS]


COMMANDS = [row.command.strip("`") for row in rows() if row.command]


def test_every_promise_has_a_row() -> None:
    numbered = [row.numbers for row in rows() if row.numbers != LATER]
    numbers = {int(number) for each in numbered for number in each.split(",")}
    assert sorted(numbers) == list(PROMISES)


def test_every_row_has_a_mark_and_what_works_has_a_command_and_a_test() -> None:
    for row in rows():
        works = row.mark != "no"
        assert bool(row.command) == works, row.text
        assert row.test or not works, row.text
        assert row.difference or row.mark == "yes", row.text
        assert not row.command or re.fullmatch(r"`[^`]+`", row.command), row.text


@pytest.mark.parametrize("test", sorted({row.test for row in rows() if row.test}))
def test_a_named_test_exists(test: str) -> None:
    path = ROOT / "tests" / test.strip("`")
    assert re.search(r"^def test_", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("megatron-lite ")])
def test_a_command_of_the_trainer_is_understood(line: str) -> None:
    command, *words = shlex.split(line)[1:]
    if command in ("pretrain", "finetune"):
        assert parse(command, words) is not None
    elif command == "preprocess":
        assert preprocess_parser().parse_args(words) is not None
    elif command == "data":
        assert recipes_parser().parse_args(words) is not None
    elif command == "embed":
        assert parse_with_model_flags(embed.parser(), words) is not None
    elif command == "evaluate" and "--toxicity" in words:
        assert evaluate.parser(needs_model=False).parse_args(words) is not None
    else:
        modules = (calibrate, chat, embed, evaluate, generate, retrieve, retro, serve)
        parsers = {module.__name__.rpartition(".")[2]: module.parser for module in modules}
        parser = parsers[command]()
        of_training = command in ("evaluate", "serve")
        read = parse_with_training_flags if of_training else type(parser).parse_args
        todays = evaluate.with_todays_task(words) if command == "evaluate" else words
        assert read(parser, todays) is not None


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("megaconv ")])
def test_a_command_of_the_converter_is_understood(line: str) -> None:
    """The input doesn't exist, and this is the only complaint."""
    words = shlex.split(line)[1:]
    outcome = run(*words)
    assert outcome.status != 0
    assert "Usage" not in outcome.err
    assert re.search(r"no such|doesn't exist", outcome.err), outcome.err


SCRIPTS = [line for line in COMMANDS if line.startswith(("examples/", "python examples/"))]


@pytest.mark.parametrize("line", SCRIPTS)
def test_a_script_exists(line: str) -> None:
    program, *words = line.split()
    path = ROOT / (words[0] if program == "python" else program)
    assert path.is_file()
    assert program == "python" or path.stat().st_mode & 0o100


def test_every_command_is_tested() -> None:
    known = ("megatron-lite ", "megaconv ", "examples/", "python examples/", "pip install ")
    assert [line for line in COMMANDS if not line.startswith(known)] == []
