"""numpy, imported when something of it is used first: it takes as long as all else that a command needs to look at names and shapes.

    from formats.lazy_numpy import Bytes, np

Where a module is imported nothing of np may be used yet; arrays have names here, which mean nothing but to a type checker.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Halves = NDArray[np.uint16]
    Words = NDArray[np.uint32]
    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]
    AnyFloats = NDArray[np.floating]
    Booleans = NDArray[np.bool_]
else:

    class _Numpy:
        """In place of the module."""

        def __getattr__(self, name: str) -> Any:
            import numpy

            found = getattr(numpy, name)
            setattr(self, name, found)  # the next time it is found without coming here
            return found

    np = _Numpy()
    Bytes = Halves = Words = Floats = Doubles = AnyFloats = Booleans = Any

__all__ = ["AnyFloats", "Booleans", "Bytes", "Doubles", "Floats", "Halves", "Words", "np"]
