"""Embeds texts by an encoder of transformers: the mean of its last states, without special tokens.

As Megatron's BertModel(return_embeddings=True): no pooler, float32, texts truncated to the tokens that fit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.extras import require_torch
from megatron_lite.data.packages import package
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.retrieval.directory_hash import hash_of_weights
from megatron_lite.retrieval.embedder import Vectors


class EncoderEmbedder:
    """An encoder in a Hugging Face directory."""

    def __init__(self, name: str, directory: Path, batch: int, most_tokens: int) -> None:
        """batch: texts at once. most_tokens: of a row, with its special tokens. Raises CorruptCheckpoint, UsageError."""
        require_torch("an embedder", "train,data")
        transformers = package("transformers", "an embedder")
        import torch

        self.name = name
        self.fingerprint = hash_of_weights(directory)
        self._tokenizer = HuggingFaceTokenizer(str(directory))
        transformers.utils.logging.disable_progress_bar()
        try:
            model = transformers.AutoModel.from_pretrained(
                directory, dtype=torch.float32, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CorruptCheckpoint(
                f"{directory}: transformers can't load an encoder there: {error}"
            ) from error
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Any = model.eval().to(self._device)
        self.width = int(model.config.hidden_size)
        self._batch = batch
        positions = getattr(model.config, "max_position_embeddings", most_tokens)
        positions -= _first_position(model)
        self._before, self._behind = self._special_tokens()
        special = len(self._before) + len(self._behind)
        self._room = max(1, min(most_tokens, positions) - special)

    def count(self, text: str) -> int:
        return len(self._tokenizer.tokenize(text))

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = np.empty((len(texts), self.width), np.float32)
        for first in range(0, len(texts), self._batch):
            end = first + self._batch
            vectors[first:end] = self._embed(texts[first:end])
        return vectors

    def _embed(self, texts: Sequence[str]) -> Vectors:
        """Return the mean of the last states of each text's own tokens."""
        import torch

        ids, seen, counted = (
            torch.from_numpy(array).to(self._device) for array in self._padded(texts)
        )
        with torch.inference_mode():
            # [texts, tokens, width]
            states = self._model(input_ids=ids, attention_mask=seen).last_hidden_state
            mean = (states * counted).sum(1) / counted.sum(1)
        found: Vectors = mean.float().cpu().numpy()
        return found

    def _padded(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return (ids [texts, tokens], 1 for tokens and 0 for padding, 1 for the text's own tokens [texts, tokens, 1])."""
        pad = self._tokenizer.pad or 0
        own = [self._tokenizer.tokenize(text)[: self._room] or [pad] for text in texts]
        before, behind = self._before, self._behind
        longest = len(before) + max(map(len, own)) + len(behind)
        shape = len(own), longest
        ids = np.full(shape, pad, np.int64)
        seen = np.zeros(shape, np.int64)
        counted = np.zeros(shape, np.float32)
        start = len(before)
        for row, tokens in enumerate(own):
            whole = [*before, *tokens, *behind]
            ids[row, : len(whole)] = whole
            seen[row, : len(whole)] = 1
            counted[row, start : start + len(tokens)] = 1
        return ids, seen, counted[:, :, None]

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer puts before and behind a text."""
        plain = self._tokenizer.tokenize("a")
        complete: list[int] = self._tokenizer.inner("a").input_ids
        for start in range(len(complete) - len(plain) + 1):
            if complete[start : start + len(plain)] == plain:
                return complete[:start], complete[start + len(plain) :]
        return [], []


def _first_position(model: Any) -> int:
    """Return the position of the first token. RoBERTa counts from behind the number of its padding token."""
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1
