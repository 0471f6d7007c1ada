"""Limits of outputs in which one tensor holds all experts of a layer."""

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig


def require_stackable(config: ModelConfig, remedy: str) -> None:
    """Raise NotExpressible for a model with stored matrices of experts that compute nothing. remedy: ends the message.

    The tensor of all experts has rows for them, but only of zeros: megaconv leaves these rows out when it reads such files.
    """
    if config.has("stored_idle"):
        raise NotExpressible(
            f"the files hold matrices of experts that compute nothing, which a tensor of all experts would lose; {remedy}"
        )
