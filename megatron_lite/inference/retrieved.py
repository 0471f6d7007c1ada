"""Generation with retrieved passages: `generate --retro-neighbors FILE`.

Each line of the file is {"prompt": ..., "neighbors": [text, ...]}. All chunks of a text have the same passages as
neighbors: the first ones, as many as the model has neighbors, each cut or padded to the tokens of a neighbor. Chunks
count from the start of the text, as in training (retrieving.py).
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megaconv.errors import UsageError
from megaconv.model.retrieving import Retrieval
from megaconv.terminal import reason_of
from megatron_lite.data.tokenizer import Tokenizer


class Retrieved(NamedTuple):
    """A prompt and its passages."""

    prompt: str
    neighbors: tuple[str, ...]


def read_retrieved(path: str) -> list[Retrieved]:
    """Read the file of --retro-neighbors. Raises UsageError with the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {reason_of(error)}") from error
    found = [
        _of_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise UsageError(f"{path}: has no prompt")
    return found


def _of_line(line: str, where: str) -> Retrieved:
    expected = '{"prompt": text, "neighbors": [text, ...]}'
    refused = UsageError(f"{where}: expected {expected}, found {line[:60]!r}")
    try:
        record = json.loads(line)
        prompt, neighbors = record["prompt"], record["neighbors"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refused from error
    if not isinstance(prompt, str) or not isinstance(neighbors, list) or not neighbors:
        raise refused
    if not all(isinstance(text, str) for text in neighbors):
        raise refused
    return Retrieved(prompt, tuple(neighbors))


def neighbors_of(retrieval: Retrieval, tokenizer: Tokenizer, asked: Retrieved) -> Tensor:
    """Return int64 [neighbors, tokens of a neighbor], padded with the end-of-document token. Raises UsageError."""
    eod = tokenizer.eod
    if eod is None:
        raise UsageError("--retro-neighbors: the tokenizer has no token that ends a document")
    texts = [*asked.neighbors, *[""] * retrieval.neighbors][: retrieval.neighbors]
    found = torch.full((retrieval.neighbors, retrieval.retrieved), eod)
    for row, text in enumerate(texts):
        tokens = tokenizer.tokenize(text)[: retrieval.retrieved] if text else []
        found[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return found
