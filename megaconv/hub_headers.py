"""Reads weight files on the Hugging Face Hub by HTTP range requests, without a download.

    GET /org/name/resolve/<commit>/model.safetensors   Range: bytes=0-16383
    206, Content-Range: bytes 0-16383/4976698672

A temporary directory holds a stand-in for each file (`formats/stores/stand_in.py`): it has the same size, and its header
is in memory. Reads of other bytes fetch windows of the file from the Hub. The client is huggingface_hub 0.30 to
2.4, used for its endpoint, token and proxies.
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.ceilings import HEADER_BYTES
from formats.partial_files import RemoteState
from formats.stores.patience import Patience, Transient
from formats.stores.stand_in import StandIn
from megaconv.errors import CheckpointError
from megaconv.threads import thread_pool

SUFFIX = ".safetensors"
"""The suffix of files that hold all names and shapes at their start."""

_FIRST_BYTES = 16 << 10
"""Length of the first request: the header of a shard with up to a hundred tensors.

A longer header takes a second request.
"""
_THREADS = 8
_BLOCK_BYTES = 1 << 16
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_QUERY = re.compile(r"\?[^\s'\"]*[=&][^\s'\"]*")
"""The query of an address, which may hold a signature."""
_RESET = re.compile(r";\s*t\s*=\s*(\d{1,9})")
"""In the Hub's header `RateLimit: "resolvers";r=0;t=55`: the seconds until it answers again."""
_EMPTY = 416
"""The HTTP status for any range of an empty file."""


class NoRanges(Exception):
    """The server ignores the range of a request and sends whole files."""


@dataclass(frozen=True)
class _Part:
    content: bytes
    size: int
    """Size of the whole file in bytes."""
    etag: str | None


def directory(name: str, commit: str, small: Sequence[Path], weights: Sequence[str]) -> Path:
    """A directory with copies of the small files and placeholders for the weights of one commit.

    The directory is removed when the process ends. Raises NoRanges, CheckpointError, and the client's own errors.
    """
    from huggingface_hub import hf_hub_url

    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="megaconv-")))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    # Use the names of the Hub's cache, so that messages say which model a file belongs to.
    place = root / f"models--{name.replace('/', '--')}" / "snapshots" / commit
    try:
        place.mkdir(parents=True)
        for file in small:
            shutil.copyfile(file, place / file.name)
        with thread_pool(_THREADS) as pool:
            urls = [hf_hub_url(name, each, revision=commit) for each in weights]
            list(pool.map(_stand_in, (place / each for each in weights), urls))
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return place


def _stand_in(path: Path, url: str) -> None:
    """Create the stand-in of a remote file, with its whole header if the header's stated length is plausible."""
    first = _get(url, 0, _FIRST_BYTES)
    file = StandIn(path, _CommitFiles(), url, RemoteState(url, first.size, first.etag or ""))
    file.give(0, first.content)
    if path.suffix != SUFFIX:
        return
    end = 8 + int.from_bytes(first.content[:8], "little")
    if len(first.content) < end <= min(first.size, 8 + HEADER_BYTES):
        # If the header's size is impossible, reading the file reports the error.
        rest = _more(url, file.state, len(first.content), end)
        file.give(0, first.content + rest)


class _CommitFiles:
    """Files of one commit, by URL (formats.stores.objects.Objects)."""

    def request(self, key: str) -> str:
        return f"GET {key}"

    def fetch(self, key: str, state: RemoteState, start: int, out: memoryview) -> Iterator[int]:
        try:
            yield from _fill(key, state, start, out)
        except (CheckpointError, Transient):
            raise
        except Exception as error:  # the client's network errors have no common class
            if _passes(error):
                raise _transient(error) from None
            raise CheckpointError(f"{key}: {reason(error)}", code="hub-unreachable") from error

    def require_unchanged(self, states: Sequence[RemoteState]) -> None:
        """A commit never changes."""


