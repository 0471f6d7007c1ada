"""Sentences for BERT and T5: found with NLTK's Punkt as in Megatron (`--split-sentences`), or the lines of a text."""

from collections.abc import Callable

from megaconv.errors import UsageError
from megatron_lite.data.packages import package

LONGEST = 1_000_000
"""Characters split at a time, as in Megatron. A longer text is also split at these places."""

Splitter = Callable[[str], list[str]]


def sentence_splitter(language: str, keep_newlines: bool) -> Splitter:
    """Return a function that splits a text. keep_newlines: the white space after a sentence stays part of it.

    Raises UsageError if NLTK or its data for the language are missing.
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
            ends = (
                [begin for begin, _ in spans[1:]] + [len(part)]
                if keep_newlines
                else [end for _, end in spans]
            )
            sentences += [part[begin:end] for (begin, _), end in zip(spans, ends, strict=True)]
        return sentences

    return split


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that has one sentence a line (`--presplit-sentences`), without empty lines."""
    lines = (line.strip() for line in text.split("\n"))
    return [line for line in lines if line]
