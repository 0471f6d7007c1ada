"""Packages of an extra, imported only where they are needed."""

import importlib
from typing import Any

from megaconv.errors import UsageError
from megaconv.extras import install


def package(name: str, why: str, extra: str = "data") -> Any:
    """Return the module. Raises UsageError if it is not installed. extra: the extra of pyproject.toml that has it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name != top:
            raise
        raise UsageError(f"{why} needs the package {top}; {install(extra)}") from None