def _fill(url: str, state: RemoteState, start: int, out: memoryview) -> Iterator[int]:
    """Fill a buffer with bytes of a file from `start` on. Yields the sizes of the pieces.

    Raises Transient for a body that breaks off, and CheckpointError for another file.
    """
    with _range(url, start, start + len(out)) as (response, size, etag):
        if (size, etag or "") != (state.size, state.tag):
            raise _changed(url)
        done = 0
        for block in _blocks(response):
            piece = block[: len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            yield len(piece)
            if done == len(out):
                return
        raise Transient(f"a body that ended after {done} of {len(out)} bytes")


def _changed(url: str) -> CheckpointError:
    return CheckpointError(
        f"{url}: was changed on the Hub while it was read; run again", code="hub-unreachable"
    )


def _more(url: str, state: RemoteState, start: int, end: int) -> bytes:
    """Bytes `start` up to `end` of the same file.

    Raises CheckpointError, also if the file changed since the first request.
    """
    try:
        part = _get(url, start, end)
    except CheckpointError:
        raise
    except Exception as error:  # the client's network errors have no common class
        raise CheckpointError(f"{url}: {reason(error)}", code="hub-unreachable") from error
    if (part.size, part.etag or "") != (state.size, state.tag):
        raise _changed(url)
    if len(part.content) != end - start:
        raise CheckpointError(
            f"{url}: {end - start} bytes at {start} were asked for, {len(part.content)} came; run again",
            code="hub-unreachable",
        )
    return part.content


def _get(url: str, start: int, end: int) -> _Part:
    """Bytes from `start` up to `end`, fewer if the file ends before. Repeats the request after a transient error."""
    patience = Patience(f"GET {url}")
    while True:
        try:
            return _get_once(url, start, end)
        except (NoRanges, CheckpointError):
            raise
        except Exception as error:
            if not _passes(error):
                raise
            patience.wait(_transient(error))


def _get_once(url: str, start: int, end: int) -> _Part:
    with _range(url, start, end) as (response, size, etag):
        return _Part(_content(response, end - start) if size else b"", size, etag)


@contextmanager
def _range(url: str, start: int, end: int) -> Iterator[tuple[Any, int, str | None]]:
    """(response, size of the whole file, ETag) of a request for a range. The response of an empty file has no body.

    Raises NoRanges, CheckpointError for another range, and the client's own errors.
    """
    client = _client()
    # A range of a compressed response would not count the file's own bytes.
    asked = {
        **client.build_hf_headers(),
        "Range": f"bytes={start}-{end - 1}",
        "Accept-Encoding": "identity",
    }
    with _streamed(url, asked) as response:
        etag = response.headers.get("ETag")
        received = response.headers.get("Content-Range")
        content_range = _RANGE.fullmatch(received or "")
        if response.status_code == _EMPTY and content_range and not int(content_range[3]):
            yield response, 0, etag
            return
        if response.status_code >= 400:
            getattr(response, "read", lambda: None)()  # the client's error message uses the content
            client.hf_raise_for_status(response)
        if response.status_code == 200:
            raise NoRanges
        first = content_range[1] if content_range else None
        if response.status_code != 206 or content_range is None or int(first or -1) != start:
            raise CheckpointError(
                f"{url}: expected bytes from {start} on, received {response.status_code}, {received!r}",
                code="hub-unreachable",
            )
        yield response, int(content_range[3]), etag


def _streamed(url: str, headers: dict[str, str]) -> Any:
    """The response to a streamed request as a context manager.

    Nothing is read ahead, because a server may send more than was requested.
    """
    session = _client().get_session()
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", "10"))
    if callable(getattr(session, "stream", None)):  # httpx, from huggingface_hub 1.0 on
        return session.stream("GET", url, headers=headers, timeout=seconds, follow_redirects=True)
    return session.get(url, headers=headers, timeout=seconds, stream=True)


def _client() -> Any:
    """The client's module for HTTP, as Any: most of its names aren't declared to type checkers."""
    from huggingface_hub import utils

    return utils


def _blocks(response: Any) -> Iterator[bytes]:
    """The blocks of a streamed response."""
    blocks: Callable[[int], Any] = getattr(response, "iter_bytes", None) or response.iter_content
    yield from blocks(_BLOCK_BYTES)


def _content(response: Any, count: int) -> bytes:
    """At most `count` bytes of a streamed response."""
    content = bytearray()
    for block in _blocks(response):
        content += block
        if len(content) >= count:
            break
    return bytes(content[:count])


def status_of(error: Exception) -> int | None:
    """The HTTP status of a client error; None for a network error."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _passes(error: Exception) -> bool:
    """True for a client error that may not happen again."""
    return status_of(error) in (None, *_TRANSIENT)


def _transient(error: Exception) -> Transient:
    """The failure of a request that should be repeated, after the time that the Hub asks for."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    reset = _RESET.search(headers.get("RateLimit", ""))
    after = reset[1] if reset else headers.get("Retry-After", "")
    return Transient(reason(error), float(after) if after.isdecimal() else 0.0)


_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_UNREACHED = ("ConnectError", "ConnectTimeout", "ConnectionError", "ConnectionTimeout")
"""Classes of errors of httpx and requests without a connection."""
_REASONS = {
    401: f"the model does not exist, or it is private and you are not logged in (401); {_LOG_IN}",
    404: "the model, or its branch or commit, does not exist (404)",
    403: f"access to it is restricted (403): ask for it on the model's page and {_LOG_IN}",
}


def reason(error: Exception) -> str:
    """One line that describes an error of the client."""
    text = _QUERY.sub("", str(error).strip())
    line = text.splitlines()[0] if text else type(error).__name__
    if type(error).__name__ in _UNREACHED:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT} can't be reached ({line})"
    return _REASONS.get(status_of(error) or 0, line)
