"""Quantizes numbers to blocks of ggml's types, as ggml's reference code without an importance matrix.

    q4_0    d = the number of largest magnitude / -8; code = x / d + 8.5, rounded down
    q8_0    d = max |x| / 127; code = x / d, halves away from zero
    q4_k    for each 32: of 21 pairs of scale and minimum, the pair of least squared error, weighted with sqrt(mean x^2) + |x|
    q5_k    the same with 5 bits and 16 pairs
    q6_k    for each 16: of 19 scales, the one of least squared error, weighted with x^2

The arithmetic is ggml's in float32, in its order, so that blocks have the same bytes as those of a ggml compiled without
fused multiply-add. `ggml_weighted.py` quantizes with an importance matrix.
Source: ggml-quants.c of llama.cpp (quantize_row_q4_K_ref and the like).
"""

from collections.abc import Callable, Mapping
from typing import Any

from formats.lazy_numpy import Booleans, Floats, np
from formats.tensor import Bytes
from megaconv.values.ggml_searches import (
    LEAST,
    PairSearch,
    best_pair,
    best_scale,
    inverse_of,
    quotient,
)


def q4_0(blocks: Floats) -> Bytes:
    """[blocks, 32] float32 -> [blocks, 18] bytes."""
    place = np.abs(blocks).argmax(axis=1)[:, None]
    scale = np.take_along_axis(blocks, place, axis=1) / np.float32(-8)
    codes = np.trunc(blocks * inverse_of(scale) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    return np.concatenate([half(scale), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def q8_0(blocks: Floats) -> Bytes:
    """[blocks, 32] float32 -> [blocks, 34] bytes."""
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * inverse_of(scale)
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return np.concatenate([half(scale), rounded.astype(np.int8).view(np.uint8)], axis=1)


_Q4_K, _Q5_K = PairSearch(15, -1.0, 21), PairSearch(31, -0.5, 16)


def q4_k(blocks: Floats) -> Bytes:
    """[blocks, 256] float32 -> [blocks, 144] bytes."""
    return four_bit_blocks(*_scaled_with_minima(blocks, _Q4_K))


def four_bit_blocks(head: Bytes, codes: Bytes) -> Bytes:
    """Scales and minima [blocks, 16], codes [blocks, 8, 32] -> [blocks, 144] bytes."""
    return np.concatenate([head, packed_nibbles(codes)], axis=1)


def q5_k(blocks: Floats) -> Bytes:
    """[blocks, 256] float32 -> [blocks, 176] bytes."""
    return five_bit_blocks(*_scaled_with_minima(blocks, _Q5_K))


def five_bit_blocks(head: Bytes, codes: Bytes) -> Bytes:
    """Scales and minima [blocks, 16], codes [blocks, 8, 32] -> [blocks, 176] bytes."""
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = np.bitwise_or.reduce((codes >> 4) << shifts, axis=1)
    return np.concatenate([head, fifth, packed_nibbles(codes & np.uint8(15))], axis=1)


def q6_k(blocks: Floats) -> Bytes:
    """[blocks, 256] float32 -> [blocks, 210] bytes."""
    groups = blocks.reshape(-1, 16)
    by_group = np.ascontiguousarray(groups.T)
    scales, searched = best_scale(by_group, by_group * by_group)
    return six_bit_blocks(groups, scales, searched)


def six_bit_blocks(groups: Floats, scales: Floats, searched: Floats) -> Bytes:
    """groups [groups, 16], and the scale and the codes that a search found -> [blocks, 210] bytes."""
    unit, stored, is_zero = in_eight_bits(scales.reshape(-1, 16))
    multiples = stored.astype(np.float32)
    steps = read_half(unit) * multiples
    signed = rounded_again(groups, steps.reshape(-1, 1), searched.T, -32, 31)
    codes = signed.reshape(-1, 256) + np.float32(32)
    codes[is_zero[:, 0]] = 0  # a block of zeros has bytes of zero only
    low, high = packed_six_bits(codes.astype(np.uint8))
    parts = (low, high, stored.view(np.uint8), unit)
    return np.concatenate(parts, axis=1)


def rounded_again(
    numbers: Floats, steps: Floats, searched: Floats, least: int, most: int
) -> Floats:
    """The codes of numbers for steps that were rounded.

    A group whose step became zero keeps the codes of the search, which then stand for nothing.
    """
    quotients = quotient(numbers, steps)
    codes = np.rint(quotients).clip(least, most)
    return np.where(steps == 0, searched, codes)


def in_eight_bits(scales: Floats) -> tuple[Bytes, "np.ndarray[Any, np.dtype[np.int8]]", Booleans]:
    """(float16 unit of each block as bytes, signed multiples of the unit [blocks, 16], True for blocks of zeros)."""
    place = np.abs(scales).argmax(axis=1)[:, None]
    largest = np.take_along_axis(scales, place, axis=1)
    is_zero = np.abs(largest) < LEAST
    largest[is_zero] = 0
    inverse = quotient(np.float32(-128), largest)
    multiples = np.rint(inverse * scales)
    stored = multiples.clip(-128, 127).astype(np.int8)
    return half(inverse_of(inverse)), stored, is_zero


def packed_six_bits(codes: Bytes) -> tuple[Bytes, Bytes]:
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


def _scaled_with_minima(blocks: Floats, search: PairSearch) -> tuple[Bytes, Bytes]:
    """(scales and minima of all blocks [blocks, 16], codes [blocks, 8, 32])."""
    groups = blocks.reshape(-1, 32)
    by_group = np.ascontiguousarray(groups.T)
    magnitude = np.sqrt((by_group * by_group).sum(axis=0) / np.float32(32))
    weights = magnitude + np.abs(by_group)
    found, offsets, searched = best_pair(by_group, weights, search)
    of_scales = _in_six_bits(found.reshape(-1, 8))
    of_minima = _in_six_bits(offsets.reshape(-1, 8))
    return with_minima(groups, of_scales, of_minima, searched, search.most)


def with_minima(
    groups: Floats,
    of_scales: tuple[Bytes, Floats],
    of_minima: tuple[Bytes, Floats],
    searched: Floats,
    most: int,
) -> tuple[Bytes, Bytes]:
    """(scales and minima of all blocks [blocks, 16], codes [blocks, 8, 32]).

    groups: [groups, 32]. of_scales, of_minima: unit of each block as bytes of float16, and multiples [blocks, 8].
    searched: the codes that the search found [32, groups].
    """
    (d, scales), (m, minima) = of_scales, of_minima
    steps = read_half(d) * scales
    stored_offsets = read_half(m) * minima
    moved = groups + stored_offsets.reshape(-1, 1)
    codes = rounded_again(moved, steps.reshape(-1, 1), searched.T, 0, most)
    packed = packed_scales(scales.astype(np.uint8), minima.astype(np.uint8))
    head = np.concatenate([d, m, packed], axis=1)
    return head, codes.reshape(-1, 8, 32).astype(np.uint8)


def _in_six_bits(numbers: Floats) -> tuple[Bytes, Floats]:
    """(float16 unit of each block as bytes, multiples of the unit [blocks, 8] from 0 to 63)."""
    largest = numbers.max(axis=1, keepdims=True).clip(0)
    inverse = quotient(np.float32(63), largest)
    return half(largest / np.float32(63)), np.rint(inverse * numbers).clip(0, 63)


def packed_scales(scales: Bytes, minima: Bytes) -> Bytes:
    """Two of [blocks, 8] numbers of 6 bits -> [blocks, 12] bytes; see ggml_blocks.scales_and_minima."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


def packed_nibbles(codes: Bytes) -> Bytes:
    """[blocks, 8, 32] codes of 4 bits -> [blocks, 128] bytes: groups 2i and 2i + 1 share 32 bytes."""
    packed: Bytes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return packed.reshape(-1, 128)


def half(numbers: Floats) -> Bytes:
    """[blocks, 1] -> [blocks, 2]: the bytes of float16."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).view(np.uint8)


def read_half(stored: Bytes) -> Floats:
    return stored.view(np.float16).astype(np.float32)
