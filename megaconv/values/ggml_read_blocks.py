"""The values of ggml's quantized types that are read and not written.

    q4_1     32 numbers    float16 d, float16 m; 16 bytes of 4-bit codes: d * code + m
    q5_0     32 numbers    float16 d; 4 bytes of fifth bits; 16 bytes of 4-bit codes: d * (code - 16)
    q5_1     32 numbers    float16 d, float16 m; then as q5_0: d * code + m
    q2_k     256 numbers   16 bytes, each with 4 bits of scale s and minimum n; 64 bytes of 2-bit codes; float16 d, float16 m:
                           d * s * code - m * n for each 16
    q3_k     256 numbers   32 bytes of third bits, which are 0 for codes less 4; 64 bytes of 2-bit codes; 12 bytes of sixteen 6-bit
                           scales s; float16 d: d * (s - 32) * code for each 16
    iq4_nl   32 numbers    float16 d; 16 bytes of 4-bit codes: d * the code's level
    iq4_xs   256 numbers   float16 d; 2 bytes of the upper and 4 bytes of the lower bits of eight 6-bit scales s; 128 bytes of
                           4-bit codes: d * (s - 32) * the code's level for each 32
    mxfp4    32 numbers    an exponent e; 16 bytes of 4-bit codes: the number of e2m1 * 2 ^ (e - 127)

Source: ggml-common.h and ggml-quants.c of llama.cpp, gguf-py 0.19.
"""

from collections.abc import Callable, Mapping
from functools import cache

from formats.lazy_numpy import Floats, np
from formats.tensor import Bytes
from megaconv.values.ggml_codes import HALF, halves, nibbles, pairs_of_bits, single_bits

_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of the codes of iq4_nl and iq4_xs."""
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The numbers of the codes of e2m1, times 2."""


def _q4_1(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, 2 * HALF :], 16).reshape(-1, 32)
    return _with_minimum(blocks, codes)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _five_bits(blocks[:, HALF:])
    return halves(blocks[:, :HALF]) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    return _with_minimum(blocks, _five_bits(blocks[:, 2 * HALF :]))


def _with_minimum(blocks: Bytes, codes: Bytes) -> Floats:
    """codes: [blocks, 32]."""
    values: Floats = halves(blocks[:, :HALF]) * codes.astype(np.float32)
    values += halves(blocks[:, HALF : 2 * HALF])
    return values


def _five_bits(packed: Bytes) -> Bytes:
    """[blocks, 20] -> [blocks, 32]: four bytes of fifth bits, then the lower four bits."""
    fifth = single_bits(packed[:, :4])
    low = nibbles(packed[:, 4:], 16).reshape(-1, 32)
    codes: Bytes = low | fifth << np.uint8(4)
    return codes


def _q2_k(blocks: Bytes) -> Floats:
    packed, codes = blocks[:, :16], pairs_of_bits(blocks[:, 16:80], 32)
    factors = halves(blocks[:, 80:82]) * (packed & 15).astype(np.float32)
    offsets = halves(blocks[:, 82:84]) * (packed >> 4).astype(np.float32)
    values = factors[:, :, None] * codes.reshape(-1, 16, 16).astype(np.float32)
    values -= offsets[:, :, None]
    return values.reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    low = pairs_of_bits(blocks[:, 32:96], 32).reshape(-1, 256)
    # Byte i has the third bits of the numbers i, i + 32, i + 64 …
    third = single_bits(blocks[:, :32]).reshape(-1, 32, 8).transpose(0, 2, 1).reshape(-1, 256)
    codes = low.astype(np.float32) - 4 * (1 - third.astype(np.float32))
    factors = halves(blocks[:, 108:110]) * (_q3_k_scales(blocks[:, 96:108]) - 32)
    values = factors[:, :, None] * codes.reshape(-1, 16, 16)
    return values.reshape(-1, 256)


def _q3_k_scales(packed: Bytes) -> Floats:
    """[blocks, 12] -> [blocks, 16]: 8 bytes with the lower four bits, then 4 with the upper two."""
    lower = nibbles(packed[:, :8], 8).reshape(-1, 16)
    upper = pairs_of_bits(packed[:, 8:], 4).reshape(-1, 16)
    return (lower | upper << np.uint8(4)).astype(np.float32)


def _iq4_nl(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, HALF:], 16).reshape(-1, 32)
    return halves(blocks[:, :HALF]) * _numbers(_LEVELS)[codes]


def _iq4_xs(blocks: Bytes) -> Floats:
    upper = pairs_of_bits(blocks[:, 2:4], 1).reshape(-1, 8)
    lower = nibbles(blocks[:, 4:8], 1).reshape(-1, 8)
    scales = (lower | upper << np.uint8(4)).astype(np.float32) - 32
    factors = halves(blocks[:, :HALF]) * scales
    codes = nibbles(blocks[:, 8:], 16).reshape(-1, 8, 32)
    values = factors[:, :, None] * _numbers(_LEVELS)[codes]
    return values.reshape(-1, 256)


def _mxfp4(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, 1:], 16).reshape(-1, 32)
    return _half_powers()[blocks[:, :1]] * _numbers(_DOUBLED)[codes]


@cache
def _numbers(of_codes: tuple[int, ...]) -> Floats:
    return np.array(of_codes, np.float32)


@cache
def _half_powers() -> Floats:
    """2 ^ (e - 128) of all 256 exponents, half of their power because the codes' numbers are doubled."""
    return np.ldexp(1.0, np.arange(256) - 128).astype(np.float32)


READ_VALUES: Mapping[str, Callable[[Bytes], Floats]] = {
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}
"""Type -> its blocks as bytes to their numbers."""
