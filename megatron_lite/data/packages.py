"""Packages of the extra `data`, imported only where they are needed."""

import importlib
from typing import Any

from megaconv.errors import UsageError
from megaconv.extras import install


def package(name: str, why: str) -> Any:
    """Return the module. Raises UsageError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name != top:
            raise
        raise UsageError(f"{why} needs the package {top}; {install('data')}") from None
