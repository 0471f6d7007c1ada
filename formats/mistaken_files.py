"""Recognizes, by its first bytes, a file that was not really downloaded."""

SEEN_BYTES = 512
"""Number of first bytes that are enough to recognize such a file."""


def mistaken(start: bytes) -> str | None:
    """A description of the file's real kind, with a remedy; None if the file may be what its name says."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")[:256].lower()
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` where it was cloned"
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return (
            "is an HTML page, not the file itself: the site may ask for a login; "
            "download the file again with `hf download` and a token"
        )
    if text.startswith((b"<?xml", b"<error")):
        return "is an XML document, not the file itself: it reports an error of the store; download the file again"
    if text.startswith((b'{"error"', b"invalid username", b"access to model", b"entry not found")):
        return "is the answer of a site that refused to send it, not the file itself; download it again, with a token"
    return None
