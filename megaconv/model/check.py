"""The ledger of a stream: checks that every tensor of the manifest passes exactly once, in its declared shape and
dtype."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from formats.tensor import LazyTensor
from formats.wording import are, counted, listing
from megaconv.errors import CorruptCheckpoint, TensorMismatch
from megaconv.model.ir import Key, TensorInfo


class Ledger:
    """The record of the tensors that the sending side has sent.

    It raises TensorMismatch, with the tensor's name, for a tensor that doesn't fit the manifest.
    """

    def __init__(self, manifest: Mapping[Key, TensorInfo]) -> None:
        self._manifest = manifest
        self._seen: set[Key] = set()

    def enter(self, key: Key, tensor: LazyTensor) -> None:
        expected = self._manifest.get(key)
        if expected is None:
            raise TensorMismatch(f"{key}: the loader sent a tensor that its manifest doesn't list")
        if key in self._seen:
            raise TensorMismatch(f"{key}: the loader sent this tensor twice")
        found = TensorInfo(tuple(tensor.shape), tensor.dtype)
        if found != expected:
            raise TensorMismatch(
                f"{key}: declared as {list(expected.shape)} {expected.dtype}, sent as {list(found.shape)} {found.dtype}"
            )
        self._seen.add(key)

    def close(self, count: int) -> None:
        missing = [key for key in self._manifest if key not in self._seen]
        if missing:
            raise TensorMismatch(
                f"the loader ended without {counted(len(missing), 'tensor')} of its manifest: {listing(missing)}"
            )
        if count != len(self._manifest):
            raise TensorMismatch(
                f"the loader reports {count} sent tensors, but {len(self._manifest)} arrived"
            )


@contextmanager
def well_formed(where: str) -> Iterator[None]:
    """Turn the errors of metadata with values of a wrong kind into CorruptCheckpoint."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{where}: has a value of a wrong kind ({type(error).__name__}: {error})"
        ) from error


def same_names(expected: Collection[str], found: Collection[str], where: str) -> None:
    """Raise TensorMismatch, with the names, unless two sets of native tensor names are equal."""
    wanted, held = set(expected), set(found)
    missing = [name for name in expected if name not in held]
    unknown = [name for name in found if name not in wanted]
    if missing:
        extra = f"; it has unknown ones: {listing(unknown)}" if unknown else ""
        raise TensorMismatch(
            f"{where}: {counted(len(missing), 'tensor')} {are(len(missing))} missing: {listing(missing)}{extra}",
            code="missing-tensor",
        )
    if unknown:
        raise TensorMismatch(
            f"{where}: {counted(len(unknown), 'tensor')} {are(len(unknown))} unknown in this model: {listing(unknown)}",
            code="unknown-tensor",
        )
