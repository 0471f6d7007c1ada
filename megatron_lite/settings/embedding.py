"""Flags of embedding models, which give a text a vector."""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag

LAST, MEAN = "last", "mean"
POOLINGS = (LAST, MEAN)
"""The ways to pool the hidden states of a text's tokens: that of the last token, or the mean of all."""


@dataclass(frozen=True)
class Embedding:
    """Embedding models: a decoder learns vectors of texts from queries, and from documents that answer them or don't"""

    embedding: bool = flag(
        False,
        "--finetune-data holds queries, each with a document that answers it and, if it has any, others that don't; the vector of a "
        "query learns to be closest to that of its document",
        samples=True,
    )
    embedding_pooling: str | None = flag(
        None,
        "tokens whose hidden states make the vector of a text; default: those of the checkpoint's 1_Pooling/config.json, else last",
        choices=POOLINGS,
        samples=True,
    )
    embedding_temperature: float = flag(
        0.05, "cosines of vectors are divided by it before they are compared", samples=True
    )
    embedding_negatives: int = flag(
        0,
        "hard negatives of a sample: documents that don't answer its query. Of more, each epoch takes the next ones",
        samples=True,
    )
    embedding_query_prompt: str | None = flag(
        None,
        "text before each query; default: that of the checkpoint's config_sentence_transformers.json, else none",
        samples=True,
    )
    embedding_document_prompt: str | None = flag(
        None, "text before each document; default: as for queries", samples=True
    )
