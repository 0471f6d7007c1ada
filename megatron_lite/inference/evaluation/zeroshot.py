"""Megatron's zero-shot tasks: word perplexity of WikiText, and the last words of LAMBADA.

Windows, masks, texts and sums are those of tasks/zeroshot_gpt of Megatron-LM (datasets.py, detokenizer.py,
evaluate.py), which existed up to core 0.12. One difference: with several data-parallel ranks, Megatron counts some
samples twice to fill up batches.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.inference.evaluation.windows import ROWS, Window, grouped, log_prob_sum
from megatron_lite.inference.prompts import tokens_of
from megatron_lite.inference.slots import LanguageModel, require_finite

_HIGHEST = 20.0
"""Larger losses are clamped for perplexities, so that e^20 is the largest perplexity."""


def wikitext_windows(
    tokens: Sequence[int], length: int, stride: int | None = None
) -> Iterator[Window]:
    """Yield a text in rows of length + 1 tokens; each starts `stride` (default: length) after the previous row.

    Every token except the first counts once.
    """
    stride = stride or length
    count = max(math.ceil(max(len(tokens) - 1 - stride, 0) / stride) + 1, 1)
    for number in range(count):
        row = tuple(tokens[number * stride : number * stride + length + 1])
        # Tokens that the previous window counted.
        before = length - stride if number and stride != length else 0
        yield Window(row, len(row) - 1 - min(before, len(row) - 1))


def lambada_window(text: str, tokenize: Callable[[str], list[int]], *, strict: bool) -> Window:
    """Return the window of a text. strict: the last word counts, tokenized separately; else only the last token counts."""
    if not strict:
        return Window(tuple(tokenize(text)), 1)
    word = text.split()[-1]
    label = tokenize(" " + word)
    return Window((*tokenize(text[: text.rfind(word)].strip()), *label), len(label))


Replacements = tuple[tuple[str, str], ...]

_BEFORE_BRACKETS: Replacements = (
    ("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)  # fmt: skip
_PAIRS = (
    r"\(\s*([^\)]*?)\s*\)",
    r"\[\s*([^\]]*?)\s*\]",
    r"{\s*([^}]*?)\s*}",
    r'"\s*([^"]*?)\s*"',
    r"'\s*([^']*?)\s*'",
)
"""Brackets and quotes with spaces at their inner sides."""
_AFTER_BRACKETS: Replacements = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip
_PTB: Replacements = (
    (" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", "1 "), ("$ 1", "$1"), ("# 1", "#1"),
)  # fmt: skip


def wikitext_text(text: str) -> str:
    """Return the text as it was before its split into words."""
    text = _replaced(text, _BEFORE_BRACKETS)
    for pattern in _PAIRS:
        text = re.sub(pattern, lambda found: found[0][0] + found[1] + found[0][-1], text)
    return _replaced(text, _AFTER_BRACKETS)


def _replaced(text: str, replacements: Replacements) -> str:
    for old, new in replacements:
        text = text.replace(old, new)
    return text


def text_of(path: Path) -> Callable[[str], str]:
    """Return the function that joins the words of a dataset. As in Megatron, the path determines it. Raises UsageError."""
    known: dict[str, Callable[[str], str]] = {
        "ptb": lambda text: _replaced(text, _PTB),
        "wiki": wikitext_text,
        "lambada": lambda text: text,
    }
    for word, join in known.items():
        if word in str(path):
            return join
    raise UsageError(
        f"{path}: nothing in this path says how its words are to be joined; it should have one of {', '.join(known)} in it"
    )


def wikitext(
    model: LanguageModel, tokenizer: Tokenizer, path: Path, length: int, stride: int | None = None
) -> dict[str, float]:
    """Return loss and perplexity by token and by word. Raises UsageError, CorruptCheckpoint, NotFinite."""
    if stride is not None and not 0 < stride <= length:
        raise UsageError(
            f"--overlapping-eval {stride} must be between 1 and the sequence length, {length}"
        )
    text = _read(path)
    words = len(text.strip().split(" "))
    tokens = _tokens(tokenizer, text_of(path)(text), str(path))
    count = len(tokens)
    if count < 2 or words < 2:
        raise CorruptCheckpoint(
            f"{path}: has {words} words and {count} tokens; there is nothing to predict"
        )
    total = 0.0
    for windows in grouped(wikitext_windows(tokens, length, stride), ROWS):
        total -= log_prob_sum(model, windows)
    predicted = count - 1
    loss = total / predicted
    ratio = predicted / (words - 1)
    by_word = loss * ratio
    return {
        "loss": loss,
        "perplexity": math.exp(min(_HIGHEST, loss)),
        "word_perplexity": math.exp(min(_HIGHEST, by_word)),
        "token_ratio": ratio,
        "tokens": count,
        "words": words,
    }


def lambada(
    model: LanguageModel, tokenizer: Tokenizer, path: Path, *, strict: bool
) -> dict[str, float]:
    """Return how many last words (strict) or tokens are the likeliest ones. Raises UsageError, CorruptCheckpoint, NotFinite."""
    right = 0
    count = 0
    for windows in grouped(_lambada_windows(path, tokenizer, strict=strict), ROWS):
        longest = max(len(window.tokens) for window in windows)
        if longest > model.length:
            raise UsageError(
                f"{path}: has a text of {longest} tokens, and the model takes {model.length}; leave longer texts out"
            )
        scores = model.score([window.tokens for window in windows])
        for window, scored in zip(windows, scores, strict=True):
            require_finite(scored)
            first_counted = len(window.tokens) - 1 - window.counted
            right += bool(scored.greedy[first_counted:].all())
            count += 1
    if not count:
        raise CorruptCheckpoint(f"{path}: has no lines")
    return {"accuracy": right / count, "right": right, "examples": count}


def _lambada_windows(path: Path, tokenizer: Tokenizer, *, strict: bool) -> Iterator[Window]:
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            text: Any = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            start = line[:60]
            raise CorruptCheckpoint(
                f'{where}: expected {{"text": ...}}, found {start!r}'
            ) from error
        if not isinstance(text, str) or not text.strip():
            raise CorruptCheckpoint(f"{where}: has no text")
        encode = partial(_tokens, tokenizer, where=where)
        window = lambada_window(text, encode, strict=strict)
        if len(window.tokens) <= window.counted:
            raise CorruptCheckpoint(f"{where}: has one word alone, and nothing to predict it by")
        yield window


def _tokens(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    """Return the tokens of a text. Raises CorruptCheckpoint with the place if the tokenizer refuses the text."""
    try:
        return tokens_of(tokenizer, text)
    except UsageError as error:
        raise CorruptCheckpoint(f"{where}: {error}") from error


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # line ends stay as they are
            return file.read()
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path}: is not UTF-8: {error}") from error
