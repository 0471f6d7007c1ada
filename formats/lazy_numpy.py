"""numpy, imported at its first use: importing it takes as long as everything else in a command that reads names and
shapes.

    from formats.lazy_numpy import Bytes, np

Don't use anything of np while a module is imported. The array types have names here, which have a meaning only for type
checkers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Halves = NDArray[np.uint16]
    Words = NDArray[np.uint32]
    Longs = NDArray[np.uint64]
    Counts = NDArray[np.int64]
    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]
    AnyFloats = NDArray[np.floating]
    Booleans = NDArray[np.bool_]
else:

    class _Numpy:
        """A stand-in for the numpy module, which imports numpy when an attribute is first read."""

        def __getattr__(self, name: str) -> Any:
            import numpy

            found = getattr(numpy, name)
            setattr(self, name, found)  # the next access finds the attribute directly
            return found

    np = _Numpy()
    Bytes = Halves = Words = Longs = Counts = Floats = Doubles = AnyFloats = Booleans = Any

__all__ = [
    "AnyFloats",
    "Booleans",
    "Bytes",
    "Counts",
    "Doubles",
    "Floats",
    "Halves",
    "Longs",
    "Words",
    "np",
]
