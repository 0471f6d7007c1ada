"""The architecture: imports point one way, nothing is unpickled or evaluated, and torch stays out until it is needed."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("formats", "megaconv", "loaders", "savers", "megatron_lite")
CONVERTER = PACKAGES[:4]

MAY_IMPORT = {
    "formats": {"formats"},
    "megaconv": {"megaconv", "formats"},
    "loaders": {"megaconv", "formats"},
    "savers": {"megaconv", "formats"},
    "megatron_lite": {"megatron_lite", "megaconv", "formats"},
}
"""The packages of ours that each package may import. Loaders and savers don't even import each other."""

ROOMS = {
    "megaconv": (
        ("megaconv", "megaconv.__main__", "megaconv.api", "megaconv.called", "megaconv.checkpoint"),
        ("megaconv.commands.cli",),
        ("megaconv.serving", "megaconv.patches"),
        ("megaconv.commands",),
        ("megaconv.megatron.distributed",),
        ("megaconv.megatron.rank_files",),
        ("megaconv.megatron.optimizer",),
        ("megaconv.pytorch",),
        ("megaconv.megatron.arguments",),
        ("megaconv.megatron.states",),
        ("megaconv.engine",),
        ("megaconv.registry", "megaconv.next_steps", "megaconv.input"),
        ("megaconv.adapters", "megaconv.gguf", "megaconv.mlx", "megaconv.trtllm"),
        ("megaconv.huggingface",),
        ("megaconv.values",),
        ("megaconv.planning",),
        ("megaconv.drafting",),
        ("megaconv.families",),
        ("megaconv.options",),
        ("megaconv.model",),
        ("megaconv.signatures",),
        (
            "megaconv.best_iteration",
            "megaconv.hub",
            "megaconv.hub_headers",
            "megaconv.hub_settings",
            "megaconv.store_inputs",
            "megaconv.local_paths",
            "megaconv.plugins",
            "megaconv.loader",
            "megaconv.saver",
            "megaconv.errors",
            "megaconv.json_text",
            "megaconv.terminal",
            "megaconv.threads",
            "megaconv.extras",
            "megaconv._version",
            "megaconv.own_packages",
        ),
    ),
    "megatron_lite": (
        ("megatron_lite", "megatron_lite.__main__", "megatron_lite.cli"),
        ("megatron_lite.commands",),
        ("megatron_lite.inference",),
        ("megatron_lite.forward",),
        ("megatron_lite.loop",),
        ("megatron_lite.planning",),
        ("megatron_lite.objectives",),
        (
            "megatron_lite.inference.adapters",
            "megatron_lite.inference.answer",
            "megatron_lite.inference.batching",
            "megatron_lite.inference.beams",
            "megatron_lite.inference.cache",
            "megatron_lite.inference.drafting_model",
            "megatron_lite.inference.free_slots",
            "megatron_lite.inference.gallery",
            "megatron_lite.inference.generation_config",
            "megatron_lite.inference.grammar",
            "megatron_lite.inference.harmony",
            "megatron_lite.inference.image_tokens",
            "megatron_lite.inference.model",
            "megatron_lite.inference.prompts",
            "megatron_lite.inference.requests",
            "megatron_lite.inference.row_vectors",
            "megatron_lite.inference.rows_together",
            "megatron_lite.inference.running_row",
            "megatron_lite.inference.sampling",
            "megatron_lite.inference.shown_images",
            "megatron_lite.inference.slots",
            "megatron_lite.inference.text",
            "megatron_lite.inference.turns",
        ),
        ("megatron_lite.checkpoint",),
        ("megatron_lite.engine",),
        ("megatron_lite.rank",),
        ("megatron_lite.optimizer",),
        ("megatron_lite.models",),
        ("megatron_lite.parallel",),
        ("megatron_lite.products",),
        ("megatron_lite.retrieval",),
        ("megatron_lite.data",),
        ("megatron_lite.processes",),
        ("megatron_lite.settings",),
    ),
}
"""The rooms of each package from top to bottom. A module imports only from its own row and from the rows below it."""

FAMILIES = "megaconv.families"
PARTS = f"{FAMILIES}.parts"
FAMILY_LEVELS = 3
"""A family may be a small difference from another one, which may be a small difference from a third."""

FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "code",
    "codeop",
    "runpy",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


class Import(NamedTuple):
    module: str
    line: int
    eager: bool
    """True if the import happens when the importing module is imported."""


def modules(*packages: str) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield (
                ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"),
                path,
            )


@cache
def imports(name: str, path: Path) -> tuple[Import, ...]:
    """Read once: nearly every test here asks for the imports of nearly every module."""
    return tuple(imports_of(path))


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node, eager in statements(tree, eager=True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, eager)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            module = str(node.module)
            for alias in node.names:  # `from package import module` imports the module too
                inner = f"{module}.{alias.name}"
                yield Import(inner if is_module(inner) else module, node.lineno, eager)


def statements(block: ast.AST, *, eager: bool) -> Iterator[tuple[ast.AST, bool]]:
    """(statement, whether it runs on import): functions and `if TYPE_CHECKING` don't. Expressions import nothing."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(block, part, ()):
            yield node, eager
            yield from statements(node, eager=eager and not is_deferred(node))


def is_deferred(node: ast.AST) -> bool:
    """Whether what is inside a statement runs later than the statement itself, or never."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def top(module: str) -> str:
    return module.partition(".")[0]


def fail_at(found: list[str]) -> None:
    """Each entry starts with FILE:LINE, which terminals and editors follow."""
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def room(package: str, name: str) -> int:
    """The number of a module's row in ROOMS; packages reach as far down as they go, single modules don't.

    The longest name decides, so that modules of a package may have a row below it.
    """
    fitting = {
        member: row
        for row, members in enumerate(ROOMS[package])
        for member in members
        if name == member or (member != package and name.startswith(member + "."))
    }
    return fitting[max(fitting, key=len)]


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_what_lies_below_them(package: str) -> None:
    fail_at(
        [
            f"{path}:{item.line}: {name} imports {item.module}, which lies above it"
            for name, path in modules(package)
            if name != "megaconv.megatron"
            for item in imports(name, path)
            if item.eager and top(item.module) == package and is_module(item.module)
            if item.module not in (package, "megaconv.megatron")
            if room(package, item.module) < room(package, name)
        ]
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    fail_at(
        [
            f"{path}:{item.line}: {name} imports {item.module}; {package} may import {', '.join(sorted(MAY_IMPORT[package]))}"
            for name, path in modules(package)
            for item in imports(name, path)
            if top(item.module) in PACKAGES and top(item.module) not in MAY_IMPORT[package]
        ]
    )


def test_the_converter_finds_loaders_and_savers_by_name_only() -> None:
    """Not by importlib with a literal name either, except in the registry."""
    fail_at(
        [
            f"{path}:{node.lineno}: names {node.value!r}; only the registry knows loaders and savers"
            for name, path in modules("megaconv", "formats")
            if name != "megaconv.registry"
            if re.search(r"(loaders|savers)\.", text := path.read_text(encoding="utf-8"))
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("loaders.", "savers."))
        ]
    )


def test_parts_of_families_import_no_family() -> None:
    """Not for types either: parts hold what families share, and know nothing about families."""
    fail_at(
        [
            f"{path}:{item.line}: {name} imports {item.module}; move what they share to {PARTS}"
            for name, path in modules("megaconv")
            if is_inside(name, PARTS)
            for item in imports(name, path)
            if is_inside(item.module, FAMILIES) and not is_inside(item.module, PARTS)
        ]
    )


def test_families_stand_on_few_levels() -> None:
    """Families that share something take it from parts, not from each other."""
    bases = {
        name: set(other_families(name, path))
        for name, path in modules("megaconv")
        if is_family(name)
    }
    assert bases
    fail_at(
        [
            f"{ROOT.joinpath(*name.split('.'))}.py:1: stands on level {level(name, bases)} of families"
            for name in bases
            if level(name, bases) > FAMILY_LEVELS
        ]
    )


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def is_family(module: str) -> bool:
    return module.startswith(f"{FAMILIES}.") and not is_inside(module, PARTS)


def other_families(name: str, path: Path) -> Iterator[str]:
    """The families that a family imports."""
    for item in imports(name, path):
        if is_family(item.module) and is_module(item.module):
            yield item.module


