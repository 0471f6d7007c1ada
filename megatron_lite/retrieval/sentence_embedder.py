"""Embeds texts by a model of sentence-transformers, with its own pooling."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from formats.errors import CorruptCheckpoint
from megaconv.extras import require_torch
from megatron_lite.data.packages import package
from megatron_lite.retrieval.directory_hash import hash_of_weights
from megatron_lite.retrieval.embedder import Vectors


class SentenceEmbedder:
    """A directory of sentence-transformers (it has modules.json)."""

    def __init__(self, name: str, directory: Path, batch: int) -> None:
        """batch: texts at once. Raises CorruptCheckpoint, UsageError."""
        require_torch("an embedder", "train,data")
        module = package("sentence_transformers", "this embedder", "retrieval")
        package("transformers", "this embedder").utils.logging.disable_progress_bar()
        try:
            model = module.SentenceTransformer(
                str(directory), trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CorruptCheckpoint(
                f"{directory}: sentence-transformers can't load it: {error}"
            ) from error
        self._model: Any = model
        self.name = name
        self.fingerprint = hash_of_weights(directory)
        self._batch = batch
        self.width = int(self.embed(["a"]).shape[1])

    def count(self, text: str) -> int:
        tokens: list[int] = self._model.tokenizer(text, add_special_tokens=False).input_ids
        return len(tokens)

    def embed(self, texts: Sequence[str]) -> Vectors:
        found = self._model.encode(
            list(texts), batch_size=self._batch, convert_to_numpy=True, show_progress_bar=False
        )
        return np.asarray(found, np.float32)
