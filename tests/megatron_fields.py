"""Names and defaults of Megatron's configuration fields, and of its parser's arguments: tests/fixtures/megatron_fields.json.

    python tests/megatron_fields.py wheels                         reads every megatron-core on the package index anew
    python tests/megatron_fields.py repository ~/Megatron-LM       and every release's tag of a clone of Megatron-LM
    python tests/megatron_fields.py repository ~/Megatron-LM main  and another commit of it

Nothing is installed or run: classes and parsers are read as text. When a release has something new,
tests/megatron/test_known_arguments.py names what megaconv has to learn of it.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

FILE = Path(__file__).parent / "fixtures" / "megatron_fields.json"
FIRST = (0, 12)
"""The first release whose configuration classes count; parsers are read from every tag."""

CONFIGURATIONS = r"megatron/core/(?!datasets/).*config\.py"
BASES = ("ModelParallelConfig", "TransformerConfig")
"""The tests cover these classes, and all that inherit from them in megatron/core."""

PARSED = ("LoggerConfig", "StragglerDetectionConfig", "ProfilingConfig", "TrainingConfig", "RerunStateMachineConfig",
          "RNGConfig", "SchedulerConfig", "CheckpointConfig", "ValidationConfig", "DistributedInitConfig",
          "TokenizerConfig", "FaultInjectorConfig")  # fmt: skip
"""Classes whose fields become arguments, from core 0.16 on."""

Fields = dict[str, str]
"""`Class.field` -> its default as source text; an empty text where it has none."""


def core_fields(sources: Iterable[str]) -> Fields:
    """The fields of the configuration classes in these texts."""
    classes = {
        node.name: node
        for text in sources
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    }

    def counts(name: str) -> bool:
        bases = [ast.unparse(base) for base in classes[name].bases] if name in classes else []
        return name in BASES or any(counts(base) for base in bases)

    return {
        f"{name}.{field}": default
        for name, node in sorted(classes.items())
        if counts(name)
        for field, default in _fields(node)
    }


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            value = item.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
                words = {word.arg: word.value for word in value.keywords}
                value = words.get("default", words.get("default_factory"))
            yield item.target.id, "" if value is None else ast.unparse(value)


def parser_arguments(sources: Iterable[str]) -> set[str]:
    """Every name that a parser among these texts puts into its namespace."""
    names = set()
    for text in sources:
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                names |= set(_destination(node))
            elif isinstance(node, ast.ClassDef) and node.name in PARSED:
                names |= {name for name, _ in _fields(node)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) == "args" else set()
    return names


def _destination(call: ast.Call) -> Iterator[str]:
    given = [word.value for word in call.keywords if word.arg == "dest"]
    options = [item.value for item in call.args if isinstance(item, ast.Constant)]
    if given and isinstance(given[0], ast.Constant):
        yield str(given[0].value)
    else:
        yield from [
            str(option)[2:].replace("-", "_") for option in options if str(option).startswith("--")
        ][:1]


def read_wheel(path: Path) -> Fields:
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if re.fullmatch(CONFIGURATIONS, name)]
        return core_fields(wheel.read(name).decode() for name in names)


def read_installed(package: Path) -> Fields:
    """package: the directory of an installed megatron.core."""
    return core_fields(
        path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*config.py"))
        if "datasets" not in path.parts
    )


def releases_on_the_index() -> list[str]:
    listed = _run(sys.executable, "-m", "pip", "index", "versions", "megatron-core")
    found = re.search(r"Available versions: (.*)", listed)
    return [
        version for version in (found[1].split(", ") if found else []) if order(version) >= FIRST
    ]


def download(version: str, directory: Path) -> Path:
    """The wheel for whichever Python has one."""
    for python in ("3.12", "3.11", "3.10"):
        where = directory / version
        command = [
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            python,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *command, "-d", str(where), f"megatron-core=={version}"],
            capture_output=True,
        )
        if done.returncode == 0:
            return next(where.glob("*.whl"))
    raise SystemExit(f"megatron-core {version}: no wheel")


def read_commit(checkout: Path, commit: str) -> tuple[Fields, set[str]]:
    def texts(pattern: str) -> Iterator[str]:
        for name in _run(
            "git", "-C", str(checkout), "ls-tree", "-r", "--name-only", commit
        ).splitlines():
            if re.fullmatch(pattern, name):
                yield _run("git", "-C", str(checkout), "show", f"{commit}:{name}")

    parsers = r"(?:megatron/)?(?:\w+/)?(?:arguments|argument_utils|initialize|training|\w*_?config|global_vars)\.py"
    parsers += r"|megatron/training/config/\w+\.py|megatron/training/checkpointing\.py|megatron/checkpointing\.py"
    return core_fields(texts(CONFIGURATIONS)), parser_arguments(texts(parsers))


def tags(checkout: Path) -> list[str]:
    listed = _run("git", "-C", str(checkout), "tag").split()
    return [tag for tag in listed if re.fullmatch(r"v[12]\.\d|2\d\.\d\d|core_v\d+\.\d+\.\d+", tag)]


def order(release: str) -> tuple[int, ...]:
    """A key that sorts releases by time: v1.0 to v2.6, 23.04 and 23.06, core_v0.4.0 and so on, any other commit."""
    found = re.fullmatch(r"(core_v|v)?(\d+)\.(\d+)(?:\.(\d+))?", release)
    if not found:
        return (99,)
    numbers = tuple(int(number) for number in found.groups()[1:] if number)
    return numbers if len(numbers) == 3 else (0, 0, *numbers)


def wheels() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        found = {
            version: read_wheel(download(version, Path(directory)))
            for version in releases_on_the_index()
        }
    return {"releases": sorted(found, key=order), "fields": spans(found)}


def repository(checkout: Path, commits: Sequence[str]) -> dict[str, object]:
    listed = [
        *sorted(tags(checkout), key=order),
        *(_run("git", "-C", str(checkout), "rev-parse", c)[:12] for c in commits),
    ]
    read = {commit: read_commit(checkout, commit) for commit in listed}
    fields = {commit: found for commit, (found, _) in read.items() if order(commit) >= FIRST}
    arguments = {commit: dict.fromkeys(found, "") for commit, (_, found) in read.items()}
    places = {name: places[""] for name, places in spans(arguments).items()}
    return {"commits": listed, "fields": spans(fields), "arguments": places}


def spans(found: Mapping[str, Fields]) -> dict[str, dict[str, list[str]]]:
    """Name -> default -> the first and the last release that has it."""
    result: dict[str, dict[str, list[str]]] = {}
    for release in sorted(found, key=order):
        for name, default in found[release].items():
            first, *_ = result.setdefault(name, {}).setdefault(default, [release])
            result[name][default] = [first, release]
    return result


def _text(value: object, indent: str = "") -> str:
    """JSON with a line for each name, so that a new release is a readable difference."""
    if isinstance(value, dict) and (
        len(value) > 9 or any(isinstance(item, dict) for item in value.values())
    ):
        entries = [
            f"{indent} {json.dumps(name)}: {_text(value[name], indent + ' ')}"
            for name in sorted(value)
        ]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    return json.dumps(value)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(kind: str, *rest: str) -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    known[kind] = wheels() if kind == "wheels" else repository(Path(rest[0]).expanduser(), rest[1:])
    FILE.write_text(_text(known) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
