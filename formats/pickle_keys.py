"""Checks keys of dictionaries and members of sets before Python hashes them."""

from formats.pickle_errors import MalformedError
from formats.pickle_records import Global, Opaque, StorageType, TorchDtype

_MOST_EQUAL = 1000
"""Times that a key may have the hash of another key. -1 and -2 have one hash; else this doesn't happen by chance."""


class KeyCheck:
    """Refuses keys that take long to hash or to compare, and many keys that have one hash.

    A dictionary of n keys of one hash takes time by the square of n. Numbers and tuples of numbers that have one hash are
    easy to compute. The hashes of texts differ in each process.
    """

    def __init__(self) -> None:
        self._first: dict[int, object] = {}
        """Hash -> the first key that had it."""
        self._equal = 0

    def __call__(self, key: object) -> None:
        """Raise MalformedError for a key that is not accepted."""
        require_small(key)
        if isinstance(key, (tuple, complex)) and self._first.setdefault(hash(key), key) != key:
            self._equal += 1
            if self._equal > _MOST_EQUAL:
                raise MalformedError("many dictionary keys whose hashes are equal")


def require_small(key: object, nested: bool = False) -> None:
    """Refuse keys whose hash or comparison could take long or overflow the stack."""
    if isinstance(key, (str, bytes)):
        accepted = len(key) <= 1 << 16
    elif isinstance(key, int):
        accepted = -(1 << 63) <= key < 1 << 64
    elif isinstance(key, tuple) and not nested and len(key) <= 16:
        accepted = True
        for part in key:
            require_small(part, nested=True)
    else:
        accepted = isinstance(
            key, (float, complex, type(None), TorchDtype, StorageType, Global, Opaque)
        )
    if not accepted:
        raise MalformedError(
            f"a dictionary key or set member that is too large or can't be one ({type(key).__name__})"
        )