def level(family: str, bases: dict[str, set[str]]) -> int:
    """1 for a family that imports no other family."""
    return 1 + max((level(base, bases) for base in bases[family]), default=0)


def test_levels_are_counted() -> None:
    bases: dict[str, set[str]] = {"a": set(), "b": {"a"}, "c": {"a", "b"}}
    assert [level(name, bases) for name in bases] == [1, 2, 3]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither when they are imported, nor later in a function, nor for types alone (`if TYPE_CHECKING`)."""
    files = dict(modules(*PACKAGES))
    edges = {
        name: {
            item.module: item.line
            for item in imports(name, path)
            if item.module in files and item.module != name
        }
        for name, path in files.items()
    }
    fail_at(
        [
            " -> ".join(f"{files[name]}:{edges[name][after]}" for name, after in circle)
            for circle in circles(edges)
        ]
    )


def circles(edges: dict[str, dict[str, int]]) -> Iterator[list[tuple[str, str]]]:
    """Each circle once, as (module, the next one)."""
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> Iterator[list[tuple[str, str]]]:
        if name in trail:
            circle = [*trail[trail.index(name) :], name]
            yield list(pairwise(circle))
        elif name not in done:
            for other in edges[name]:
                yield from walk(other, [*trail, name])
            done.add(name)

    for name in edges:
        yield from walk(name, [])


def test_circles_are_found() -> None:
    edges = {"a": {"b": 1}, "b": {"c": 2, "d": 3}, "c": {"a": 4}, "d": {}}
    assert list(circles(edges)) == [[("a", "b"), ("b", "c"), ("c", "a")]]
    assert list(circles({"a": {"b": 1, "c": 1}, "b": {"c": 1}, "c": {}})) == []


HEAVY = {
    "cryptography",
    "sigstore",
    "boto3",
    "botocore",
    "torch",
    "safetensors",
    "transformers",
    "huggingface_hub",
    "tokenizers",
    "rich",
}


def test_heavy_modules_are_imported_only_inside_functions() -> None:
    fail_at(
        [
            f"{path}:{item.line}: {name} imports {item.module} when it is imported itself; import it in the function that needs it"
            for name, path in modules(*CONVERTER)
            for item in imports(name, path)
            if item.eager and top(item.module) in HEAVY and name != "megaconv.commands.bar"
        ]
    )


def test_megatron_is_never_imported() -> None:
    fail_at(
        [
            f"{path}:{item.line}: {name} imports {item.module}"
            for name, path in modules(*CONVERTER)
            for item in imports(name, path)
            if top(item.module) in {"megatron", "apex", "transformer_engine"}
        ]
    )


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = [
        f"{path}:{item.line}: {name} imports {item.module}"
        for name, path in modules(*CONVERTER)
        for item in imports(name, path)
        if top(item.module) in FORBIDDEN_MODULES
    ]
    fail_at(
        found
        + [
            f"{path}:{node.lineno}: {name} calls {ast.unparse(node.func)}"
            for name, path in modules(*CONVERTER)
            for node in dangerous(path)
        ]
    )


def dangerous(path: Path) -> Iterator[ast.Call]:
    """Calls that run code from data, or let torch or numpy unpickle."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        unpickles = any(word.arg == "allow_pickle" for word in node.keywords)
        if (
            called in FORBIDDEN_CALLS
            or called in ("torch.load", "os.system")
            or unpickles
            or any(word.arg == "shell" for word in node.keywords)
        ):
            yield node


def dotted(node: ast.expr) -> str:
    """`a.b` of such a name; "" of any other expression. Much quicker than ast.unparse."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


@pytest.mark.parametrize("package", ["formats", "loaders", "savers"])
def test_the_package_itself_is_only_a_docstring(package: str) -> None:
    """Another distribution called `formats` overwrites this one file, and nothing else."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_every_module_says_what_it_is_for() -> None:
    fail_at(
        [
            f"{path}:1: has no docstring"
            for _, path in modules(*CONVERTER)
            if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        ]
    )


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
    fail_at(
        [f"{path}:1: is called {path.stem}" for _, path in modules(*PACKAGES) if path.stem in vague]
    )
