"""Quantizes numbers to blocks of ggml's types, as ggml's reference code without an importance matrix.

    q4_0    d = the number of largest magnitude / -8; code = x / d + 8.5, rounded down
    q8_0    d = max |x| / 127; code = x / d, halves away from zero
    q4_k    for each 32: of 21 pairs of scale and minimum, the pair of least squared error, weighted with sqrt(mean x^2) + |x|
    q5_k    the same with 5 bits and 16 pairs
    q6_k    for each 16: of 19 scales, the one of least squared error, weighted with x^2

The arithmetic is ggml's in float32, in its order, so that blocks have the same bytes as those of a ggml compiled without
fused multiply-add. Arrays of a search are [numbers, groups]. Source: ggml-quants.c of llama.cpp (quantize_row_q4_K_ref and the like).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from formats.lazy_numpy import Booleans, Floats, np
from formats.tensor import Bytes

_LEAST = 1e-15
"""A group without a larger magnitude is a group of zeros."""


def q4_0(blocks: Floats) -> Bytes:
    """[blocks, 32] float32 -> [blocks, 18] bytes."""
    place = np.abs(blocks).argmax(axis=1)[:, None]
    scale = np.take_along_axis(blocks, place, axis=1) / np.float32(-8)
    codes = np.trunc(blocks * _inverse(scale) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    return np.concatenate([_half(scale), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def q8_0(blocks: Floats) -> Bytes:
    """[blocks, 32] float32 -> [blocks, 34] bytes."""
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return np.concatenate([_half(scale), rounded.astype(np.int8).view(np.uint8)], axis=1)


class _Search(NamedTuple):
    """The constants of a search for scale and minimum."""

    most: int
    """The largest code."""
    first: float
    """Added to the largest code in the first step. Each further step adds 0.1 more."""
    steps: int


_Q4_K, _Q5_K = _Search(15, -1.0, 21), _Search(31, -0.5, 16)


def q4_k(blocks: Floats) -> Bytes:
    """[blocks, 256] float32 -> [blocks, 144] bytes."""
    head, codes = _scaled_with_minima(blocks, _Q4_K)
    return np.concatenate([head, _packed_nibbles(codes)], axis=1)


def q5_k(blocks: Floats) -> Bytes:
    """[blocks, 256] float32 -> [blocks, 176] bytes."""
    head, codes = _scaled_with_minima(blocks, _Q5_K)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = np.bitwise_or.reduce((codes >> 4) << shifts, axis=1)
    return np.concatenate([head, fifth, _packed_nibbles(codes & np.uint8(15))], axis=1)


def q6_k(blocks: Floats) -> Bytes:
    """[blocks, 256] float32 -> [blocks, 210] bytes."""
    groups = blocks.reshape(-1, 16)
    by_group = np.ascontiguousarray(groups.T)
    scales, searched = _best_scale(by_group)
    unit, stored, is_zero = _in_eight_bits(scales.reshape(-1, 16))
    multiples = stored.astype(np.float32)
    steps = _read_half(unit) * multiples
    signed = _rounded(groups, steps.reshape(-1, 1), searched.T, -32, 31)
    codes = signed.reshape(-1, 256) + np.float32(32)
    codes[is_zero[:, 0]] = 0  # a block of zeros has bytes of zero only
    low, high = _packed_six_bits(codes.astype(np.uint8))
    parts = (low, high, stored.view(np.uint8), unit)
    return np.concatenate(parts, axis=1)


def _rounded(numbers: Floats, steps: Floats, searched: Floats, least: int, most: int) -> Floats:
    """The codes of numbers for steps that were rounded.

    A group whose step became zero keeps the codes of the search, which then stand for nothing.
    """
    quotients = _quotient(numbers, steps)
    codes = np.rint(quotients).clip(least, most)
    return np.where(steps == 0, searched, codes)


def _in_eight_bits(scales: Floats) -> tuple[Bytes, "np.ndarray[Any, np.dtype[np.int8]]", Booleans]:
    """(float16 unit of each block as bytes, signed multiples of the unit [blocks, 16], True for blocks of zeros)."""
    place = np.abs(scales).argmax(axis=1)[:, None]
    largest = np.take_along_axis(scales, place, axis=1)
    is_zero = np.abs(largest) < _LEAST
    largest[is_zero] = 0
    inverse = _quotient(np.float32(-128), largest)
    multiples = np.rint(inverse * scales)
    stored = multiples.clip(-128, 127).astype(np.int8)
    return _half(_inverse(inverse)), stored, is_zero


def _packed_six_bits(codes: Bytes) -> tuple[Bytes, Bytes]:
    """[blocks, 256] codes -> (low four bits [blocks, 128], high two bits [blocks, 64]), as ggml interleaves them."""
    quarters = codes.reshape(-1, 2, 4, 32)
    four_bits = quarters & np.uint8(15)
    low = four_bits[:, :, :2] | four_bits[:, :, 2:] << np.uint8(4)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce((quarters >> np.uint8(4)) << shifts, axis=2)
    return low.reshape(-1, 128), high.reshape(-1, 64)


QUANTIZERS: Mapping[str, Callable[[Floats], Bytes]] = {
    "q4_0": q4_0,
    "q8_0": q8_0,
    "q4_k": q4_k,
    "q5_k": q5_k,
    "q6_k": q6_k,
}
"""Type -> the function from [blocks, numbers] float32 to [blocks, bytes]."""


def _scaled_with_minima(blocks: Floats, search: _Search) -> tuple[Bytes, Bytes]:
    """(scales and minima of all blocks [blocks, 16], codes [blocks, 8, 32])."""
    groups = blocks.reshape(-1, 32)
    by_group = np.ascontiguousarray(groups.T)
    found, offsets, searched = _best_pair(by_group, search)
    d, scales = _in_six_bits(found.reshape(-1, 8))
    m, minima = _in_six_bits(offsets.reshape(-1, 8))
    steps = _read_half(d) * scales
    stored_offsets = _read_half(m) * minima
    moved = groups + stored_offsets.reshape(-1, 1)
    codes = _rounded(moved, steps.reshape(-1, 1), searched.T, 0, search.most)
    packed = _packed_scales(scales.astype(np.uint8), minima.astype(np.uint8))
    head = np.concatenate([d, m, packed], axis=1)
    return head, codes.reshape(-1, 8, 32).astype(np.uint8)


def _in_six_bits(numbers: Floats) -> tuple[Bytes, Floats]:
    """(float16 unit of each block as bytes, multiples of the unit [blocks, 8] from 0 to 63)."""
    largest = numbers.max(axis=1, keepdims=True).clip(0)
    inverse = _quotient(np.float32(63), largest)
    return _half(largest / np.float32(63)), np.rint(inverse * numbers).clip(0, 63)


def _packed_scales(scales: Bytes, minima: Bytes) -> Bytes:
    """Two of [blocks, 8] numbers of 6 bits -> [blocks, 12] bytes; see ggml_blocks.scales_and_minima."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


