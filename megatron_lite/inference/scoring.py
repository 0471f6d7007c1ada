"""`megatron-lite score`: log-probabilities of given tokens, in any layout; for example for reinforcement learning."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.terminal import reason_of, show
from megatron_lite.inference.generating import open_output, require_other_file
from megatron_lite.inference.opening import Opened, run
from megatron_lite.inference.prompts import encode, tokens_of
from megatron_lite.inference.rows_together import grouped
from megatron_lite.inference.slots import NotFinite, Scored, require_top

ROWS = 64
"""Number of rows that are read and scored together."""


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    if given.top < 0:
        raise UsageError(f"--top {given.top} must be 0 or more")
    require_other_file(given.output, "--input", given.input)
    run(given, lambda opened: _use(opened, given))


def _use(opened: Opened, given: argparse.Namespace) -> None:
    """Score the rows. Raises NotFinite at the end if a row had NaN or infinite logits."""
    require_top("--top", given.top, opened.config.vocab)
    failed = False
    lines = _lines(given.input)
    # Check all rows before the output file is replaced, so that a bad line leaves it as it was.
    longest = max((len(tokens) for tokens, _ in _rows(opened, given.input, lines)), default=0)
    if not longest:
        raise UsageError(f"{given.input}: holds no rows to score")
    _warn_of_length(opened.config, longest, given.input)
    with open_output(given.output) as file:
        for rows in grouped(_rows(opened, given.input, lines), ROWS):
            scored = opened.model.score([tokens for tokens, _ in rows], given.top)
            for (tokens, first), found in zip(rows, scored, strict=True):
                line = _line(tokens, first, found, given.top)
                failed |= "error" in line
                print(json.dumps(line), file=file, flush=True)
    if failed:
        raise NotFinite


def _line(tokens: list[int], first: int, found: Scored, top: int) -> dict[str, Any]:
    """Return the output line of a row. first: index of the first token that counts."""
    log_probs = found.log_probs[first - 1 :]
    if not bool(log_probs.isfinite().all()):  # JSON can't represent NaN and infinity
        return {"tokens": tokens[first:], "error": str(NotFinite())}
    line: dict[str, Any] = {
        "tokens": tokens[first:], "log_probs": log_probs.tolist(),
        "sum": float(log_probs.double().sum()), "greedy": bool(found.greedy[first - 1 :].all()),
    }  # fmt: skip
    if top:
        pairs = zip(
            found.top_ids[first - 1 :].tolist(),
            found.top_log_probs[first - 1 :].tolist(),
            strict=True,
        )
        line["top_log_probs"] = [list(map(list, zip(*pair, strict=True))) for pair in pairs]
    return line


def _lines(path: str) -> list[str]:
    """Return the lines of the input. Raises UsageError."""
    try:
        # A file of Windows may begin with a byte order mark. A text in JSON may have other line ends within, such as U+2028.
        return Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {reason_of(error)}") from error


def _rows(opened: Opened, path: str, lines: list[str]) -> Iterator[tuple[list[int], int]]:
    """Yield (tokens, index of the first token that counts). Raises UsageError with the line."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: is not JSON: {error}") from error
        tokens, first = _row(opened, record, where)
        _check_row(opened.config, tokens, first, where)
        yield tokens, first


def _check_row(config: ModelConfig, tokens: list[int], first: int, where: str) -> None:
    """Raise UsageError for a row that can't be scored."""
    count = len(tokens)
    if first >= count:
        raise UsageError(
            f"{where}: has {count} tokens, none of which has others before it to be scored by"
        )
    if config.positions.kind == "learned" and count > config.max_positions:
        raise UsageError(
            f"{where}: has {count} tokens, and the model only {config.max_positions} positions; shorten the row"
        )
    for token in tokens:
        if not 0 <= token < config.vocab:
            raise UsageError(
                f"{where}: token {token} is outside the model's vocabulary of {config.vocab}"
            )


def _warn_of_length(config: ModelConfig, longest: int, path: str) -> None:
    """Print a warning of rows that are longer than those for which the model was made. longest: tokens of a row."""
    most = config.max_positions
    if config.positions.kind == "rope" and longest > most:
        show(
            f"megatron-lite: warning: {path}: rows of up to {longest} tokens exceed the model's {most} positions: "
            "the positions beyond are extrapolated",
            sys.stderr,
        )


def _row(opened: Opened, record: Any, where: str) -> tuple[list[int], int]:
    fields = record if isinstance(record, dict) else {}
    tokenizer = opened.tokenizer
    tokens = fields.get("tokens")
    text = fields.get("text")
    prompt = fields.get("prompt")
    completion = fields.get("completion")
    if isinstance(tokens, list) and all(type(token) is int for token in tokens):
        return tokens, 1
    try:
        if isinstance(text, str):
            return list(encode(tokenizer, text)), 1
        if isinstance(prompt, str) and isinstance(completion, str):
            before = encode(tokenizer, prompt)
            after = tokens_of(tokenizer, completion)
            return [*before, *after], max(len(before), 1)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    found = json.dumps(record)[:60]
    raise UsageError(
        f'{where}: expected {{"tokens": [...]}}, {{"text": ...}} or {{"prompt": ..., "completion": ...}}, found {found}'
    )
