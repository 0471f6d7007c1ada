"""OpenAI's route /v1/embeddings: the vectors of texts, of rows of token ids, or of several of them."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.errors import CheckpointError
from megatron_lite.data.embedding_form import text_tokens
from megatron_lite.data.encoding import HALF_CHARACTER, has_half_character
from megatron_lite.inference.opening import Opened
from megatron_lite.inference.rows_together import TOKENS, batches
from megatron_lite.inference.server.errors import NoAnswer, NoRoom, Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_requests import model_of
from megatron_lite.inference.server.responses import Deadline
from megatron_lite.inference.server.worker import Worker
from megatron_lite.inference.slots import VectorModel
from megatron_lite.models.purposes import refuse_embedding

MOST_TEXTS = 2048
"""Texts of a request, as at OpenAI."""
FORMATS = ("float", "base64")


@dataclass(frozen=True)
class WantedVectors:
    """A client's request."""

    rows: tuple[tuple[int, ...], ...]
    """The tokens of each text."""
    pooling: str
    dimensions: int
    """Numbers of a vector: the first ones of the model's."""
    encoding: str
    """One of FORMATS."""
    model: str
    """The name that the answer states."""
    adapter: int | None
    """See slots.Feed."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


def read_embeddings(fields: Fields, opened: Opened, name: str) -> WantedVectors:
    """Read a request. Raises Refused."""
    model, adapter = model_of(fields.any("model"), opened, name)
    try:
        refuse_embedding(opened.config, name)
        form = opened.embedding_form(adapter)
    except CheckpointError as error:
        raise Refused(str(error), "model", "unsupported") from error
    prompt = _prompt(fields.any("prompt_name"), form.prompts)
    texts = fields.texts("input", MOST_TEXTS)
    width = opened.config.hidden
    dimensions = fields.integer("dimensions", width, 1, width)
    encoding = fields.any("encoding_format") or "float"
    if encoding not in FORMATS:
        raise Refused(
            f"encoding_format should be {' or '.join(FORMATS)}, found {encoding!r:.60}",
            "encoding_format",
        )
    fields.finish()
    rows = tuple(_row(text, prompt, opened) for text in texts)
    return WantedVectors(rows, form.pooling, dimensions, encoding, model, adapter)


def _prompt(asked: Any, known: Any) -> str:
    """Return the prompt of this name, an extension of sentence-transformers and its servers; without a name, none."""
    if asked is None:
        return ""
    if not isinstance(asked, str) or asked not in known:
        names = ", ".join(map(repr, known)) or "none"
        raise Refused(
            f"prompt_name {asked!r:.60} is not known; the model has {names}", "prompt_name"
        )
    return str(known[asked])


def _row(value: Any, prompt: str, opened: Opened) -> tuple[int, ...]:
    """Return the tokens of a text. A row of token ids stays as it is."""
    most, vocab = opened.model.length, opened.config.vocab
    if isinstance(value, str):
        try:
            row = tuple(text_tokens(opened.tokenizer, prompt + value))
        except (CheckpointError, ValueError, TypeError) as error:
            why = HALF_CHARACTER if has_half_character(value) else error
            raise Refused(f"the text {value[:60]!r} can't be tokenized: {why}", "input") from error
    elif isinstance(value, list) and value and all(type(token) is int for token in value):
        row = tuple(value)
    else:
        raise Refused(f"a text should be a text or token ids, found {value!r:.60}", "input")
    if not all(0 <= token < vocab for token in row):
        raise Refused(f"a text has a token outside the model's vocabulary of {vocab:,}", "input")
    if len(row) > most:
        why = f"a text has {len(row)} tokens; the model takes up to {most}"
        raise NoRoom(why, len(row), "input")
    return row


def _embed(
    rows: Sequence[Sequence[int]], pooling: str, adapter: int | None
) -> Callable[[VectorModel], Tensor]:
    """Return the function that computes the vectors of these rows."""

    def embed(model: VectorModel) -> Tensor:
        return model.embed(rows, pooling, adapter)

    return embed


async def answer(wanted: WantedVectors, worker: Worker, deadline: Deadline) -> dict[str, Any]:
    """Compute the vectors and return OpenAI's answer. Raises Overloaded, TimedOut and NoAnswer.

    Many texts are computed in several turns, so that running answers go on between them.
    """
    found: dict[int, Tensor] = {}
    for numbers in batches(list(map(len, wanted.rows)), TOKENS):
        rows = [wanted.rows[number] for number in numbers]
        computing = worker.between(_embed(rows, wanted.pooling, wanted.adapter))
        made = await deadline.of(computing)
        found |= dict(zip(numbers, made, strict=True))
    vectors = torch.stack([found[number] for number in range(len(wanted.rows))])
    if not bool(vectors.isfinite().all()):
        raise NoAnswer
    shortened = F.normalize(vectors[:, : wanted.dimensions], dim=1)
    return {
        "object": "list",
        "data": _data(shortened, wanted.encoding),
        "model": wanted.model,
        "usage": {"prompt_tokens": wanted.tokens, "total_tokens": wanted.tokens},
    }


def _data(vectors: Tensor, encoding: str) -> Sequence[dict[str, Any]]:
    """Return the vectors as objects, each a list of numbers or the bytes of its float32 in base64."""
    numbers = vectors.numpy().astype(np.dtype("<f4"))
    found = []
    for index, row in enumerate(numbers):
        is_base64 = encoding == "base64"
        value = base64.b64encode(row.tobytes()).decode() if is_base64 else row.tolist()
        found.append({"object": "embedding", "index": index, "embedding": value})
    return found
