"""The heads that a Megatron checkpoint's tensors show: BERT's, those of a task, a biencoder's, and heads of scores."""

from typing import Any

from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.size_tensors import SizeTensors
from megaconv.megatron.states.ranks import Weights
from megaconv.model.config import ModelConfig

CLASSIFICATION, MULTIPLE_CHOICE = "classification_head.weight", "multichoice_head.weight"
"""Heads on a BERT's pooled first token, with the same names in core and legacy models."""
PROJECTION = "projection_enc.weight"
"""The projection of a biencoder's tower, with the same name in core and legacy models."""


def find_bert(first: Weights, last: Weights, names: SizeTensors) -> dict[str, Any]:
    """The fields of BERT's heads and token types; empty for a decoder."""
    heads = _find_heads(last, names)
    if not heads:
        return {}
    types = first[names.token_types].shape[0] if names.token_types in first else 0
    return heads | {"token_types": types}


def _find_heads(last: Weights, names: SizeTensors) -> dict[str, Any]:
    """The fields of BERT's heads: for words, or for a task; empty for a decoder.

    A task head has no word matrix that could be tied to the embedding.
    """
    if names.transform in last:
        return {"head.activation": "gelu", "head.binary": "binary_head.weight" in last}
    if CLASSIFICATION in last:
        return {"head.classes": last[CLASSIFICATION].shape[0], "tie_embeddings": False}
    if MULTIPLE_CHOICE in last:
        return {"head.choices": True, "tie_embeddings": False}
    return _find_towers(last, names) if names.tower else {}


def _find_towers(last: Weights, names: SizeTensors) -> dict[str, Any]:
    """The fields of a biencoder's towers and of their embeddings."""
    projection = last.get(names.tower + PROJECTION)
    return {
        "retriever.towers": "shared" if names.tower.startswith("shared") else "separate",
        "retriever.projection": 0 if projection is None else projection.shape[0],
        "retriever.pooler": names.pooler in last,
        "tie_embeddings": False,
    }


def find_scores(first: Weights, last: Weights, names: SizeTensors) -> dict[str, Any]:
    """The fields of a head of scores, which each tensor-parallel rank holds whole.

    A head for words has a row for each row of the embedding, on each rank.
    """
    head = last.get(names.head)
    if head is None or head.shape[0] == first[names.embedding].shape[0]:
        return {"head.labels": 0}
    has_bias = names.head.removesuffix("weight") + "bias" in last
    return {
        "head.labels": head.shape[0],
        "head.labels_bias": has_bias,
        # transformers has a bias in the classes for scores of tokens alone.
        "head.of_tokens": has_bias,
        "tie_embeddings": False,
    }


def require_scores_shown(config: ModelConfig, embedding_rows: int) -> None:
    """Raise NotExpressible if find_scores would read a model's head of scores as one for words.

    embedding_rows: of the embedding in one file, with padding.
    """
    if config.head.labels == embedding_rows:
        raise NotExpressible(
            f"the head has {embedding_rows} labels, as many as the embedding has rows (with padding), so that Megatron's files don't show "
            "that it gives scores; choose another --tp or --make-vocab-size-divisible-by"
        )
