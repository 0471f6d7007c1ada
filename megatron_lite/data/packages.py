"""Packages that are installed with the extra `data` only, and imported where they are needed."""

import importlib
from typing import Any

from megaconv.errors import UsageError


def package(name: str, why: str) -> Any:
    """The module. Raises UsageError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name != top:
            raise
        raise UsageError(f"{why} needs the package {top}: pip install 'megaconv[data]'") from None
