"""The pages of the reference that the code itself provides: every public docstring, and the help of every command.

`make docs` adds these pages to the site. A public name without a docstring fails the build.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator

from megaconv.called import spelled
from megaconv.commands.cli import COMMANDS

MODULES = (
    *(
        "megaconv",
        "megaconv.checkpoint",
        "megaconv.errors",
        "megaconv.options",
        "megaconv.model.ir",
    ),
    *("megaconv.engine.plan", "formats.tensor", "formats.output"),
)
"""The modules that a Python user and the author of a plug-in import from."""

HELP_ENVIRONMENT = {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}
"""Variables for a help text that doesn't depend on a terminal."""

CALL = "import sys; from megaconv.commands.cli import main; sys.argv[0] = 'megaconv'; main()"
"""Runs the command line under its installed name."""

STARS: dict[object, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}

ARGUMENT = re.compile(r"^(\*{0,2}\w+(?:, \w+)*): ")
"""The start of a docstring's line about an argument or a field."""


def pages() -> dict[str, str]:
    """The Markdown of each page, by its path in the site. Raises SystemExit if a public docstring is missing."""
    missing = undocumented()
    if missing:
        sys.exit("without a docstring: " + ", ".join(missing))
    found = {f"reference/{name}.md": module_page(name) for name in MODULES}
    found["reference/commands.md"] = commands_page()
    return found


def undocumented() -> list[str]:
    """Public functions, classes, their methods and properties without a docstring of their own, by dotted name."""
    return sorted({name for module in MODULES for name in _undocumented_of(module)})


def _undocumented_of(module: str) -> Iterator[str]:
    imported = importlib.import_module(module)
    if not imported.__doc__:
        yield module
    described = {
        name
        for kind in vars(imported).values()
        if inspect.isclass(kind)
        for name in _described(kind)
    }
    for name, value in _public(module):
        if not value.__doc__:
            yield f"{module}.{name}"
        if inspect.isclass(value):
            yield from (f"{module}.{name}.{inner}" for inner in _members(value) - described)


def _public(module: str) -> Iterator[tuple[str, type | types.FunctionType]]:
    """(name, value) of the functions and classes that a module exports or, without `__all__`, defines itself."""
    imported = importlib.import_module(module)
    exported = getattr(imported, "__all__", None)
    for name in exported or [name for name in vars(imported) if not name.startswith("_")]:
        value = getattr(imported, name)
        is_own = exported is not None or getattr(value, "__module__", None) == module
        if is_own and (inspect.isclass(value) or inspect.isfunction(value)):
            yield name, value


def _described(kind: type) -> set[str]:
    """Members with a docstring: a protocol's are not described again by each class that has them."""
    return {name for name in _members(kind) if vars(kind)[name].__doc__}


def _members(kind: type) -> set[str]:
    """Public functions and properties that a class defines itself."""
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    return {
        name
        for name, value in vars(kind).items()
        if isinstance(value, kinds) and not name.startswith("_")
    }


def module_page(module: str) -> str:
    """One module: its docstring, then its classes and functions."""
    imported = importlib.import_module(module)
    parts = [f"# {module}", _prose(imported.__doc__)]
    for name, value in _public(module):
        parts.append(f"## {name}")
        parts += _class(value) if inspect.isclass(value) else _function(name, value)
    return "\n\n".join(parts) + "\n"


def _class(kind: type) -> Iterator[str]:
    """The docstring, the fields and the methods of a class."""
    bases = [base.__name__ for base in kind.__bases__ if base is not object]
    yield _code(f"class {kind.__name__}({', '.join(bases)})" if bases else f"class {kind.__name__}")
    yield _prose(kind.__doc__)
    fields = list(_fields(kind))
    if fields:
        yield "\n".join(fields)
    for name in [name for name in vars(kind) if name in _members(kind)]:
        yield f"### {kind.__name__}.{name}"
        yield from _member(name, vars(kind)[name])


def _member(name: str, member: object) -> Iterator[str]:
    if isinstance(member, property):
        returned = (
            spelled(inspect.signature(member.fget).return_annotation) if member.fget else "None"
        )
        yield _code(f"{name}: {returned}")
        yield _prose(member.__doc__)
    else:
        yield from _function(name, getattr(member, "__func__", member))


def _fields(kind: type) -> Iterator[str]:
    """A list item for each annotated field, with the docstring below it in the source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    following = [*definition.body[1:], None]
    for statement, after in zip(definition.body, following, strict=True):
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith(
            "_"
        ):
            text = " ".join(_literal(after).split())
            yield f"* `{ast.unparse(statement)}`" + (f": {text}" if text else "")


def _literal(statement: ast.stmt | None) -> str:
    """The text of a statement that is a string alone, or an empty text."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return str(value.value) if is_text and isinstance(value, ast.Constant) else ""


def _function(name: str, function: object) -> Iterator[str]:
    assert callable(function)
    yield _code(_signature(name, inspect.signature(function)))
    yield _prose(function.__doc__)


def _signature(name: str, signature: inspect.Signature) -> str:
    """One line, or a line for each argument if there are many."""
    arguments = list(_arguments(signature))
    returned = (
        ""
        if signature.return_annotation is signature.empty
        else f" -> {spelled(signature.return_annotation)}"
    )
    line = f"{name}({', '.join(arguments)}){returned}"
    if len(line) <= 100:
        return line
    listed = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{listed}){returned}"


def _arguments(signature: inspect.Signature) -> Iterator[str]:
    starred = False
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        starred |= each.kind is each.VAR_POSITIONAL
        yield _argument(each)


def _argument(argument: inspect.Parameter) -> str:
    text = f"{STARS.get(argument.kind, '')}{argument.name}"
    if argument.annotation is not argument.empty:
        text += f": {spelled(argument.annotation)}"
    if argument.default is not argument.empty:
        text += f" = {argument.default!r}"
    return text


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _prose(docstring: str | None) -> str:
    """A docstring as Markdown: its lines about arguments become a list."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring or "").splitlines():
        argument = ARGUMENT.match(line)
        if argument and (not lines or not lines[-1] or lines[-1].startswith("* ")):
            line = f"* `{argument[1]}`: {line[argument.end() :]}"
        elif line and lines and lines[-1].startswith("* "):
            lines[-1] += " " + line.strip()
            continue
        lines.append(line)
    return "\n".join(lines)


def commands_page() -> str:
    """The help of every command, as a terminal shows it."""
    parts = ["# Command-line help", "Each command prints its help with `--help`."]
    for command in COMMANDS:
        parts += [f"## megaconv {command}", f"```text\n{_help(command)}\n```"]
    return "\n\n".join(parts) + "\n"


def _help(command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CALL, command, "--help"],
        env={"PYTHONPATH": ":".join(sys.path), **HELP_ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
    return "\n".join(lines)
