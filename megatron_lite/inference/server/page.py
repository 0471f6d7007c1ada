"""The page of the server: a chat with the model. Its files lie in `chat/`; it asks this server alone, and stores nothing."""

from functools import cache
from pathlib import Path

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The page's content security policy: it may only send requests to this server."""

FILES = Path(__file__).with_name("chat")


@cache
def page() -> str:
    """Return the page. Style and script are part of it, so that it is one request."""
    text = _file("page.html")
    for place, name in (("__STYLE__", "page.css"), ("__SCRIPT__", "chat.js")):
        text = text.replace(place, _file(name))
    return text


def _file(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")
