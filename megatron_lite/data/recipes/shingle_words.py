"""The words of which near-duplicates have in common. datatrove's own tokenizer for English is spaCy, 30 times slower."""

import re

from datatrove.utils.word_tokenizers import WordTokenizer

_WORD = re.compile(r"\w+")


class Words(WordTokenizer):  # type: ignore[misc, unused-ignore]  # datatrove has no types
    """Splits a text into words for datatrove's MinHash."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words in lower case."""
        return _WORD.findall(text.lower())

    def sent_tokenize(self, text: str) -> list[str]:
        """Return the text as one sentence. MinHash doesn't use it."""
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return the place of the only sentence. MinHash doesn't use it."""
        return [(0, len(text))]
