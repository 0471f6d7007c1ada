"""Recipes: YAML files of settings for common models, in `megatron_lite/recipes/`. Their first line is a comment that describes them."""

import difflib
from importlib.resources import files
from pathlib import Path

from megaconv.errors import UsageError

DIRECTORY = Path(str(files("megatron_lite"))) / "recipes"


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the file of a recipe. Raises UsageError for an unknown name."""
    path = DIRECTORY / f"{name}.yaml"
    if name in names():
        return path
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UsageError(f"--recipe {name}: unknown; {hint}`megatron-lite recipes` lists them")


def description(name: str) -> str:
    """Return the first line of a recipe, without the comment sign."""
    first, _, _ = recipe_path(name).read_text(encoding="utf-8").partition("\n")
    return first.removeprefix("#").strip()
