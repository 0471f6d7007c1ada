"""An embedder of passages and questions by a decoder, or by the towers of a biencoder."""

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megaconv.errors import UsageError
from megaconv.model.fields import changed
from megatron_lite.checkpoint.restore import Start, open_weights
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.embedding_form import (
    DOCUMENT,
    QUERY,
    EmbeddingForm,
    read_form,
    text_tokens,
)
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.inference.opening import make_engine
from megatron_lite.inference.row_vectors import row_vectors
from megatron_lite.inference.rows_together import TOKENS, batches
from megatron_lite.inference.towers import fingerprint_of, tokenizer_of, towers_of
from megatron_lite.models.purposes import refuse_embedding
from megatron_lite.processes import launch
from megatron_lite.processes.failure import all_or_none
from megatron_lite.retrieval.embedder import Embedder, Passage, Vectors
from megatron_lite.retrieval.towers import TowerEmbedder
from megatron_lite.settings.architecture import check_against
from megatron_lite.settings.parallel import Parallel


@dataclass(frozen=True)
class DecoderEmbedder:
    """See embedder.Embedder. Each process has the whole model."""

    engine: Engine
    tokenizer: Tokenizer
    form: EmbeddingForm
    name: str
    fingerprint: str
    length: int
    """The most tokens of a text."""

    @property
    def width(self) -> int:
        return self.engine.config.hidden

    def passages(self, rows: Sequence[Passage]) -> Vectors:
        texts = [f"{row.title} {row.text}".strip() for row in rows]
        return self._vectors(texts, self.form.prompt(DOCUMENT))

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._vectors(texts, self.form.prompt(QUERY))

    def _vectors(self, texts: Sequence[str], prompt: str) -> Vectors:
        rows = [text_tokens(self.tokenizer, prompt + text, self.length) for text in texts]
        found = np.empty((len(rows), self.width), np.float32)
        with torch.inference_mode():
            for numbers in batches(list(map(len, rows)), TOKENS):
                made = row_vectors(self.engine, [rows[each] for each in numbers], self.form.pooling)
                assert made is not None
                found[numbers] = made.cpu().numpy()
        return found


def open_loaded(
    given: argparse.Namespace, load: str, name: str, length: int, place: launch.Place | None
) -> Embedder:
    """Open a biencoder or a decoder as an embedder. Collective. given: the flags of the tokenizer and of the model.

    name: of the embedder. length: the most tokens of a passage. place: None for a single process. Raises UsageError for another
    model, CheckpointError for a broken one.
    """
    here = place or launch.start(Parallel())
    start = all_or_none(lambda: open_weights(load))
    if start.config.family == "biencoder":
        towers = towers_of(given, start, load, here)
        length = _fitting(given, length, towers.seq_length, load)
        return TowerEmbedder(towers, name, length, length, given.indexer_batch_size)
    return _decoder(given, start, load, name, length, here)


def _fitting(given: argparse.Namespace, length: int, most: int, load: str) -> int:
    """Return the most tokens of a text: those asked for, else as many as the model has positions. Raises UsageError."""
    if given.seq_length is not None and length > most:
        raise UsageError(f"--seq-length {length}: {load} has {most} positions; give at most these")
    return min(length, most)


def _decoder(
    given: argparse.Namespace, start: Start, load: str, name: str, length: int, here: launch.Place
) -> DecoderEmbedder:
    config = start.config
    refuse_embedding(config, f"--load {load}")
    if given.training is not None:
        check_against(given.training, config, {}, load)
    length = _fitting(given, length, config.max_positions, load)
    tokenizer = all_or_none(lambda: tokenizer_of(given, start))
    form = all_or_none(lambda: read_form(start.files))
    dtype = "float32" if here.device.type == "cpu" else config.dtype
    engine = make_engine(changed(config, {"dtype": dtype}), Parallel(), here, length)
    load_weights(engine, {key.name: tensor for key, tensor in start.tensors.items()})
    return DecoderEmbedder(engine, tokenizer, form, name, _fingerprint(start, form), length)


def _fingerprint(start: Start, form: EmbeddingForm) -> str:
    """Return a hash of all that vectors depend on: weights, pooling and prompts."""
    prompts = sorted(form.prompts.items())
    return hashlib.sha256(repr((fingerprint_of(start), form.pooling, prompts)).encode()).hexdigest()
