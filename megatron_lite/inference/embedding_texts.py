"""`megatron-lite embed MODEL --input FILE`: the vectors of texts by a decoder, in any layout."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.errors import CheckpointError, UsageError
from megaconv.terminal import reason_of, show
from megatron_lite.data.embedding_form import EmbeddingForm, read_length, text_tokens
from megatron_lite.data.encoding import HALF_CHARACTER, has_half_character
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_lite.inference.generating import require_other_file
from megatron_lite.inference.opening import Opened, run
from megatron_lite.inference.rows_together import grouped
from megatron_lite.inference.slots import require_known
from megatron_lite.inference.vector_output import open_vectors
from megatron_lite.models.purposes import refuse_embedding

ROWS = 1024
"""Texts that are read together. The model computes those of similar length together."""
EXPECTED = 'expected {"text": ...} or a text in quotes'


@dataclass(frozen=True)
class _Asked:
    """The settings of the vectors."""

    prompt: str
    """The text before each text."""
    pooling: str
    length: int
    """The most tokens of a text."""
    dimensions: int


@dataclass(frozen=True)
class _Row:
    """The tokens of a text."""

    tokens: list[int]
    shortened: bool


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    if given.max_length is not None and given.max_length < 1:
        raise UsageError(f"--max-length {given.max_length} must be 1 or more")
    require_other_file(given.output, "--input", given.input)
    run(given, lambda opened: _use(opened, given))


def _use(opened: Opened, given: argparse.Namespace) -> None:
    """Embed the texts. Raises UsageError, and NotFinite if a vector is NaN or infinite."""
    refuse_embedding(opened.config, given.load)
    asked = _asked(opened, given)
    lines = _lines(given.input)
    # Check all texts before the output file is replaced, so that a bad line leaves it as it was.
    count = _check(opened, given.input, lines, asked)
    with open_vectors(given.output, count, asked.dimensions) as output:
        for rows in grouped(_rows(opened, given.input, lines, asked), ROWS):
            vectors = opened.model.embed([row.tokens for row in rows], asked.pooling)
            output.write(_first(vectors, asked.dimensions), [len(row.tokens) for row in rows])


def _asked(opened: Opened, given: argparse.Namespace) -> _Asked:
    """Return what the flags ask for, with what sentence-transformers' files say. Raises UsageError."""
    form, width = opened.embedding_form(None), opened.config.hidden
    dimensions = width if given.dimensions is None else given.dimensions
    if not 1 <= dimensions <= width:
        raise UsageError(f"--dimensions {dimensions} must be from 1 to {width}, the model's")
    prompt, pooling = _prompt(given, form), given.pooling or form.pooling
    return _Asked(prompt, pooling, given.max_length or _longest(opened), dimensions)


def _prompt(given: argparse.Namespace, form: EmbeddingForm) -> str:
    """Return the text before each text. Raises UsageError for a prompt that the model doesn't have."""
    if given.prompt_text is not None:
        return str(given.prompt_text)
    name = form.default_prompt if given.prompt is None else given.prompt
    if name is None:
        return ""
    if name not in form.prompts:
        names = ", ".join(map(repr, form.prompts)) or "none"
        raise UsageError(
            f"--prompt {name}: {given.load} has no such prompt, it has {names}; --prompt-text gives the text itself"
        )
    return form.prompts[name]


def _longest(opened: Opened) -> int:
    """Return the most tokens of a text without --max-length, as in sentence-transformers."""
    stated = read_length(opened.embedding_files(None))
    if stated is not None:
        return min(stated, opened.config.max_positions)
    tokenizer = opened.tokenizer
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return int(min(tokenizer.inner.model_max_length, opened.config.max_positions))
    return opened.config.max_positions


def _lines(path: str) -> list[str]:
    """Return the lines of the input. Raises UsageError."""
    try:
        # A file of Windows may begin with a byte order mark. A text may have other line ends within, such as U+2028.
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {reason_of(error)}") from error
    return text.removesuffix("\n").split("\n") if text else []


def _check(opened: Opened, path: str, lines: list[str], asked: _Asked) -> int:
    """Return the number of texts, and warn of texts that are shortened. Raises UsageError."""
    count = shortened = 0
    for row in _rows(opened, path, lines, asked):
        count += 1
        shortened += row.shortened
    if not count:
        raise UsageError(f"{path}: holds no texts")
    if shortened:
        show(
            f"megatron-lite: warning: {path}: {shortened:,} of {count:,} texts are longer than {asked.length:,} tokens and are shortened",
            sys.stderr,
        )
    return count


def _rows(opened: Opened, path: str, lines: list[str], asked: _Asked) -> Iterator[_Row]:
    """Yield the tokens of each text. Raises UsageError with the line."""
    for where, text in _texts(path, lines):
        row = _row(opened.tokenizer, text, asked, where)
        try:
            require_known(row.tokens, opened.config.vocab)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        yield row


def _row(tokenizer: Tokenizer, text: str, asked: _Asked, where: str) -> _Row:
    """Return the tokens of a text. Raises UsageError if it has none, or more than allowed without its own ones."""
    whole = asked.prompt + text
    try:
        tokens = text_tokens(tokenizer, whole)
        shortened = len(tokens) > asked.length
        if shortened:
            tokens = text_tokens(tokenizer, whole, asked.length)
    except (CheckpointError, ValueError, TypeError) as error:
        why = HALF_CHARACTER if has_half_character(whole) else error
        raise UsageError(f"{where}: {why}") from error
    # A tokenizer doesn't shorten a text to fewer tokens than it adds around it.
    if len(tokens) > asked.length:
        raise UsageError(
            f"--max-length {asked.length}: the tokenizer adds more tokens to each text; give a larger number"
        )
    return _Row(tokens, shortened)


def _texts(path: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each text. Raises UsageError."""
    is_json = path.endswith((".jsonl", ".json"))
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if is_json:
            if line.strip():
                yield where, _text_of(line, where)
            continue
        # Without the line, the vectors would have other numbers than the lines.
        if not line.strip():
            raise UsageError(f"{where}: is an empty line; each line should be a text")
        yield where, line


def _text_of(line: str, where: str) -> str:
    """Return the text of a JSON line. Raises UsageError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: is not JSON: {error}; {EXPECTED}") from error
    text: Any = record.get("text") if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise UsageError(f"{where}: {EXPECTED}, found {json.dumps(record)[:60]}")
    return text


def _first(vectors: Tensor, dimensions: int) -> Tensor:
    """Return the first numbers of each vector, with length 1 again."""
    if dimensions == vectors.shape[1]:
        return vectors
    return F.normalize(vectors[:, :dimensions], dim=1)
