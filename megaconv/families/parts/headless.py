"""Files without a head: transformers' class of a language model inside a multimodal model writes them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from formats.tensor import LazyTensor
from megaconv.families.parts.decoder_rows import EMBEDDING
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed

EMBEDDING_ALONE = replace(EMBEDDING, copies=())
"""The embedding's row for such files. With --base, the original's head is a tensor of the original, not a copy of this one."""


def tied_without(*heads: str) -> Callable[[ModelConfig, Mapping[str, LazyTensor]], ModelConfig]:
    """A function that gives a model tied embeddings if its files hold no head. heads: the names of a head."""

    def complete(config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> ModelConfig:
        if any(name in tensors for name in heads):
            return config
        return changed(config, {"tie_embeddings": True})

    return complete
