"""Writes what the documentation says about options: docs/options.md, and the signatures in docs/api.md.

python docs/build_options.py
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer.main

import megaconv
from megaconv.called import spelled
from megaconv.commands.cli import COMMANDS, app, load
from megaconv.options.option import HEADINGS, Range

DOCS = Path(__file__).parent
OTHERS = "Other commands"
INTRODUCTION = """# Options

Every option of every command, as `--help` shows it. The [Python interface](api.md) has the same options. See
[convert](convert.md#options) for the details of a conversion. `python docs/build_options.py` writes this page.
"""
HEAD = "| option | commands | default | range | meaning |\n|---|---|---|---|---|\n"


class Row(NamedTuple):
    """An option as one or more commands have it."""

    heading: str
    names: str
    default: str
    range: str
    meaning: str


def options_page() -> str:
    """The content of docs/options.md."""
    commands = _commands_by_row()
    sections = [INTRODUCTION]
    for heading in (*HEADINGS, OTHERS):
        rows = [_line(row, commands[row]) for row in commands if row.heading == heading]
        sections.append(f"## {heading}\n\n{HEAD}{''.join(rows)}")
    return "\n".join(sections)


def _commands_by_row() -> dict[Row, list[str]]:
    found: dict[Row, list[str]] = {}
    shared = {row.names: row.heading for row in _rows("convert")}
    for command in COMMANDS:
        for row in _rows(command):
            heading = shared.get(row.names, OTHERS)
            found.setdefault(row._replace(heading=heading), []).append(command)
    return found


def _rows(command: str) -> Iterator[Row]:
    """The options of a command that `--help` shows, in its order."""
    load()
    commands: Any = typer.main.get_command(app)
    for each in commands.commands[command].params:
        if (
            each.param_type_name == "option"
            and each.help
            and not each.hidden
            and each.name != "help"
        ):
            names = ", ".join(f"`{name}`" for name in (*each.opts, *each.secondary_opts))
            yield Row(
                each.rich_help_panel or OTHERS, names, _default(each), _range(each), each.help
            )


def _default(option: Any) -> str:
    given = option.default
    if isinstance(given, bool):
        name = option.opts[0] if given else (option.secondary_opts or ("",))[0]
        return f"`{name}`" if name else ""
    return "" if given in (None, "") else f"`{given}`"


def _range(option: Any) -> str:
    least = getattr(option.type, "min", None)
    return "" if least is None else str(Range(least, option.type.max))


def _line(row: Row, commands: list[str]) -> str:
    meaning = row.meaning.replace("|", "\\|")
    return f"| {row.names} | {', '.join(commands)} | {row.default} | {row.range} | {meaning} |\n"


def signature(name: str) -> str:
    """A function of the Python interface as docs/api.md shows it: one parameter on each line."""
    called = inspect.signature(getattr(megaconv, name))
    lines, starred = list[str](), False
    for each in called.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not starred:
            lines, starred = [*lines, "*"], True
        default = "" if each.default is each.empty else f" = {each.default!r}".replace("'", '"')
        lines.append(f"{each.name}: {spelled(each.annotation)}{default}")
    listed = "".join(f"    {line},\n" for line in lines)
    return f"megaconv.{name}(\n{listed}) -> {spelled(called.return_annotation)}\n"


def with_signatures(reference: str) -> str:
    """docs/api.md with today's signatures: the first Python block of a function's section is its signature."""
    for name in megaconv.__all__:
        block = rf"(^## {name}\n.*?```python\n)megaconv\.{name}\(.*?(```)"
        today = signature(name) if callable(getattr(megaconv, name)) else ""
        reference = re.sub(
            block,
            lambda found, text=today: found[1] + text + found[2],
            reference,
            count=1,
            flags=re.M | re.S,
        )
    return reference


if __name__ == "__main__":
    (DOCS / "options.md").write_text(options_page(), encoding="utf-8")
    api = DOCS / "api.md"
    api.write_text(with_signatures(api.read_text(encoding="utf-8")), encoding="utf-8")
