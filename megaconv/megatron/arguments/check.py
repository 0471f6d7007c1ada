"""Refuses Megatron's arguments that change a model's computation and that megaconv doesn't read."""

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from formats.wording import listing
from megaconv.errors import UnknownFamily
from megaconv.megatron.arguments.encoder import sees_both_ways
from megaconv.megatron.arguments.harmless import HARMLESS
from megaconv.megatron.arguments.known import LIMITED, READ, REFUSED, Limit
from megaconv.megatron.arguments.swift import OF_RUN, is_of_swift

_log = logging.getLogger("megaconv")

_KNOWN = READ.union(REFUSED, *HARMLESS.values())


def check_arguments(args: Namespace, found: Mapping[str, Any], *, legacy: bool = False) -> None:
    """Check all arguments. Warns once about enabled arguments that no release of Megatron has, and about dropped tokens.

    found: fields of the configuration that the tensors show. legacy: True for a model from before Megatron core.
    Raises UnknownFamily for a value that would be lost, with the argument's name, the value, and the expected values.
    """
    _check_old_positions(args, found)
    present = set(_present(args, found, legacy))
    for name, limit in {**LIMITED, **REFUSED}.items():
        value = getattr(args, name, None)
        if (not limit.only or limit.only in present) and not _is_accepted(value, limit):
            raise UnknownFamily(
                f"the checkpoint's {name} is {value!r:.100} ({limit.computes}), which no supported model family has; "
                f"expected {_expected(limit)}"
            )
    if "experts" in present:
        _tell_of_dropped_tokens(args)
    of_swift = is_of_swift(args)
    known = _KNOWN | OF_RUN if of_swift else _KNOWN
    unknown = sorted(
        name for name, value in vars(args).items() if name not in known and not _is_off(value)
    )
    if unknown:
        _log.warning(
            "the checkpoint's args have %s, %s; their effect on the model is not converted",
            listing(unknown),
            "which may change ms-swift's model beyond its config.json"
            if of_swift
            else "which no known release of Megatron has",
        )


def _present(args: Namespace, found: Mapping[str, Any], legacy: bool) -> Iterator[str]:
    """The conditions of Limit.only that this model meets."""
    if found.get("experts.count"):
        yield "experts"
    if not getattr(args, "swiglu", True):
        yield "gelu"
    if not (legacy and sees_both_ways(found)):
        # Only the legacy BERT can take its residuals after the norm.
        yield "residuals of core"


def _tell_of_dropped_tokens(args: Namespace) -> None:
    """Warn if the run's experts drop tokens: which ones depends on the microbatch, so no other software computes the same."""
    factor = vars(args).get("moe_expert_capacity_factor")
    if isinstance(factor, (int, float)) and factor > 0:
        _log.warning(
            "the checkpoint's moe_expert_capacity_factor is %s: its experts drop tokens beyond their capacity; Hugging Face's "
            "models drop none",
            factor,
        )


def _is_accepted(value: object, limit: Limit) -> bool:
    """True if the limit allows the value. Objects from a pickle are never allowed."""
    if isinstance(value, (list, tuple)):
        return all(_is_accepted(item, limit) for item in value)
    return isinstance(value, (type(None), bool, int, float, str)) and value in limit.accepted


def _is_off(value: object) -> bool:
    return value is None or (
        isinstance(value, (bool, int, float, str, list, tuple, dict)) and not value
    )


def _expected(limit: Limit) -> str:
    # The values that users write come first, None last.
    values = sorted(limit.accepted, key=lambda value: value is None)
    return ("one of " if len(values) > 1 else "") + listing([repr(value) for value in values])


def _check_old_positions(args: Namespace, found: Mapping[str, Any]) -> None:
    """Check the positions of arguments before core 0.4, which chose position tables and rotary positions independently.

    Both at once, or neither of them, is refused.
    """
    if hasattr(args, "position_embedding_type") or not hasattr(
        args, "use_rotary_position_embeddings"
    ):
        return
    table = found.get("positions.kind") == "learned"
    rotary = bool(args.use_rotary_position_embeddings)
    if table == rotary:
        raise UnknownFamily(
            f"the checkpoint's use_rotary_position_embeddings is {rotary}, and its tensors have {'a' if table else 'no'} "
            "table of positions; expected one of both"
        )
