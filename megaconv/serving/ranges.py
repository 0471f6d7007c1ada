"""The `Range` header of HTTP (RFC 9110, section 14): one range of bytes of a file."""

import re


class NotSatisfiable(ValueError):
    """The range is outside of the file."""


def asked_range(header: str | None, size: int) -> range | None:
    """The bytes of a file that a Range header asks for; None for the whole file.

    A header that isn't one range of bytes has no effect, as the RFC allows. Raises NotSatisfiable for a range that
    begins at or behind the end, or that is empty.
    """
    found = re.fullmatch(r"bytes=(\d{0,19})-(\d{0,19})", (header or "").strip())
    if found is None or found.group(0) == "bytes=-":
        return None
    first, last = found.groups()
    if not first:  # the last bytes of the file
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < int(first):
            return None
    if start >= stop:
        raise NotSatisfiable(header)
    return range(start, stop)
