"""The blend of a method of `--average`."""

from collections.abc import Sequence

from formats.tensor import LazyTensor
from megaconv.options.averaging import AT_RANDOM, ELECTING, LINEAR, SLERP, TIES, AverageMethod
from megaconv.values.blends import Arc, Blend, WeightedSum
from megaconv.values.differences import Differences, LargestElements, RandomElements, Trim


def blend_of(
    chosen: AverageMethod, shares: Sequence[float], tensors: Sequence[LazyTensor], name: str
) -> Blend:
    """Return the blend of one tensor.

    shares: of all tensors; for a method of differences, of all but the first. name: the tensor's name.
    """
    if chosen.method == LINEAR:
        return WeightedSum(shares)
    if chosen.method == SLERP:
        return Arc(tensors, shares[1])
    return Differences(
        shares,
        _trim(chosen, tensors, name),
        elects=chosen.method in ELECTING,
        averages=chosen.method == TIES,
    )


def _trim(chosen: AverageMethod, tensors: Sequence[LazyTensor], name: str) -> Trim:
    assert chosen.density is not None, "a method of differences has a density"
    if chosen.method in AT_RANDOM:
        return RandomElements(name, chosen.density, chosen.seed)
    return LargestElements(tensors, chosen.density)
