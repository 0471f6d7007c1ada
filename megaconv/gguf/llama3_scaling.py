"""llama3's scaling of rope, which a GGUF file holds as divisors of the frequencies.

    rope_freqs.weight    [head_dim / 2]: 1 for short wavelengths, the factor for long ones, and numbers between

The divisors don't show the original number of positions apart from the two limits: multiplied by one number, all three give
the same divisors. All Llama 3.1, 3.2 and 3.3 of Meta have the same three, so that their divisors are recognized.
Source: llama.cpp, convert_hf_to_gguf.py; the published config.json of these models.
"""

from collections.abc import Mapping
from math import pi
from typing import Any

from formats.lazy_numpy import Floats, np

_PUBLISHED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TOLERANCE = 1e-6
"""Relative. Powers in float32 differ between machines in the last bit, and the divisors by ten times as much."""


def llama3_divisors(scaling: Mapping[str, Any], head_dim: int, rope_theta: float) -> Floats:
    """The divisors [head_dim / 2] of llama3's scaling, computed in float32 as in llama.cpp."""
    one = np.float32(1)
    factor = np.float32(scaling["factor"])
    original = np.float32(scaling["original_max_position_embeddings"])
    low = np.float32(scaling["low_freq_factor"])
    high = np.float32(scaling["high_freq_factor"])
    theta = np.float32(rope_theta)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = one / theta**exponents
    wavelengths = np.float32(2 * pi) / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = one / ((one - smooth) / factor + smooth)
    is_short = wavelengths < original / high
    is_long = wavelengths > original / low
    found: Floats = np.where(is_short, one, np.where(is_long, factor, between))
    return found


def published_scaling(divisors: Floats, rope_theta: float) -> dict[str, Any] | None:
    """The rope scaling of config.json with these divisors; None unless it is one of Meta's, at any factor."""
    if divisors.ndim != 1 or not len(divisors) or not np.isfinite(divisors).all():
        return None
    factor = float(divisors.max())
    if factor <= 1:
        return None
    scaling = {**_PUBLISHED, "factor": factor}
    expected = llama3_divisors(scaling, 2 * len(divisors), rope_theta)
    is_same = np.allclose(divisors, expected, rtol=_TOLERANCE, atol=0)
    return scaling if is_same else None
