"""Images in the text of a chat: the chat template writes a word for each, which becomes the text of the image."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from formats.wording import counted
from megatron_lite.data.encoding import BadRecord

Span = tuple[int, int]
"""The characters [first, last) of a text."""


@dataclass(frozen=True)
class ImageTexts:
    """The texts of a chat's images."""

    word: str
    """The template writes it for each image."""
    texts: Sequence[str]

    def put_into(self, whole: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
        """Return a rendered chat with its images, and the spans without the images. Raises BadRecord."""
        parts = whole.split(self.word)
        require_as_many(len(self.texts), len(parts) - 1)
        made = ""
        moved: list[Span] = []
        start = 0
        for part, text in zip_longest(parts, self.texts, fillvalue=""):
            end = start + len(part)
            inside = [(max(first, start), min(last, end)) for first, last in spans]
            shift = len(made) - start
            moved += [(first + shift, last + shift) for first, last in inside if first < last]
            made += part + text
            start = end + len(self.word)
        return made, moved


def require_as_many(images: int, written: int) -> None:
    """Raise BadRecord if the text has another number of tokens of images than images."""
    if written != images:
        raise BadRecord(
            f"has {counted(images, 'image')}, and its text, as the chat template writes it, {counted(written, 'token')} of images; "
            "a text may not contain that token, and the template has to write one for each image"
        )


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, with one in place of those without a character between them."""
    found: list[Span] = []
    for first, last in spans:
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found
