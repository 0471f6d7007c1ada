"""The API reference as pages, of docstrings: `make docs` writes it to build/docs. Ends with status 1 where one is missing.

python docs/build_reference.py [DIRECTORY]
"""

import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import megaconv

MODULES = (
    *("megaconv", "megaconv.checkpoint", "megaconv.errors", "megaconv.options", "megaconv.model.ir"),
    *("megaconv.engine.plan", "formats.tensor", "formats.output"),
)
"""What a Python user calls and catches, and what a plug-in is written with."""


def undocumented() -> list[str]:
    """Public functions, classes, their methods and properties without a docstring of their own, by dotted name."""
    return sorted({name for module in MODULES for name in _undocumented_of(module)})


def _undocumented_of(module: str) -> Iterator[str]:
    imported = importlib.import_module(module)
    if not imported.__doc__:
        yield module
    described = {name for kind in vars(imported).values() if inspect.isclass(kind) for name in _described(kind)}
    for name in getattr(imported, "__all__", [name for name in vars(imported) if not name.startswith("_")]):
        value = getattr(imported, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        is_own = module == "megaconv" or value.__module__ == module
        if is_own and not value.__doc__:
            yield f"{module}.{name}"
        if is_own and inspect.isclass(value):
            yield from (f"{module}.{name}.{inner}" for inner in _members(value) - described)


def _described(kind: type) -> set[str]:
    """Members with a docstring: a protocol's are not described again by each class that has them."""
    return {name for name in _members(kind) if vars(kind)[name].__doc__}


def _members(kind: type) -> set[str]:
    """Public functions and properties that a class defines itself."""
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    return {name for name, value in vars(kind).items() if isinstance(value, kinds) and not name.startswith("_")}


def build(directory: Path) -> None:
    """Raises Warning for a reference that leads nowhere."""
    import pdoc

    for name in megaconv.__all__:  # they are found at first use, which pdoc doesn't know
        vars(megaconv)[name] = getattr(megaconv, name)
    pdoc.render.configure(docformat="markdown", search=True, show_source=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found .* in .*__all__")
        pages = [module for module in MODULES if module.removeprefix("megaconv.") not in megaconv.__all__]
        pdoc.pdoc(*pages, output_directory=directory)


if __name__ == "__main__":
    missing = undocumented()
    if missing:
        sys.exit("without a docstring: " + ", ".join(missing))
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/docs"))
