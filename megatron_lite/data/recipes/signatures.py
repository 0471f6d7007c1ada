"""Hashes of a text's n-grams for MinHash: the same numbers as datatrove's, in half of the time.

    text       lower case, numbers as 0, punctuation as spaces; then letters without their marks (NFD, category Mn)
    n-gram     xxh64 of N words with a space between them

datatrove looks up the category of every character. Here only characters beyond ASCII are looked up. Source:
pipeline/dedup/minhash.py and utils/text.py of datatrove 0.10.1.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import xxhash
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.text import simplify_text

from megatron_lite.data.recipes.shingle_words import Words

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")
_NO_WORDS = str.maketrans(
    {code: " " for code in range(128) if not chr(code).isalnum() and chr(code) != "_"}
)
"""The ASCII characters that stand between words."""


class Signatures(MinhashDedupSignature):  # type: ignore[misc, unused-ignore]  # datatrove has no types
    """datatrove's first stage of MinHash."""

    def __init__(self, output: str, config: MinhashConfig) -> None:
        """output: a directory for the signatures. config: with 64-bit xxhash, which is datatrove's default."""
        super().__init__(output, config=config, language=Words())
        # Words are the same, whatever stands between them.
        self._simple = replace(
            config.norm_config, norm_whitespace=False, norm_unicode_diacritics=False
        )

    def get_shingles(self, text: str) -> npt.NDArray[np.uint64]:
        """Return the hashes of all n-grams of a text [n-grams, 1]."""
        words = self._words(without_marks(simplify_text(text, self._simple)))
        shifted = [words[first:] for first in range(self.config.n_grams)]
        ngrams = map(" ".join, zip(*shifted, strict=False))
        return np.fromiter(map(xxhash.xxh64_intdigest, ngrams), np.uint64).reshape(-1, 1)

    def _words(self, text: str) -> Sequence[str]:
        if text.isascii():
            return text.translate(_NO_WORDS).split()
        words: Sequence[str] = self.word_tokenizer.word_tokenize(text)
        return words


def without_marks(text: str) -> str:
    """Return a text without the marks on its letters: decomposed (NFD), without characters of category Mn.

    Decomposition changes no ASCII character and moves nothing past one.
    """
    return text if text.isascii() else _BEYOND_ASCII.sub(_unmarked, text)


def _unmarked(found: re.Match[str]) -> str:
    decomposed = unicodedata.normalize("NFD", found[0])
    return "".join(letter for letter in decomposed if unicodedata.category(letter) != "Mn")
