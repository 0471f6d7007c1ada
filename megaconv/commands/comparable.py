"""Refuses comparisons that say nothing about weights: of names that can't match, and of numbers in stored words."""

import logging

from megaconv.errors import UnsupportedInput
from megaconv.model.ir import Header
from megaconv.model.own_names import OwnNames
from megaconv.model.shared_names import require_shared_names

_log = logging.getLogger("megaconv")


def require_same_names(left: Header, right: Header) -> None:
    """Raise UnknownFamily if only one of two models has a family, because their names can't match.

    A warning says that words are compared, if weights of both have a quantization that isn't read.
    """
    require_shared_names("A", left, "B", right)
    stored = _quantized(left, right)
    if stored is not None:
        _log.warning("the stored words are compared, not weights: %s", stored.why)


def require_weights(option: str, left: Header, right: Header) -> None:
    """Raise UnsupportedInput for an option that compares numbers, if the weights of a model aren't read."""
    stored = _quantized(left, right)
    if stored is not None:
        raise UnsupportedInput(f"{option}: compares the numbers of weights; {stored.reason}")


def _quantized(left: Header, right: Header) -> OwnNames | None:
    """The first model whose weights have a quantization that isn't read."""
    models = (left.config.own_names, right.config.own_names)
    return next((each for each in models if each is not None and each.stays_quantized), None)
