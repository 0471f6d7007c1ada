"""Translates between Megatron's arguments of Retro, and the configuration.

    retro_add_retriever             True; the tensors show it too
    retro_encoder_layers            layers of the encoder, which the tensors show
    retro_chunk_length              tokens of a chunk, from the project's config.json (retro_gpt_chunk_length there)
    retro_num_neighbors, retro_num_retrieved_chunks

Source: arguments.py and retro/config.py of Megatron-LM, core_v0.15.3.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible, UnknownFamily
from megaconv.model.config import ModelConfig

_SIZES = {
    "retro_chunk_length": "retrieval.chunk",
    "retro_num_neighbors": "retrieval.neighbors",
    "retro_num_retrieved_chunks": "retrieval.chunks",
}
NEEDED_OF_RETRIEVAL = {field: name for name, field in _SIZES.items()}
"""Fields that tensors don't show -> the argument that gives them."""
DROPOUT = 0.1
"""Megatron's default dropout in the encoder's layers."""


def retrieval_arguments(config: ModelConfig, *, legacy: bool) -> dict[str, Any]:
    """All arguments of a Retro; empty for other models. Raises NotExpressible."""
    found = config.retrieval
    if not found.layers:
        return {}
    if legacy:
        raise NotExpressible(
            "the model attends to retrieved text (Retro), which is written for Megatron core: choose --saver core"
        )
    return {
        "retro_add_retriever": True,
        "retro_encoder_layers": found.layers,
        "retro_encoder_hidden_dropout": DROPOUT,
        "retro_encoder_attention_dropout": DROPOUT,
        "retro_chunk_length": found.chunk,
        "retro_num_neighbors": found.neighbors,
        "retro_num_retrieved_chunks": found.chunks,
        "retro_attention_gate": 1,
    }


def read_retrieval(args: Namespace, found: Mapping[str, Any], *, legacy: bool) -> dict[str, Any]:
    """The fields of Retro that args give. A size that the arguments lack has no field.

    found: fields that the tensors show. Raises UnknownFamily for a Retro from before Megatron core, and for arguments
    of a Retro whose tensors aren't one.
    """
    says_retro = bool(getattr(args, "retro_add_retriever", False))
    if not found.get("retrieval.layers"):
        if not says_retro:
            return {}
        what = "is of a legacy model" if legacy else "has no encoder of retrieved text"
        raise UnknownFamily(
            f"the checkpoint's retro_add_retriever is True (Retro), and it {what}; expected the tensors of a Megatron core Retro"
        )
    sizes = {field: getattr(args, name, None) for name, field in _SIZES.items()}
    return {field: value for field, value in sizes.items() if value is not None}
