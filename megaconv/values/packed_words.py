"""Integers of 4 or 8 bits that compressed-tensors, GPTQ and AWQ pack into int32 words.

A word holds the numbers of the lowest bits first. Each number has half of its range added, so that it is 0 or more.
compressed-tensors packs weights along rows, zero points along columns. Source: compressed-tensors 0.20.
"""

from dataclasses import dataclass

from formats.lazy_numpy import np
from formats.tensor import Box, Bytes, LazyTensor, Shape
from megaconv.values.scaled import read_bytes


@dataclass(frozen=True)
class RowWords:
    """A matrix [rows, cols] of int8 numbers; a word holds numbers of one row."""

    values: LazyTensor
    """[rows, words] int32, the last word of a row padded."""
    shape: Shape
    bits: int
    order: tuple[int, ...] = ()
    """The place in a word of each of its numbers, counted from the lowest bits; empty: one after another."""
    adds_one: bool = False
    """True if each number is stored less 1."""
    dtype: str = "int8"

    def read_into(self, box: Box, out: Bytes) -> None:
        per_word = 32 // self.bits
        first, last = box.col0 // per_word, -(-box.col1 // per_word)
        words = read_bytes(self.values, Box(box.row0, box.row1, first, last), itemsize=4)
        codes = self._codes(words)
        start = box.col0 - per_word * first
        np.copyto(out, _signed(codes[:, start : start + box.cols], self.bits))

    def _codes(self, words: Bytes) -> Bytes:
        """Bytes of words [rows, 4 * words] -> one byte for each number [rows, numbers]."""
        if self.adds_one:
            words = (words.view(np.uint32) + _ones(self.bits)).view(np.uint8)
        codes = _split(words, self.bits).reshape(len(words), -1)
        if not self.order:
            return codes
        of_words = codes.reshape(len(words), -1, len(self.order))
        return of_words[:, :, list(self.order)].reshape(codes.shape)


@dataclass(frozen=True)
class ColumnWords:
    """A matrix [rows, cols] of int8 numbers; a word holds numbers of one column."""

    values: LazyTensor
    """[words, cols] int32, the last word of a column padded."""
    shape: Shape
    bits: int
    dtype: str = "int8"

    def read_into(self, box: Box, out: Bytes) -> None:
        per_word = 32 // self.bits
        first, last = box.row0 // per_word, -(-box.row1 // per_word)
        words = read_bytes(self.values, Box(first, last, box.col0, box.col1), itemsize=4)
        codes = _split(words, self.bits).reshape(last - first, box.cols, per_word)
        by_row = codes.transpose(0, 2, 1).reshape(-1, box.cols)
        start = box.row0 - per_word * first
        np.copyto(out, _signed(by_row[start : start + box.rows], self.bits))


def _ones(bits: int) -> "np.uint32":
    """A word whose numbers are all 1."""
    return np.uint32(sum(1 << place for place in range(0, 32, bits)))


def _split(words: Bytes, bits: int) -> Bytes:
    """Bytes of words -> one byte for each number."""
    if bits == 8:
        return words
    return np.stack([words & 15, words >> 4], axis=-1)


def _signed(codes: Bytes, bits: int) -> Bytes:
    """Numbers of 0 or more -> the bytes of int8 numbers. The subtraction wraps around, as these bytes do."""
    half: int = 1 << (bits - 1)
    return codes - np.uint8(half)
