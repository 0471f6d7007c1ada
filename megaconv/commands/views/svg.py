"""Elements of SVG drawings in pages without scripts. The classes are those of `parts/look.css`."""

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 1000
"""Width of a drawing in its own units. A page scales it."""


def drawn(height: float, spoken: str, lines: Sequence[str]) -> str:
    """Return a drawing of these elements. spoken: its description for screen readers."""
    start = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(spoken)}">'
    return "\n".join([start, *lines, "</svg>"])


def text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(words)}</text>'


def key(colour: int) -> str:
    """Return a small square in a colour of the style sheet."""
    box = f'<rect class="p{colour}" width="12" height="12"/>'
    return f'<svg class="key" viewBox="0 0 12 12" aria-hidden="true">{box}</svg>'


def legend(entries: Iterable[tuple[int, str]]) -> str:
    """Return names with their colours. entries: (colour, name)."""
    items = (f"<li>{key(colour)}{escape(name)}</li>" for colour, name in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'
