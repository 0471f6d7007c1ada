"""Converts floating-point numbers between dtypes with numpy alone, to nearest even, with the same bits as torch.

The long way is via float32, which holds bfloat16 and float16 exactly. float64 is rounded twice, as torch does. For the
two 16-bit dtypes there is a short way for nearly all numbers, in 16-bit integers.

NaN stays NaN. float16 keeps the sign and the upper bits, as processors do. bfloat16 gets the single bit pattern of
torch's scalar code (the result of torch's vector code depends on the processor).
"""

from functools import cache

from formats.lazy_numpy import AnyFloats, Booleans, Doubles, Floats, Halves, Words, np
from formats.tensor import ITEMSIZE, Bytes

_CHUNK = 1 << 16
"""Elements per step: intermediate results then stay in the processor's cache."""

_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000
_TOO_LARGE = {"float16": 0x477FF000, "bfloat16": 0x7F7F8000}
"""The bits of the smallest float32 that rounds to infinity: 65520, and halfway past the largest bfloat16."""


class BeyondRange(ArithmeticError):
    """A finite number became infinite."""


def convert(values: Bytes, source: str, out: Bytes, target: str, *, overflow: bool) -> None:
    """Fill `out` with the converted values. Both are contiguous bytes with the same number of elements.

    overflow: if True, numbers beyond the target's range become infinite; if False, they raise BeyondRange.
    """
    flat = values.reshape(-1)
    made = out.reshape(-1)
    if (source, target) == ("bfloat16", "float32"):
        np.left_shift(flat.view(np.uint16), 16, out=made.view(np.uint32), dtype=np.uint32)
        return
    source_bytes = _CHUNK * ITEMSIZE[source]
    target_bytes = _CHUNK * ITEMSIZE[target]
    reads = range(0, flat.size, source_bytes)
    writes = range(0, made.size, target_bytes)
    for read, write in zip(reads, writes, strict=True):
        chunk = flat[read : read + source_bytes]
        converted = _converted(chunk, source, target, overflow)
        made[write : write + target_bytes] = converted


def _converted(values: Bytes, source: str, target: str, overflow: bool) -> Bytes:
    if (source, target) not in _SHORT_WAYS:
        return rounded(_widened(values, source, overflow), target, overflow=overflow)
    stored = values.view(np.uint16)
    made, is_right = _SHORT_WAYS[source, target](stored)
    if not is_right.all():
        others = np.flatnonzero(~is_right)
        made[others] = rounded(
            _widened(stored[others].view(np.uint8), source, overflow), target, overflow=overflow
        ).view(np.uint16)
    return made.view(np.uint8)


