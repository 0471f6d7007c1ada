"""Arguments that the tensors show too.

Some tools write them wrongly: then the tensors win, and a warning names the difference.

Two arguments aren't compared: `qk_layernorm` of latent attention, which may mean the norms of latent vectors, and
`untie_embeddings_and_output_weights` of task models, whose head has no word matrix.
"""

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

_log = logging.getLogger("megaconv")

_ARGUMENTS = {
    "attention.qk_norm": "qk_layernorm",
    "norm.kind": "normalization",
    "mlp.ffn": "ffn_hidden_size",
    "positions.kind": "position_embedding_type",
    "max_positions": "max_position_embeddings",
    "mamba.heads": "mamba_num_heads",
    "mamba.head_dim": "mamba_head_dim",
}
"""Fields that tensors may show -> the equivalent argument."""


def warn_of_contradictions(
    args: Namespace, given: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    """Warn about each argument that the tensors contradict.

    given: fields from the arguments. found: fields from the tensors.
    """
    for argument, shown in _contradictions(args, given, found):
        _log.warning(
            "the checkpoint's %s is %r, its tensors show %s; the tensors win",
            argument,
            getattr(args, argument),
            shown,
        )


def _contradictions(
    args: Namespace, given: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """(argument, what the tensors show) for each contradiction."""
    latent = getattr(args, "multi_latent_attention", False)
    for field, argument in _ARGUMENTS.items():
        if field not in given or field not in found:
            continue
        of_latent_vectors = latent and field == "attention.qk_norm"
        if given[field] != found[field] and not of_latent_vectors:
            yield argument, f"{field} = {found[field]}"
    if getattr(args, "swiglu", False) is True and not found["mlp.gated"]:
        yield "swiglu", "an MLP without a gate"
    retriever_layers = found.get("retrieval.layers")
    if (
        retriever_layers
        and getattr(args, "retro_encoder_layers", retriever_layers) != retriever_layers
    ):
        yield "retro_encoder_layers", f"{retriever_layers} layers of the encoder"
    untied = getattr(args, "untie_embeddings_and_output_weights", None)
    heads = ("head.classes", "head.choices", "head.labels", "retriever.towers")
    for_a_task = any(found.get(name) for name in heads)
    if untied is False and not found["tie_embeddings"] and not for_a_task:
        yield "untie_embeddings_and_output_weights", "an untied head"
