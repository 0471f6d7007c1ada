"""Imports megaconv's top-level packages `formats`, `loaders` and `savers` from beside megaconv in any program.

Python searches the program's directory first (for `python -m` and torchrun: the current directory). A project may well
have a package of the same name there.
"""

import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

NAMES = ("formats", "loaders", "savers")
_BESIDE = Path(__file__).resolve().parents[1]


def claim() -> None:
    """Import megaconv's own packages. Raises ImportError if the program has already imported others of these names.

    If the program has such packages and may still import them, this issues a warning. megaconv's own programs, started
    by `python -m`, don't warn.
    """
    hidden = [place for name in NAMES if (place := _claim(name))]
    if hidden and not _program_is_ours():
        warnings.warn(
            f"{', '.join(hidden)}: hidden by megaconv's own {', '.join(NAMES)}; rename the modules that this program imports itself",
            RuntimeWarning,
            stacklevel=3,
        )


def _program_is_ours() -> bool:
    words = sys.orig_argv
    return "-m" in words and words[words.index("-m") + 1 :][:1] in (["megaconv"], ["megatron_lite"])


def _claim(name: str) -> str | None:
    """Import one package. Returns the place of another package that Python would have found before ours, or None."""
    ours = PathFinder.find_spec(name, [str(_BESIDE)])
    if ours is None or ours.loader is None:
        return None  # an unusual installation, which has to provide the package itself
    if name in sys.modules:
        place = _place(sys.modules[name])
        if place != _origin(ours):
            raise ImportError(
                f"{place}: was imported as {name!r}, which megaconv needs for its own {_origin(ours)}; "
                "rename the former"
            )
        return None
    first = PathFinder.find_spec(name)
    module = module_from_spec(ours)
    sys.modules[name] = module
    ours.loader.exec_module(module)
    if first is None or _origin(first) == _origin(ours):
        return None
    return _origin(first)


def _place(module: ModuleType) -> str:
    return (
        _origin(module.__spec__)
        if module.__spec__
        else str(getattr(module, "__file__", None) or module)
    )


def _origin(spec: ModuleSpec) -> str:
    """The directory of a package, or the file of a module."""
    folders = list(spec.submodule_search_locations or ())
    return str(Path(folders[0] if folders else spec.origin or spec.name).resolve())