def _packed_nibbles(codes: Bytes) -> Bytes:
    """[blocks, 8, 32] codes of 4 bits -> [blocks, 128] bytes: groups 2i and 2i + 1 share 32 bytes."""
    packed: Bytes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return packed.reshape(-1, 128)


def _best_pair(x: Floats, search: _Search) -> tuple[Floats, Floats, Floats]:
    """x [32, groups] -> (scale, -minimum) of each group, and its codes [32, groups]. The minimum is 0 or less."""
    magnitude = np.sqrt((x * x).sum(axis=0) / np.float32(32))
    weights = magnitude + np.abs(x)
    low, high = x.min(axis=0).clip(None, 0), x.max(axis=0)
    is_flat = high == low
    inverse = _quotient(np.float32(search.most), high - low)
    scale, codes = _inverse(inverse), _codes(x, low, inverse, search.most)
    best = _squared_error(x, weights, codes, scale, low)
    for step in range(search.steps):
        width = np.float32(search.first) + np.float32(0.1) * np.float32(step)
        inverse = _quotient(width + np.float32(search.most), high - low)
        tried = _codes(x, low, inverse, search.most)
        new_scale, new_low, is_solved = _fitted(x, weights, tried)
        error = _squared_error(x, weights, tried, new_scale, new_low)
        is_better = is_solved & (error < best) & ~is_flat
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
    sum_w, sum_x = weights.sum(axis=0), (weights * x).sum(axis=0)
    weighted = weights * codes
    sum_l = weighted.sum(axis=0)
    sum_l2 = (weighted * codes).sum(axis=0)
    sum_xl = (weighted * x).sum(axis=0)
    determinant = sum_w * sum_l2 - sum_l * sum_l
    scale = _quotient(sum_w * sum_xl - sum_x * sum_l, determinant)
    low = _quotient(sum_l2 * sum_x - sum_l * sum_xl, determinant)
    without_minimum = _quotient(sum_xl, sum_l2)
    np.copyto(scale, without_minimum, where=low > 0)
    return scale, low.clip(None, 0), determinant > 0


def _best_scale(x: Floats) -> tuple[Floats, Floats]:
    """x [16, groups] -> (the scale of each group, its codes [16, groups] from -32 to 31)."""
    place = np.abs(x).argmax(axis=0)[None]
    extreme = np.take_along_axis(x, place, axis=0)[0]
    extreme[np.abs(extreme) < _LEAST] = 0
    weights = x * x
    codes = _signed_codes(x, np.float32(-32), extreme)
    sum_lx, sum_l2 = _sums(x, weights, codes)
    scale = _quotient(sum_lx, sum_l2)
    best = scale * sum_lx
    for step in (*range(-9, 0), *range(1, 10)):
        width = np.float32(32) + np.float32(0.1) * np.float32(step)
        tried = _signed_codes(x, -width, extreme)
        sum_lx, sum_l2 = _sums(x, weights, tried)
        is_better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        new_scale = _quotient(sum_lx, sum_l2)
        np.copyto(scale, new_scale, where=is_better)
        np.copyto(best, new_scale * sum_lx, where=is_better)
        np.copyto(codes, tried, where=is_better)
    codes[:, extreme == 0] = -32
    return scale, codes


def _signed_codes(x: Floats, width: "np.float32", extreme: Floats) -> Floats:
    codes: Floats = np.rint(_quotient(width, extreme) * x).clip(-32, 31)
    return codes


def _sums(x: Floats, weights: Floats, codes: Floats) -> tuple[Floats, Floats]:
    """The weighted sums of x * code and of code^2."""
    return (weights * x * codes).sum(axis=0), (weights * codes * codes).sum(axis=0)


def _quotient(dividend: "Floats | np.float32", divisor: Floats) -> Floats:
    """dividend / divisor, and 0 where the divisor is 0."""
    is_zero = divisor == 0
    safe: Floats = np.where(is_zero, np.float32(1), divisor)
    quotient: Floats = np.divide(dividend, safe, dtype=np.float32)
    return np.where(is_zero, np.float32(0), quotient)


def _inverse(numbers: Floats) -> Floats:
    """1 / x, and 0 for 0."""
    return _quotient(np.float32(1), numbers)


def _half(numbers: Floats) -> Bytes:
    """[blocks, 1] -> [blocks, 2]: the bytes of float16."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).view(np.uint8)


def _read_half(stored: Bytes) -> Floats:
    return stored.view(np.float16).astype(np.float32)
