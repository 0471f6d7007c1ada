"""Norms that multiply by their weight + 1 (`--apply-layernorm-1p`), read as plain norms, for classes without such norms.

    Megatron    x * (weight + 1)        layernorm_zero_centered_gamma
    Llama       x * weight

Megatron-Bridge and NeMo convert no such Llama. The weights are read as stored minus 1, so that an output computes
weight + 1 exactly or ends with an error. The sum is exact in float32 if a 16-bit weight is 0 or at least 2^-16.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace

from megaconv.errors import UsageError
from megaconv.model.assembled import Assembled
from megaconv.model.ir import OpenedSource

OPTION, PLAIN = "norms", "plain"
_ARGUMENTS = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
_NORM, _OUT_NORM = "norm.weight", "out_norm.weight"


def is_asked(extra: Mapping[str, str], args: Namespace) -> bool:
    """True if the user wants plain norms. Raises UsageError if the option has another value, or the norms are plain."""
    asked = extra.get(OPTION)
    if asked not in (None, PLAIN):
        raise UsageError(f"--option {OPTION}={asked}: is not known; choose {PLAIN}")
    if asked is not None and not any(getattr(args, name, False) for name in _ARGUMENTS):
        raise UsageError(
            f"--option {OPTION}={PLAIN}: the norms of this checkpoint are plain already; leave it out"
        )
    return asked is not None


def without_centering(args: Namespace) -> Namespace:
    """The arguments of the same model with plain norms."""
    return Namespace(**vars(args) | dict.fromkeys(_ARGUMENTS, False))


def with_plain_norms(opened: OpenedSource) -> OpenedSource:
    """A source whose norms are marked as stored minus 1. opened: read with the arguments of `without_centering`.

    Raises UsageError for optimizer state, and if a config.json says that the model has norms of weight + 1 anyway.
    """
    header = opened.header
    if header.carries_optimizer:
        raise UsageError(
            f"--option {OPTION}={PLAIN}: optimizer state goes with norms of weight + 1; add --no-optimizer"
        )
    if header.config.norm.zero_centered:
        raise UsageError(
            f"--option {OPTION}={PLAIN}: the class {header.config.family} has norms of weight + 1 itself; leave it out"
        )
    names = (key.name for key in header.manifest)
    norms = {name for name in names if name.endswith(_NORM) and not name.endswith(_OUT_NORM)}
    shifts = {key: -1 for key in header.manifest if key.name in norms}
    by_key = {
        key: replace(tensor, shift=-1)
        if key in shifts and isinstance(tensor, Assembled)
        else tensor
        for key, tensor in opened.by_key.items()
    }
    header = replace(header, shifts={**header.shifts, **shifts}, read_otherwise=frozenset(shifts))
    return OpenedSource(header, by_key)
