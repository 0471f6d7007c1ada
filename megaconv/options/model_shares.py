"""Models to average, as users write them, and the share of each."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megaconv.errors import UsageError
from megaconv.options.averaging import ELECTING, LINEAR, OF_DIFFERENCES
from megaconv.options.values import with_number

_SLACK = 1e-6
"""The largest accepted difference of a sum of shares from 1."""


class ModelShare(NamedTuple):
    """A model to average with others."""

    place: str
    """A directory, a Hub id or a URI."""
    share: float | None = None
    """Its share of the average; None: every model has the same share."""


def model_shares(words: Iterable[str | Path | ModelShare]) -> tuple[ModelShare, ...]:
    """The models that words such as `DIR` or `DIR:0.5` name. Raises UsageError for a share that isn't a number."""
    remedy = "write MODEL or MODEL:SHARE, such as my-model:0.5"
    return tuple(
        word if isinstance(word, ModelShare) else ModelShare(*with_number(str(word), remedy))
        for word in words
    )


def divided(
    models: Sequence[ModelShare], method: str = LINEAR
) -> tuple[str, tuple[ModelShare, ...]]:
    """(the place of the first model, the other models). The first one has what the others leave of 1.

    Raises UsageError for a single model, and for shares that don't fit the method of the average.
    """
    if len(models) < 2:
        raise UsageError("expected two models or more to average")
    first, *others = models
    if first.share is not None and method in OF_DIFFERENCES:
        raise UsageError(
            f"{first.place}:{first.share:g}: with --method {method} the first model has no share; the others' differences "
            "from it are weighted"
        )
    if first.share is not None:
        total = sum(_stated(models))
        if abs(total - 1) > _SLACK:
            raise UsageError(
                f"the shares add up to {total:g}, expected 1; the first model gets the rest if it has none"
            )
    return first.place, tuple(others)


def shares_of(others: Sequence[ModelShare]) -> tuple[float, ...]:
    """The share of the first model, then those of the others. Without any, all models have the same share.

    Raises UsageError if some of the others have a share and some don't.
    """
    if all(each.share is None for each in others):
        return (1 / (len(others) + 1),) * (len(others) + 1)
    shares = _stated(others)
    return (1 - sum(shares), *shares)


def weights_of(others: Sequence[ModelShare], method: str) -> tuple[float, ...]:
    """The weight of each difference from the first model; 1 without shares.

    Raises UsageError if some have a share and some don't, and for shares that aren't above 0 where signs are elected.
    """
    if all(each.share is None for each in others):
        return (1.0,) * len(others)
    weights = _stated(others)
    for each, weight in zip(others, weights, strict=True):
        if method in ELECTING and weight <= 0:
            raise UsageError(f"{each.place}:{weight:g}: --method {method} needs shares above 0")
    return weights


def _stated(models: Sequence[ModelShare]) -> tuple[float, ...]:
    """The shares of these models. Raises UsageError for a model without one."""
    for each in models:
        if each.share is None:
            raise UsageError(
                f"{each.place}: has no share; give one to each of the models, or to none"
            )
    return tuple(each.share for each in models if each.share is not None)
