"""Every cause of an error has a code that scripts can rely on: one table, and what a failing command prints with --json."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import megatron_lite.checkpoint.saver
import megatron_lite.processes.failure  # noqa: F401  both define errors of their own
from megaconv import errors
from megaconv.errors import CODES, CheckpointError
from tests.models import write_llama
from tests.package.test_architecture import CONVERTER, ROOT, fail_at, modules
from tests.runs import run


def classes(kind: type[CheckpointError]) -> Iterator[type[CheckpointError]]:
    yield kind
    for inner in kind.__subclasses__():
        if inner.__module__.startswith(("megaconv", "formats", "megatron_lite")):
            yield from classes(inner)


@cache
def raised() -> tuple[tuple[str, type[CheckpointError], str], ...]:
    """(FILE:LINE, class, code) of everything in the converter that makes one of our errors with a code of its own."""
    return tuple(place for path in files_with("code=") for place in raised_in(path))


def files_with(words: str) -> Iterator[Path]:
    """Files of the converter in which these words stand: the others need not be parsed."""
    for _, path in modules(*CONVERTER):
        if words in path.read_text(encoding="utf-8"):
            yield path


def raised_in(path: Path) -> Iterator[tuple[str, type[CheckpointError], str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            kind = getattr(errors, node.func.id, None)
            if not isinstance(kind, type) or not issubclass(kind, CheckpointError):
                continue
            for code in (word.value for word in node.keywords if word.arg == "code"):
                for either in (code.body, code.orelse) if isinstance(code, ast.IfExp) else (code,):
                    if ast.unparse(either) != "error.code":
                        # `code=error.code` is that of an error that is raised again with more words.
                        assert isinstance(either, ast.Constant), (
                            f"{path}:{node.lineno}: the code has to be a literal"
                        )
                        yield f"{path}:{node.lineno}", kind, str(either.value)


def test_every_class_has_a_code_of_the_table_that_ends_with_its_exit_status() -> None:
    for kind in classes(CheckpointError):
        assert CODES[kind.code].exit_status == kind.exit_status, kind


def test_no_two_classes_of_the_converter_have_the_same_code() -> None:
    codes = [
        kind.code
        for kind in classes(CheckpointError)
        if not kind.__module__.startswith("megatron_lite")
    ]
    assert sorted(codes) == sorted(set(codes))


def test_every_code_given_where_an_error_is_raised_is_of_the_table_and_has_its_exit_status() -> (
    None
):
    fail_at(
        [
            f"{place}: {kind.__name__} with code {code!r}"
            for place, kind, code in raised()
            if code not in CODES or CODES[code].exit_status != kind.exit_status
        ]
    )


def test_every_code_of_the_table_is_used_and_belongs_to_one_class() -> None:
    owners: dict[str, set[type[CheckpointError]]] = {
        kind.code: {kind} for kind in classes(CheckpointError)
    }
    for _, kind, code in raised():
        owners.setdefault(code, set()).add(kind)
    # These codes are for errors of other software.
    assert set(CODES) - owners.keys() == {"system-error", "interrupted"}
    converters = {
        code: {kind for kind in kinds if kind.__module__.startswith(("megaconv", "formats"))}
        for code, kinds in owners.items()
    }
    assert {code: kinds for code, kinds in converters.items() if len(kinds) > 1} == {}


def test_errors_that_are_raised_again_keep_their_code() -> None:
    fail_at(
        [
            f"{path}:{node.lineno}: loses the code of the error"
            for path in files_with("type(")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("type(")
            if not any(word.arg == "code" for word in node.keywords)
            and "error" in ast.unparse(node.func)
        ]
    )


def test_the_documentation_has_the_same_table() -> None:
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (\d+) \| (.+) \|$",
        (ROOT / "docs" / "errors.md").read_text(),
        re.MULTILINE,
    )
    assert {code: (int(status), meaning) for code, status, meaning in rows} == dict(CODES)


# What a failing command prints.


def error_of(*arguments: object, status: int) -> dict[str, object]:
    outcome = run(*arguments, "--json")
    assert outcome.status == status, outcome
    document = json.loads(outcome.out)
    assert document.keys() == {"error"}
    error: dict[str, object] = document["error"]
    assert error["exit_status"] == status
    assert str(error["message"]) in outcome.err
    return error


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--tp", 3], "layout-indivisible"),
        (["--vpp", 2], "layout-impossible"),
        (["--loader", "zip"], "unknown-loader"),
        (["--saver", "zip"], "unknown-saver"),
        (["--optimizer"], "no-optimizer"),
        (["--dtype", "fp8"], "wrong-usage"),
    ],
)
def test_a_conversion_that_is_refused_says_why_by_a_code(
    model: Path, options: list[object], code: str
) -> None:
    command = [
        "convert",
        "--load-dir",
        model,
        "--saver",
        "core",
        "--save-dir",
        model.parent / "out",
        *options,
    ]
    assert error_of(*command, status=2)["code"] == code


def test_errors_about_an_input_have_their_own_codes(model: Path, tmp_path: Path) -> None:
    assert error_of("inspect", tmp_path / "nothing", status=2)["code"] == "no-such-input"
    assert error_of("inspect", tmp_path, status=3)["code"] == "unknown-format"
    assert error_of("verify", model, status=3)["code"] == "no-fingerprints"
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert error_of("fingerprint", model, status=3)["code"] == "truncated-file"
    weights.unlink()
    assert error_of("fingerprint", model, status=3)["code"] == "missing-file"


def test_a_target_that_exists_has_a_code(model: Path, tmp_path: Path) -> None:
    command = ["convert", "--load-dir", model, "--saver", "hf", "--save-dir", tmp_path]
    assert error_of(*command, status=2)["code"] == "target-exists"


def test_an_option_that_does_not_exist_is_wrong_usage_too(model: Path) -> None:
    outcome = run("inspect", model, "--no-such-option", "--json")
    assert outcome.status == 2
    error = json.loads(outcome.out)["error"]
    assert (error["code"], error["exit_status"]) == ("wrong-usage", 2)
    assert "--no-such-option" in error["message"]
    assert "`megaconv inspect --help` lists the options" in outcome.err


def test_without_json_stdout_stays_empty(tmp_path: Path) -> None:
    outcome = run("inspect", tmp_path / "nothing")
    assert (outcome.status, outcome.out) == (2, "")
    assert len(outcome.err.splitlines()) == 1
