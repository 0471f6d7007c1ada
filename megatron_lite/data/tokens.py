"""The source of samples: numbered documents of tokens."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]
"""Token ids, of any integer dtype."""
TokenDtype = np.dtype[np.integer[Any]]


class Documents(Protocol):
    """Documents of tokens by number; in an indexed dataset, its sequences."""

    lengths: NDArray[np.int32]
    """Tokens of each document."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Return tokens [offset, offset + length) of a document; to its end if length is None."""
        ...
