"""The tokenizer of Yuan 1.0 (`EncDecTokenizer`): jieba's words, split into the longest known pieces.

    vocab.txt        a piece a line; <eod>, <unk>, <pad>; U+2582 stands for a space, U+2583 for the end of a line
    words            jieba.cut of the text
    pieces           from the left, the longest one in the vocabulary. A piece without Chinese characters that
                     doesn't begin its word begins with ##. A character that no piece begins with is <unk>
    spaces           one space between two pieces without Chinese characters has no token

Source: megatron/tokenizer/tokenization_enc_dec.py of Yuan-1.0.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from megatron_lite.data.packages import package

END, UNKNOWN, PAD = "<eod>", "<unk>", "<pad>"
_SPACE, _NEWLINE = "\u2582", "\u2583"
_STORED = str.maketrans(" \n", _SPACE + _NEWLINE)
_SHOWN = str.maketrans(_SPACE + _NEWLINE, " \n")
_CONTINUES = "##"
_LONGEST = 200
"""Characters of a word. A longer word is <unk>."""


class ChineseTokenizer:
    """Words of jieba in pieces of a vocabulary. It adds no begin and no end token."""

    def __init__(self, vocab_file: Path) -> None:
        """Raises CorruptCheckpoint for a file that isn't such a vocabulary, UsageError without jieba."""
        try:
            lines = vocab_file.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(
                f"{vocab_file}: is not a vocabulary in UTF-8: {error}"
            ) from error
        if not lines[-1]:
            lines.pop()  # behind the last line
        self._numbers = {line.strip(): number for number, line in enumerate(lines)}
        missing = [word for word in (END, UNKNOWN, _SPACE) if word not in self._numbers]
        if missing:
            raise CorruptCheckpoint(
                f"{vocab_file}: has no {', '.join(missing)}; it is not a vocabulary of an EncDecTokenizer"
            )
        self._pieces = {number: piece for piece, number in self._numbers.items()}
        self._space = self._numbers[_SPACE]
        self._cut = _words_of_jieba()
        self.vocab_size = len(lines)
        self.eod: int | None = self._numbers[END]
        self.pad: int | None = self._numbers.get(PAD)
        self.bos: int | None = None
        self.begin: list[int] = []

    def tokenize(self, text: str) -> list[int]:
        words = (word.translate(_STORED) for word in self._cut(text))
        ids = [number for word in words for number in self._split(word)]
        inner = zip(ids, ids[1:], ids[2:], strict=False)
        kept = (
            number for before, number, after in inner if not self._is_implied(before, number, after)
        )
        return [*ids[:1], *kept, *ids[1:][-1:]]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text. A piece with ## continues the word before it."""
        known = [number for number in ids if number != self.eod]
        return self.spelled(known)

    def spelled(self, ids: Sequence[int]) -> str:
        return "".join(self._shown(ids)).translate(_SHOWN)

    def _split(self, word: str) -> Iterator[int]:
        """Yield the pieces of a word."""
        start = 0 if len(word) <= _LONGEST else len(word)
        if start:
            yield self._numbers[UNKNOWN]
        while start < len(word):
            number, start = self._longest(word, start)
            yield number

    def _longest(self, word: str, start: int) -> tuple[int, int]:
        """(the longest piece of a word from `start`, its end)."""
        for end in range(len(word), start, -1):
            part = word[start:end]
            continues = start > 0 and not _is_chinese(part)
            number = self._numbers.get(_CONTINUES + part if continues else part)
            if number is not None:
                return number, end
        return self._numbers[UNKNOWN], start + 1

    def _is_implied(self, before: int, number: int, after: int) -> bool:
        return number == self._space and self._joins(before) and self._joins(after)

    def _joins(self, number: int) -> bool:
        """True if a piece is separated by an implied space from another such piece."""
        return number != self._space and not _is_chinese(self._piece(number))

    def _piece(self, number: int) -> str:
        """The text of a token. A model's vocabulary is padded, so that it may have more tokens than the file."""
        return self._pieces.get(number, UNKNOWN)

    def _shown(self, ids: Sequence[int]) -> Iterator[str]:
        if ids:
            yield self._piece(ids[0])
        for before, number in pairwise(ids):
            piece = self._piece(number)
            both = self._joins(before) and self._joins(number)
            if both and piece.startswith(_CONTINUES):
                yield piece.removeprefix(_CONTINUES)
            else:
                yield f" {piece}" if both else piece


def _is_chinese(text: str) -> bool:
    """True if a text has a Chinese character."""
    return any("\u4e00" <= letter <= "\u9fff" for letter in text)


def _words_of_jieba() -> Any:
    """Return jieba's function that cuts a text into words.

    The dictionary is read from the package. jieba itself keeps a copy in the temporary directory, where anyone may
    write.
    """
    jieba = package("jieba", "EncDecTokenizer", "chinese")
    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return cutter.cut