def _widened(values: Bytes, dtype: str, overflow: bool) -> Floats:
    """A vector of bytes as float32. Raises BeyondRange for a float64 that is too large, unless `overflow`."""
    if dtype == "float32":
        return values.view(np.float32)
    if dtype == "bfloat16":
        return np.left_shift(values.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    stored = values.view(np.dtype(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        made = stored.astype(np.float32)
    if dtype == "float16":
        # A signalling NaN becomes a quiet one, as in any processor.
        bits = made.view(np.uint32)
        bits[np.isnan(made)] |= 0x400000
    elif not overflow and np.any(np.isinf(made) & np.isfinite(stored)):
        raise BeyondRange
    return made


def exact(values: Bytes, dtype: str) -> AnyFloats:
    """Bytes of any of these dtypes as float32 or float64, without rounding."""
    return values.view(np.float64) if dtype == "float64" else _widened(values, dtype, overflow=True)


def numbers(values: Bytes, dtype: str) -> Doubles:
    """A vector of bytes of any dtype as float64, for differences. Integers beyond 2^53 are rounded."""
    if dtype in (
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ):
        return _eight_bits(dtype)[values]
    if dtype.startswith("complex"):  # the real and the imaginary part are separate numbers
        return values.view(np.float32 if dtype == "complex64" else np.float64).astype(np.float64)
    if dtype in ("bfloat16", "float16", "float32", "float64"):
        with np.errstate(invalid="ignore"):  # some NaN
            return exact(values, dtype).astype(np.float64)
    return values.view(np.dtype(dtype)).astype(np.float64)


def of_doubles(values: Doubles, dtype: str, *, overflow: bool) -> Bytes:
    """The bytes of an array of numbers in a dtype [rows, cols * itemsize]; of a vector, [size * itemsize].

    Rounded as torch rounds a float64. overflow: as in `convert`. Raises BeyondRange.
    """
    stored = np.ascontiguousarray(values).view(np.uint8)
    if dtype == "float64":
        return stored
    made = np.empty((*values.shape[:-1], values.shape[-1] * ITEMSIZE[dtype]), np.uint8)
    convert(stored.reshape(-1), "float64", made.reshape(-1), dtype, overflow=overflow)
    return made


@cache
def _eight_bits(dtype: str) -> Doubles:
    """The values of all 256 codes of an 8-bit float.

    Source: torch's float8 dtypes, and the OCP specification of eight-bit floats, 1.0.
    """
    code = np.arange(256)
    if dtype == "float8_e8m0fnu":
        return np.where(code < 255, np.ldexp(1.0, code - 127), np.nan)
    bits = 3 if "e4m3" in dtype else 2
    no_zero_sign = dtype.endswith("fnuz")
    bias = (7 if bits == 3 else 15) + no_zero_sign
    exponent = code >> bits & 0x7F >> bits
    mantissa = (code & (1 << bits) - 1) / (1 << bits)
    normal = np.ldexp(1 + mantissa, exponent - bias)
    subnormal = np.ldexp(mantissa, 1 - bias)
    values = np.where(exponent > 0, normal, subnormal)
    values *= np.where(code > 127, -1, 1)
    if no_zero_sign:
        values[0x80] = np.nan
    elif bits == 3:
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


def rounded(values: Floats, dtype: str, *, overflow: bool = True) -> Bytes:
    """The bytes of float32, float16 or bfloat16 for a contiguous float32 array. Only the last axis changes its length.

    overflow: as in convert().
    """
    if dtype == "float32":
        return values.view(np.uint8)
    bits = values.view(np.uint32)
    magnitude = bits & _MAGNITUDE
    made = _to_float16(values) if dtype == "float16" else _to_bfloat16(bits)
    if magnitude.max(initial=0) >= _TOO_LARGE[dtype]:
        if not overflow and np.any((magnitude >= _TOO_LARGE[dtype]) & (magnitude < _INFINITE)):
            raise BeyondRange
        is_nan = magnitude > _INFINITE
        if dtype == "bfloat16":
            made[is_nan] = 0x7FC0
        else:
            nans = bits[is_nan]
            made[is_nan] = nans >> 16 & 0x8000 | 0x7E00 | nans >> 13 & 0x3FF
    return made.view(np.uint8)


def _to_float16(values: Floats) -> Halves:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(np.float16).view(np.uint16)


def _to_bfloat16(bits: Words) -> Halves:
    """The rounded upper halves of float32 bits. The result for NaN is undefined."""
    made = bits >> 16
    made &= 1
    made += bits
    made += 0x7FFF  # half of the last place, less 1 if that place is even: a tie rounds up only from an odd one
    made >>= 16
    return made.astype(np.uint16)


def _bfloat16_to_float16(stored: Halves) -> tuple[Halves, Booleans]:
    """(float16 bits, mask of the right ones).

    A number is right if it is normal in float16; it then needs no rounding.
    """
    made: Halves = np.bitwise_and(stored, 0x7FFF, dtype=np.uint16)
    made -= 0x3880  # the bits of 2^-14, the smallest normal float16; smaller numbers wrap around and become large
    is_right = made < 0x4780 - 0x3880
    made += 1 << 7  # 2^-14 has exponent 1 in float16
    made <<= 3
    made |= stored & 0x8000
    return made, is_right


def _float16_to_bfloat16(stored: Halves) -> tuple[Halves, Booleans]:
    """(bfloat16 bits, mask of the right ones). Normal numbers are right."""
    made: Halves = np.bitwise_and(stored, 0x7FFF, dtype=np.uint16)
    is_right = made - 0x0400 < 0x7C00 - 0x0400
    made += (made >> 3 & 1) + 3  # as in _to_bfloat16, with three bits to drop
    made >>= 3
    made += (127 - 15) << 7
    made |= stored & 0x8000
    return made, is_right


_SHORT_WAYS = {
    ("bfloat16", "float16"): _bfloat16_to_float16,
    ("float16", "bfloat16"): _float16_to_bfloat16,
}
