"""The page of the server: a chat with the model. Its files lie in `chat/`; it asks this server alone, and stores nothing.

`basics.js` is that of megaconv's pages.
"""

from functools import cache
from pathlib import Path

from megaconv.commands.views.look import part

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The page's content security policy: it may only send requests to this server, and show images that it has."""

FILES = Path(__file__).with_name("chat")


@cache
def page() -> str:
    """Return the page. Style and script are part of it, so that it is one request."""
    script = part("basics.js") + _file("chat.js")
    text = _file("page.html").replace("__STYLE__", _file("page.css"))
    return text.replace("__SCRIPT__", script)


def _file(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")
