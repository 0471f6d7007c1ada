"""The look of all pages: one style sheet, and templates whose parts are filled in. A page sends no requests.

The files lie in `parts/`. A template names a part as `__NAME__`.
"""

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from megaconv.json_text import json_text

PARTS = Path(__file__).with_name("parts")
_PLACE = re.compile(r"__([A-Z]+)__")


def part(name: str) -> str:
    """Return a file of `parts/`."""
    return (PARTS / name).read_text(encoding="utf-8")


def filled(template: str, places: Mapping[str, str]) -> str:
    """Return a template with the style sheet and these parts in their places.

    The text of a part may look like a place: it stays as it is, because all places are filled in one pass.
    """
    known = {"STYLE": part("look.css"), **places}
    return _PLACE.sub(lambda place: known[place[1]], part(template))


def still_page(title: str, body: str) -> str:
    """Return a page without scripts. body: HTML, in which all names are escaped."""
    return filled("still.html", {"TITLE": escape(title), "BODY": body})


def data_of(document: Mapping[str, Any]) -> str:
    """Return JSON that may stand in a script element.

    A name may contain anything, even the end of a script tag. As an escape, `<` is the same JSON.
    """
    return json_text(document).replace("<", "\\u003c")
