"""torch, which only a few things need: the package is installed without it."""

from megaconv.errors import UsageError


def require_torch(what: str) -> None:
    """what: for the message. Raises UsageError where torch isn't installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{what} needs torch ({error}); install it with: pip install 'megaconv[torch]'") from error
