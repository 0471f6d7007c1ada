"""Weight files on the Hugging Face Hub whose headers alone are read, by HTTP range requests.

    GET /org/name/resolve/<commit>/model.safetensors   Range: bytes=0-16383
    206, Content-Range: bytes 0-16383/4976698672

A file that stands for each lies in a temporary directory: as large, its header in place, the rest fetched where somebody reads
it after all (`formats/partial_files.py`). Client: huggingface_hub 0.30 to 2.4, for its endpoint, token and proxies.
"""

import atexit
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from formats.ceilings import HEADER_BYTES
from formats.partial_files import PartialFile
from megaconv.errors import CheckpointError
from megaconv.threads import thread_pool

SUFFIX = ".safetensors"
"""Of files whose names and shapes stand in one place, at the start; torch's are scattered over the whole file."""

_FIRST_BYTES = 16 << 10
"""Asked for at first: the header of a shard with up to a hundred tensors. A longer one takes a second request."""
_THREADS = 8
_BLOCK_BYTES = 1 << 16
_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
_TRANSIENT = (429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_EMPTY = 416
"""The status for any range of a file that has no bytes."""


class NoRanges(Exception):
    """The server answers with whole files."""


@dataclass(frozen=True)
class _Part:
    content: bytes
    size: int
    """Of the whole file."""
    etag: str | None


def directory(name: str, commit: str, small: Sequence[Path], weights: Sequence[str]) -> Path:
    """A directory with copies of the small files and what stands for the weights of one commit; removed when the process ends.

    Raises NoRanges, CheckpointError, and what the client raises.
    """
    from huggingface_hub import hf_hub_url

    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="megaconv-")))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    # Named as in the Hub's cache, so that messages say which model a file is of.
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
    """Make the file that stands for a remote one, with the whole header where that has a length which can be."""
    first = _get(url, 0, _FIRST_BYTES)
    try:
        file = PartialFile(path, first.size, partial(_more, url, first))
    except (OSError, OverflowError) as error:
        raise CheckpointError(f"{path}: no file of {first.size:,} bytes can be made here: {error}") from error
    file.hold(0, first.content)
    end = 8 + int.from_bytes(first.content[:8], "little")
    if end <= min(first.size, 8 + HEADER_BYTES):  # else reading it says what is wrong
        file.require(0, end)


def _more(url: str, first: _Part, start: int, end: int) -> bytes:
    """Further bytes of the same file. Raises CheckpointError."""
    try:
        part = _get(url, start, end)
    except CheckpointError:
        raise
    except Exception as error:  # the client's network errors have no class in common
        raise CheckpointError(f"{url}: {reason(error)}", code="hub-unreachable") from error
    if (part.size, part.etag) != (first.size, first.etag):
        raise CheckpointError(f"{url}: was changed on the Hub while it was read; run again", code="hub-unreachable")
    if len(part.content) != end - start:
        raise CheckpointError(
            f"{url}: {end - start} bytes at {start} were asked for, {len(part.content)} came; run again",
            code="hub-unreachable",
        )
    return part.content


def _get(url: str, start: int, end: int) -> _Part:
    """Bytes from `start` up to `end`, fewer where the file ends before. Tries again what may pass."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return _get_once(url, start, end)
        except (NoRanges, CheckpointError):
            raise
        except Exception as error:
            if status_of(error) not in (None, *_TRANSIENT):
                raise
        time.sleep(_PAUSE_SECONDS * attempt)
    return _get_once(url, start, end)


def _get_once(url: str, start: int, end: int) -> _Part:
    client = _client()
    # Compressed bytes couldn't be counted.
    asked = {**client.build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    with _streamed(url, asked) as response:
        told = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status_code == _EMPTY and told and not int(told[3]):
            return _Part(b"", 0, response.headers.get("ETag"))
        if response.status_code >= 400:
            getattr(response, "read", lambda: None)()  # the client looks into it
            client.hf_raise_for_status(response)
        if response.status_code == 200:
            raise NoRanges
        if response.status_code != 206 or told is None or told[1] is None or int(told[1]) != start:
            what = f"{response.status_code}, {response.headers.get('Content-Range')!r}"
            raise CheckpointError(f"{url}: bytes from {start} on were asked for, {what} came", code="hub-unreachable")
        return _Part(_content(response, end - start), int(told[3]), response.headers.get("ETag"))


def _streamed(url: str, headers: dict[str, str]) -> Any:
    """The response, as a context manager, without having read it: a server may send more than was asked for."""
    session = _client().get_session()
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", "10"))
    if callable(getattr(session, "stream", None)):  # httpx, from huggingface_hub 1.0 on
        return session.stream("GET", url, headers=headers, timeout=seconds, follow_redirects=True)
    return session.get(url, headers=headers, timeout=seconds, stream=True)


def _client() -> Any:
    """The client's module of HTTP, most of whose names are there without being declared to type checkers."""
    from huggingface_hub import utils

    return utils


def _content(response: Any, count: int) -> bytes:
    """At most `count` bytes of a streamed response."""
    blocks: Callable[[int], Any] = getattr(response, "iter_bytes", None) or response.iter_content
    content = bytearray()
    for block in blocks(_BLOCK_BYTES):
        content += block
        if len(content) >= count:
            break
    return bytes(content[:count])


def status_of(error: Exception) -> int | None:
    """The HTTP status that an error of the client's is about; None for one of the network."""
    return getattr(getattr(error, "response", None), "status_code", None)


_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_REASONS = {
    401: f"there is no such model, or it is private and the Hub doesn't know who asks (401); {_LOG_IN}",
    404: "there is no such model, or no such branch or commit of it (404)",
    403: f"access to it is restricted (403): ask for it on the model's page and {_LOG_IN}",
}


def reason(error: Exception) -> str:
    """One line about what the client raised."""
    text = str(error).strip()
    return _REASONS.get(status_of(error) or 0, text.splitlines()[0] if text else type(error).__name__)
