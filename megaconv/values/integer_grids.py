"""Finds the scales of groups that come from INT4, so that they become the same INT4 values again.

Each number of such a group is an integer from -8 to 7 times a scale, rounded to the dtype of the weight. The largest
magnitude is 1 to 8 times the scale. So there are eight quotients to try, each with its two neighbours in the dtype,
because the product was rounded. A group of other weights has more magnitudes than INT4 has, and is passed over early.
"""

from collections.abc import Callable

from formats.lazy_numpy import Booleans, Bytes, Floats, np
from formats.tensor import ITEMSIZE
from megaconv.values import rounding
from megaconv.values.smoothed import round_to

_LARGEST_CODES = (7, 8, 6, 5, 4, 3, 2, 1)
_MAGNITUDES = 9
_SAMPLE = 24
"""Elements of a group whose magnitudes are counted first: more of them than INT4 has magnitudes."""
_WORDS = {2: "uint16", 4: "uint32"}


def scales_of_grids(
    numbers: Floats, scales: Floats, dtype: str, codes: Callable[[Floats, Floats], Bytes]
) -> Floats:
    """The scales [..., 1], with that of its grid for each group [..., size] that comes from INT4.

    dtype: of scales and numbers. codes: the codes of groups with given scales, as the bytes of int8.
    """
    groups = numbers.reshape(-1, numbers.shape[-1])
    found = scales.reshape(-1, 1).copy()
    places = np.flatnonzero(_has_few_magnitudes(groups))
    for code in _LARGEST_CODES:
        for step in (0, -1, 1):
            if not places.size:
                return found.reshape(scales.shape)
            tried = groups[places]
            scale = _neighbours(np.abs(tried).max(axis=1, keepdims=True) / code, dtype, step)
            with np.errstate(over="ignore"):
                products = codes(tried, scale).view(np.int8) * scale
            is_grid = (round_to(products, dtype) == tried).all(axis=1)
            found[places[is_grid]] = scale[is_grid]
            places = places[~is_grid]
    return found.reshape(scales.shape)


def _has_few_magnitudes(groups: Floats) -> Booleans:
    """True for each group that isn't zero, and whose first elements have no more magnitudes than INT4."""
    ordered = np.sort(np.abs(groups[:, :_SAMPLE]), axis=1)
    count = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    found: Booleans = (count <= _MAGNITUDES) & groups.any(axis=1)
    return found


def _neighbours(scales: Floats, dtype: str, step: int) -> Floats:
    """The number of the dtype that is so many steps away from each scale; 1 where this is no positive number."""
    stored = rounding.rounded(np.ascontiguousarray(scales), dtype).reshape(-1)
    words = stored.view(_WORDS[ITEMSIZE[dtype]])
    moved = (words + words.dtype.type(step % (1 << 8 * words.itemsize))).view(np.uint8)
    found = rounding.exact(moved, dtype).astype(np.float32).reshape(scales.shape)
    is_scale = np.isfinite(found) & (found > 0)
    return np.where(is_scale, found, np.float32(1))
