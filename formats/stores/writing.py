"""The interface of a store that takes objects: parts of uploads, conditional puts, and what they answer."""

from collections.abc import Mapping, Sequence
from hashlib import md5
from typing import NamedTuple, Protocol

from formats.errors import CheckpointError
from formats.stores.checksums import Checksum
from formats.stores.objects import Store
from formats.stores.patience import Transient

ABSENT = "*"
"""The condition that no object has the key. Any other condition is the ETag of the object to replace."""


class Conflict(Exception):
    """The condition of a request doesn't hold: another program has written the object."""


class Held(NamedTuple):
    """The state of an object, or of a part."""

    size: int
    tag: str
    crc: int | None
    """The store's checksum of the content, a CRC-32 or CRC-32C; None if the store keeps none."""


class Small(NamedTuple):
    """A small object with its content."""

    content: bytes
    tag: str
    age: float
    """Seconds since it was written, by the store's clock."""


class Upload(NamedTuple):
    """An upload that is neither completed nor aborted. Nobody can read its parts."""

    key: str
    identity: str
    began: float
    """Time of its begin by the store's clock, in seconds since 1970."""


class WritableStore(Store, Protocol):
    """A bucket that takes objects. Any thread may use it. Methods raise CheckpointError after several attempts."""

    @property
    def checksum(self) -> Checksum:
        """The checksum that this store keeps, of parts and of objects."""
        ...

    @property
    def lists_checksums(self) -> bool:
        """True if `parts` tells the checksums of parts. If not, the journal of the run has to keep them."""
        ...

    @property
    def endpoint(self) -> str:
        """The store's address, for messages."""
        ...

    def put(self, key: str, content: bytes, *, only: str | None = None) -> str:
        """Write an object. Returns its ETag.

        only: a condition (see ABSENT). Raises Conflict if the condition doesn't hold, unless the object has this
        content already.
        """
        ...

    def get(self, key: str) -> Small | None:
        """A small object; None if there is none."""
        ...

    def head(self, key: str) -> Held | None:
        """The state of an object; None if there is none."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object. No error if there is none."""
        ...

    def begin_upload(self, key: str) -> str:
        """Begin an upload. Returns its identity."""
        ...

    def put_part(self, upload: Upload, number: int, content: bytes | bytearray, crc: int) -> str:
        """Send a part. number: from 1 on. crc: the checksum of the content. Returns the ETag."""
        ...

    def parts(self, upload: Upload) -> Mapping[int, Held] | None:
        """The parts that the store has, by number; None if the upload doesn't exist any more."""
        ...

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """The uploads below a prefix."""
        ...

    def complete(
        self, upload: Upload, parts: Mapping[int, Held], whole: Held, *, only: str | None
    ) -> Held:
        """Make an object of an upload's parts. Returns the object's state.

        whole: the expected state, with the tag that `joined_tag` computes. Raises Conflict if `only` doesn't hold.
        """
        ...

    def abort(self, upload: Upload) -> None:
        """Remove an upload and its parts. No error if it doesn't exist."""
        ...


def is_same(there: Held, expected: Held) -> bool:
    """True if an object is the one that was sent: by its size and its CRC-32, else by its ETag."""
    if there.size != expected.size:
        return False
    if there.crc is not None and expected.crc is not None:
        return there.crc == expected.crc
    # Stores that encrypt with a key of their own have ETags that nobody can compute.
    return there.tag == expected.tag


def require_same(crc: int, expected: int | None) -> None:
    """Raise Transient if a content that came doesn't have the checksum that the store keeps. None: it keeps none."""
    if expected is not None and crc != expected:
        raise Transient("a body of other bytes than the object has")


def as_sent(there: Held | None, expected: Held, place: str) -> Held:
    """The object that is there. Raises CheckpointError if it isn't the one that was sent."""
    if there is None or not is_same(there, expected):
        raise CheckpointError(
            f"{place}: the store has another object than was sent ({there}, expected {expected}); run again",
            code="store-unreachable",
        )
    return there


def joined_tag(parts: Mapping[int, Held]) -> str:
    """The ETag of the object that these parts make: MD5 of their MD5s, and their number."""
    words = [parts[number].tag.strip('"') for number in sorted(parts)]
    try:
        digests = b"".join(bytes.fromhex(word) for word in words)
    except ValueError:
        return ""
    return f'"{md5(digests, usedforsecurity=False).hexdigest()}-{len(words)}"'
