"""Images in the text of a chat: the chat template writes a word for each, which becomes the text of the image."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

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
    token: str = ""
    """The text of a token of which an image may have thousands. Each run of it is written as a single one, for `multiplied`.

    Without it, the texts are written as they are.
    """

    def put_into(self, whole: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
        """Return a rendered chat with its images, and the spans without the images. Raises BadRecord."""
        parts = whole.split(self.word)
        require_as_many(len(self.texts), len(parts) - 1)
        made = ""
        moved: list[Span] = []
        start = 0
        for part, text in zip_longest(parts, self._short_texts(), fillvalue=""):
            end = start + len(part)
            inside = [(max(first, start), min(last, end)) for first, last in spans]
            shift = len(made) - start
            moved += [(first + shift, last + shift) for first, last in inside if first < last]
            made += part + text
            start = end + len(self.word)
        return made, moved

    def multiplied(
        self, ids: Sequence[int], learned: Sequence[bool], token: int
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a chat with all of each run, and their marks. token: number of `token`. Raises BadRecord."""
        lengths = [length for text in self.texts for length in _runs(text, self.token).lengths]
        if ids.count(token) != len(lengths):
            raise BadRecord(f"has {self.token} in a text, which stands for images; take it out")
        counts = np.ones(len(ids), np.int64)
        counts[np.array(ids) == token] = lengths
        return np.repeat(ids, counts).tolist(), np.repeat(learned, counts).tolist()

    def _short_texts(self) -> Sequence[str]:
        if not self.token:
            return self.texts
        return [_runs(text, self.token).short for text in self.texts]


class _Runs(NamedTuple):
    """A text with one token in place of each run of the same token."""

    short: str
    lengths: tuple[int, ...]


@lru_cache(256)
def _runs(text: str, token: str) -> _Runs:
    pattern = re.compile(f"(?:{re.escape(token)})+")
    lengths = tuple(len(run) // len(token) for run in pattern.findall(text))
    return _Runs(pattern.sub(lambda run: token, text), lengths)


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
