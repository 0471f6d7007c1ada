"""What lies in the place of a file that was never really fetched, by its first bytes."""

SEEN_BYTES = 512
"""As many of a file's first bytes are enough to tell."""


def mistaken(start: bytes) -> str | None:
    """What a file is instead, and what to do about it; None for one that may be what its name says."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")[:256].lower()
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` where it was cloned"
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return (
            "is an HTML page, such as a site answers with when one has to log in first, not the file itself; "
            "download it again, with `hf download` and a token"
        )
    if text.startswith((b"<?xml", b"<error")):
        return "is an XML document, such as a store answers errors with, not the file itself; download it again"
    if text.startswith((b'{"error"', b"invalid username", b"access to model", b"entry not found")):
        return "is the answer of a site that refused to send it, not the file itself; download it again, with a token"
    return None
