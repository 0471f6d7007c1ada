"""Random numbers that depend on a text and on places alone: the same on every machine, in any order."""

import hashlib

from formats.lazy_numpy import Doubles, Longs, np


def uniform(places: Longs, text: str) -> Doubles:
    """Numbers from 0 to below 1, one for each place: the finalizer of SplitMix64 (Steele et al. 2014).

    text: numbers of two texts have nothing to do with each other.
    """
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    mixed = places * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
