"""Quantizes rows to blocks of ggml's types with an importance matrix: a weight for each column.

    q4_0          weight = importance * sqrt(mean x^2 of the row + x^2); one search for the scale, as for q6_k
    q4_k, q5_k    weight = importance * sqrt(2 * mean x^2 of the block + x^2); of 37 pairs of scale and minimum the best;
                  scales and minima of a block are rounded to the multiples of least weighted error
    q6_k          weight = importance

The importance of a column is the mean of the squared inputs. Q8_0 has no such form. Source: the functions with quant_weights
in ggml-quants.c of llama.cpp (quantize_row_q4_K_impl and the like).
"""

from collections.abc import Callable, Mapping

from formats.lazy_numpy import Floats, np
from formats.tensor import Bytes
from megaconv.values.ggml_quantizers import (
    five_bit_blocks,
    four_bit_blocks,
    half,
    six_bit_blocks,
    with_minima,
)
from megaconv.values.ggml_searches import PairSearch, best_multiples, best_pair, best_scale

_Q4_K, _Q5_K = PairSearch(15, -0.9, 37, 0.05), PairSearch(31, -0.9, 37, 0.05)
_LARGEST_SCALE = 63


def q4_0(rows: Floats, importance: Floats) -> Bytes:
    """rows [rows, cols], importance [cols] -> [blocks, 18] bytes."""
    cols = rows.shape[1]
    squares = np.ascontiguousarray((rows * rows).T)
    mean = np.add.accumulate(squares, axis=0)[-1] / np.float32(cols)
    weights = importance * np.sqrt(mean[:, None] + rows * rows)
    scale, signed = best_scale(_groups(rows, 32), _groups(weights, 32), 8)
    codes = (signed.T + np.float32(8)).astype(np.uint8)
    return np.concatenate([half(scale[:, None]), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def q4_k(rows: Floats, importance: Floats) -> Bytes:
    """rows [rows, cols], importance [cols] -> [blocks, 144] bytes."""
    return four_bit_blocks(*_scaled_with_minima(rows, importance, _Q4_K))


def q5_k(rows: Floats, importance: Floats) -> Bytes:
    """rows [rows, cols], importance [cols] -> [blocks, 176] bytes."""
    return five_bit_blocks(*_scaled_with_minima(rows, importance, _Q5_K))


def q6_k(rows: Floats, importance: Floats) -> Bytes:
    """rows [rows, cols], importance [cols] -> [blocks, 210] bytes."""
    weights = np.broadcast_to(importance, rows.shape)
    scales, searched = best_scale(_groups(rows, 16), _groups(weights, 16))
    return six_bit_blocks(rows.reshape(-1, 16), scales, searched)


WEIGHTED: Mapping[str, Callable[[Floats, Floats], Bytes]] = {
    "q4_0": q4_0,
    "q4_k": q4_k,
    "q5_k": q5_k,
    "q6_k": q6_k,
}
"""Type -> the function from (rows, importance of the columns) to [blocks, bytes]."""


def _scaled_with_minima(
    rows: Floats, importance: Floats, search: PairSearch
) -> tuple[Bytes, Bytes]:
    """(scales and minima of all blocks [blocks, 16], codes [blocks, 8, 32])."""
    spread = _spread(rows.reshape(-1, 256)).reshape(rows.shape)
    weights = _groups(importance * spread, 32)
    numbers = _groups(rows, 32)
    found, offsets, searched = best_pair(numbers, weights, search)
    of_group = np.add.accumulate(weights, axis=0)[-1]
    of_scales = _in_six_bits(found, of_group)
    of_minima = _in_six_bits(offsets, of_group)
    groups = rows.reshape(-1, 32)
    return with_minima(groups, of_scales, of_minima, searched, search.most)


def _spread(blocks: Floats) -> Floats:
    """blocks [blocks, 256] -> sqrt(2 * mean x^2 of the block + x^2) of each number."""
    squares = blocks * blocks
    by_block = np.ascontiguousarray(squares.T)
    total = np.add.accumulate(by_block, axis=0)[-1]  # one number after the other, as ggml adds
    twice_mean = np.float32(2) * total / np.float32(256)
    spread: Floats = np.sqrt(twice_mean[:, None] + squares)
    return spread


def _in_six_bits(numbers: Floats, weights: Floats) -> tuple[Bytes, Floats]:
    """numbers, weights [groups] -> (float16 unit of each block as bytes, multiples of the unit [blocks, 8])."""
    unit, multiples = best_multiples(_groups(numbers, 8), _groups(weights, 8), _LARGEST_SCALE)
    return half(unit[:, None]), multiples.T


def _groups(numbers: Floats, size: int) -> Floats:
    """The numbers as [size, groups]."""
    return np.ascontiguousarray(numbers.reshape(-1, size).T)
