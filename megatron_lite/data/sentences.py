"""`--split-sentences`: text to sentences, by NLTK's Punkt, as Megatron does it for BERT and T5."""

from collections.abc import Callable

from megaconv.errors import UsageError
from megatron_lite.data.packages import package

LONGEST = 1_000_000
"""Characters that are split at once, as in Megatron: a longer text is also split there."""

Splitter = Callable[[str], list[str]]


def sentence_splitter(language: str, keep_newlines: bool) -> Splitter:
    """keep_newlines: the white space behind a sentence stays a part of it.

    Raises UsageError when NLTK or its data for the language are missing.
    """
    punkt = package("nltk.tokenize.punkt", "--split-sentences")
    try:
        tokenizer = punkt.PunktTokenizer(language)
    except (LookupError, ValueError):
        raise UsageError(
            f"--split-sentences: NLTK has no data for --lang {language}: python -m nltk.downloader punkt_tab, "
            "or set NLTK_DATA to where it is"
        ) from None

    def split(text: str) -> list[str]:
        sentences: list[str] = []
        for start in range(0, len(text), LONGEST):
            part = text[start : start + LONGEST]
            spans = list(tokenizer.span_tokenize(part))
            ends = [begin for begin, _ in spans[1:]] + [len(part)] if keep_newlines else [end for _, end in spans]
            sentences += [part[begin:end] for (begin, _), end in zip(spans, ends, strict=True)]
        return sentences

    return split
