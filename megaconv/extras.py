"""Optional packages: the extras of pyproject.toml, and the message for a missing one."""

from typing import Any

from megaconv.errors import UsageError

LEAST_TRANSFORMERS = 5


def install(extras: str) -> str:
    """The instruction for a message that some extras are missing. extras: their names, such as `train,data`.

    The instruction names a clone: the name on the package index belongs to somebody else.
    """
    return f"in a clone of megaconv: pip install '.[{extras}]'"


def require_torch(what: str, extras: str = "torch") -> None:
    """Raises UsageError if torch isn't installed. what: the feature that needs torch, for the message."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{what} needs torch ({error}); {install(extras)}") from error


def require_tokenizers(what: str) -> Any:
    """The module tokenizers. Raises UsageError if it isn't installed. what: the feature that needs it, for the message."""
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(f"{what} needs tokenizers ({error}); {install('data')}") from error
    return tokenizers


def require_transformers(what: str) -> Any:
    """The module transformers. Raises UsageError without torch or transformers 5. what: the feature that needs them."""
    require_torch(what, extras="torch,data")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"{what} needs transformers ({error}); {install('data')}") from error
    version = transformers.__version__
    if int(version.partition(".")[0]) < LEAST_TRANSFORMERS:
        raise UsageError(
            f"{what} needs transformers {LEAST_TRANSFORMERS} or newer, and {version} is installed; "
            "pip install --upgrade transformers"
        )
    return transformers
