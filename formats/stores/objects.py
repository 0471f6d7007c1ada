"""Objects in a listing, and the interfaces of objects and stores that are read."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from formats.ceilings import LISTED_OBJECTS
from formats.errors import CorruptCheckpoint
from formats.partial_files import RemoteState


class Listed(NamedTuple):
    """An object in a listing."""

    key: str
    """The complete name in the bucket, without a leading slash."""
    size: int
    tag: str


class Listing(NamedTuple):
    """Objects below a prefix."""

    objects: list[Listed]
    folders: list[str]
    """Prefixes of deeper objects, each with its final slash, if only one level was listed."""


class Objects(Protocol):
    """Objects that can be read by ranges. Any thread may use it. Methods raise CheckpointError."""

    def fetch(self, key: str, state: RemoteState, start: int, out: memoryview) -> Iterator[int]:
        """Fill a buffer, or its beginning, with the object's bytes from `start` on. Yields the number of bytes of each piece.

        Makes one request, and raises Transient if it should be repeated. Raises CorruptCheckpoint if the object isn't
        the one of `state` any more.
        """
        ...

    def request(self, key: str) -> str:
        """The name of the request that `fetch` makes, such as `s3:GetObject on bucket/key`."""
        ...

    def require_unchanged(self, states: Sequence[RemoteState]) -> None:
        """Raise CorruptCheckpoint if an object was replaced or deleted since it was listed."""
        ...


class Store(Objects, Protocol):
    """A bucket, whose objects can be listed too."""

    @property
    def uri(self) -> str:
        """The URI of the bucket, without a final slash."""
        ...

    def listing(self, prefix: str, *, deep: bool = True) -> Listing:
        """The objects whose keys begin with a prefix. deep: include those behind a further slash."""
        ...


def require_few(found: Listing, place: str) -> None:
    """Raise CorruptCheckpoint if a listing is longer than that of any checkpoint."""
    if len(found.objects) > LISTED_OBJECTS:
        raise CorruptCheckpoint(
            f"{place}: has more than {LISTED_OBJECTS:,} objects; choose a deeper prefix"
        )


def replaced(state: RemoteState) -> CorruptCheckpoint:
    """The error for an object that isn't the one that was listed any more."""
    return CorruptCheckpoint(
        f"{state.uri}: was replaced or deleted while it was read; what was read mixes two states, and is not used. "
        "Run again when no program writes to the source"
    )
