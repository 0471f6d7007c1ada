"""The searches of ggml's quantizers: the scale, or the scale and the minimum, of least weighted squared error.

Arrays of a search are [numbers, groups] float32. The arithmetic is ggml's, in its order. Source: make_qkx2_quants,
make_qkx3_quants, make_qx_quants and make_qp_quants in ggml-quants.c of llama.cpp.
"""

from typing import NamedTuple

from formats.lazy_numpy import Booleans, Floats, np

LEAST = 1e-15
"""A group without a larger magnitude is a group of zeros."""


class PairSearch(NamedTuple):
    """The constants of a search for scale and minimum."""

    most: int
    """The largest code."""
    first: float
    """Added to the largest code in the first step."""
    steps: int
    delta: float = 0.1
    """Added to the largest code in each further step."""


def best_pair(x: Floats, weights: Floats, search: PairSearch) -> tuple[Floats, Floats, Floats]:
    """x, weights [32, groups] -> (scale, -minimum) of each group, and its codes [32, groups]. The minimum is 0 or less."""
    low = x.min(axis=0).clip(None, 0)
    high = x.max(axis=0)
    has_width = high != low
    inverse = quotient(np.float32(search.most), high - low)
    scale = inverse_of(inverse)
    codes = _codes(x, low, inverse, search.most)
    best = _squared_error(x, weights, codes, scale, low)
    for step in range(search.steps):
        added = np.float32(search.first) + np.float32(search.delta) * np.float32(step)
        width = high - low  # a better minimum changes it, as in ggml
        inverse = quotient(added + np.float32(search.most), width)
        tried = _codes(x, low, inverse, search.most)
        new_scale, new_low, is_solved = _fitted(x, weights, tried)
        error = _squared_error(x, weights, tried, new_scale, new_low)
        is_better = is_solved & (error < best) & has_width
        np.copyto(scale, new_scale, where=is_better)
        np.copyto(low, new_low, where=is_better)
        np.copyto(best, error, where=is_better)
        np.copyto(codes, tried, where=is_better)
    return scale, -low, codes


def _codes(x: Floats, low: Floats, inverse: Floats, most: int) -> Floats:
    codes: Floats = np.rint(inverse * (x - low)).clip(0, most)
    return codes


def _squared_error(x: Floats, weights: Floats, codes: Floats, scale: Floats, low: Floats) -> Floats:
    off = scale * codes + low - x
    error: Floats = (weights * (off * off)).sum(axis=0)
    return error


def _fitted(x: Floats, weights: Floats, codes: Floats) -> tuple[Floats, Floats, Booleans]:
    """(scale, minimum) of least squared error for these codes, and whether they exist. The minimum is 0 or less."""
    sum_w = weights.sum(axis=0)
    sum_x = (weights * x).sum(axis=0)
    weighted = weights * codes
    sum_l = weighted.sum(axis=0)
    sum_l2 = (weighted * codes).sum(axis=0)
    sum_xl = (weighted * x).sum(axis=0)
    determinant = sum_w * sum_l2 - sum_l * sum_l
    above_scale = sum_w * sum_xl - sum_x * sum_l
    above_low = sum_l2 * sum_x - sum_l * sum_xl
    scale = quotient(above_scale, determinant)
    low = quotient(above_low, determinant)
    without_minimum = quotient(sum_xl, sum_l2)
    np.copyto(scale, without_minimum, where=low > 0)
    return scale, low.clip(None, 0), determinant > 0


def best_scale(x: Floats, weights: Floats, most: int = 32) -> tuple[Floats, Floats]:
    """x, weights [numbers, groups] -> (the scale of each group, its codes from -most to most - 1)."""
    extreme = _extremes(x)
    codes = _signed_codes(x, np.float32(-most), extreme, most)
    sum_lx, sum_l2 = _sums(x, weights, codes)
    scale = quotient(sum_lx, sum_l2)
    best = scale * sum_lx
    for step in (*range(-9, 0), *range(1, 10)):
        width = np.float32(most) + np.float32(0.1) * np.float32(step)
        tried = _signed_codes(x, -width, extreme, most)
        sum_lx, sum_l2 = _sums(x, weights, tried)
        exceeds = sum_lx * sum_lx > best * sum_l2
        is_better = (sum_l2 > 0) & exceeds
        new_scale = quotient(sum_lx, sum_l2)
        np.copyto(scale, new_scale, where=is_better)
        np.copyto(best, new_scale * sum_lx, where=is_better)
        np.copyto(codes, tried, where=is_better)
    codes[:, extreme == 0] = -most
    return scale, codes


def _extremes(x: Floats) -> Floats:
    """x [numbers, groups] -> the number of largest magnitude of each group with its sign; 0 in a group of zeros."""
    place = np.abs(x).argmax(axis=0)
    extreme: Floats = np.take_along_axis(x, place[None], axis=0)[0]
    extreme[np.abs(extreme) < LEAST] = 0
    return extreme


def _signed_codes(x: Floats, width: "np.float32", extreme: Floats, most: int) -> Floats:
    codes: Floats = np.rint(quotient(width, extreme) * x).clip(-most, most - 1)
    return codes


def _sums(x: Floats, weights: Floats, codes: Floats) -> tuple[Floats, Floats]:
    """The weighted sums of x * code and of code^2."""
    return (weights * x * codes).sum(axis=0), (weights * codes * codes).sum(axis=0)


def best_multiples(x: Floats, weights: Floats, most: int) -> tuple[Floats, Floats]:
    """x, weights [numbers, groups], x 0 or more -> (the unit of each group, multiples of it from 0 to most)."""
    largest = x.max(axis=0)
    largest[largest < LEAST] = 0
    inverse = quotient(np.float32(most), largest)
    unit = inverse_of(inverse)
    best = _error_of_multiples(x, weights, np.rint(inverse * x), unit)
    for step in (*range(-4, 0), *range(1, 5)):
        width = np.float32(0.1) * np.float32(step) + np.float32(most)
        tried = quotient(width, largest)
        unit = inverse_of(tried)
        multiples = np.rint(tried * x).clip(None, most)
        error = _error_of_multiples(x, weights, multiples, unit)
        is_better = error < best
        np.copyto(best, error, where=is_better)
        np.copyto(inverse, tried, where=is_better)
    multiples = np.rint(inverse * x).clip(None, most)
    return _improved(x, weights, multiples, most)


def _error_of_multiples(x: Floats, weights: Floats, multiples: Floats, unit: Floats) -> Floats:
    off = x - unit * multiples
    error: Floats = (weights * off * off).sum(axis=0)
    return error


def _improved(x: Floats, weights: Floats, multiples: Floats, most: int) -> tuple[Floats, Floats]:
    """(unit, multiples) after up to five passes, which change one multiple after the other where that fits better."""
    sum_lx, sum_l2 = _sums(x, weights, multiples)
    is_changing = np.ones(x.shape[1], bool)
    for _ in range(5):
        has_changed = np.zeros(x.shape[1], bool)
        for place in range(len(x)):
            number, weight, old = x[place], weights[place], multiples[place]
            other_lx = sum_lx - weight * number * old
            other_l2 = sum_l2 - weight * old * old
            is_possible = is_changing & (other_lx > 0) & (other_l2 > 0)
            new = np.rint(quotient(number * other_l2, other_lx)).clip(None, most)
            new_lx = other_lx + weight * number * new
            new_l2 = other_l2 + weight * new * new
            is_better = new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            takes = is_possible & (new != old) & is_better
            np.copyto(old, new, where=takes)
            np.copyto(sum_lx, new_lx, where=takes)
            np.copyto(sum_l2, new_l2, where=takes)
            has_changed |= takes
        is_changing &= has_changed
    return quotient(sum_lx, sum_l2), multiples


def quotient(dividend: "Floats | np.float32", divisor: Floats) -> Floats:
    """dividend / divisor, and 0 where the divisor is 0."""
    is_zero = divisor == 0
    safe: Floats = np.where(is_zero, np.float32(1), divisor)
    quotient: Floats = np.divide(dividend, safe, dtype=np.float32)
    return np.where(is_zero, np.float32(0), quotient)


def inverse_of(numbers: Floats) -> Floats:
    """1 / x, and 0 for 0."""
    return quotient(np.float32(1), numbers)
