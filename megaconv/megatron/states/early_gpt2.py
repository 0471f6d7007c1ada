"""GPT-2 of Megatron-LM's first release (2019), whose rank files have no arguments.

    {"iteration": 7, "optimizer": ..., "lr_scheduler": ..., "random_rng_state": ...,
     "model": {"word_embeddings.weight": ..., "position_embeddings.weight": ...,
               "transformer.layers.0.attention.query_key_value.weight": ..., "transformer.final_layernorm.weight": ...}}

The names are those of later legacy models without their prefix, and the rows of q, k, v have the order of checkpoint
version 0. All sizes follow from shapes, except the number of attention heads.
Source: model/gpt2_modeling.py, mpu/transformer.py and utils.py of Megatron-LM at commit 93ab4bea59.
"""

import logging
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from formats.tensor import LazyTensor
from megaconv.errors import UnknownFamily, UsageError
from megaconv.megatron.states.legacy_names import MODEL

_log = logging.getLogger("megaconv")

_EMBEDDING = "word_embeddings.weight"
_POSITIONS = f"{MODEL}.embedding.position_embeddings.weight"
_BERT = "bert.embeddings."
_NORM_EPSILON = 1e-5
_NOT_READ = ("optimizer", "lr_scheduler")
"""State of training, which apex and classes of that release define."""


def with_later_names(state: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The state of a rank file with the names of a later legacy model; a state of any other release unchanged.

    where: the file, for messages. Raises UnknownFamily for a BERT of 2019, which has other modules.
    """
    model = state.get("model")
    if "args" in state or not isinstance(model, dict):
        return state
    if any(str(name).startswith(_BERT) for name in model):
        raise UnknownFamily(
            f"{where}: is a BERT of Megatron-LM's first release; of that release, only GPT-2 can be read"
        )
    if _EMBEDDING not in model:
        return state
    return {name: value for name, value in state.items() if name not in _NOT_READ} | {
        "model": {MODEL: model}
    }


def is_early(state: Mapping[str, Any]) -> bool:
    """True for a state that with_later_names has changed."""
    model = state.get("model")
    return "args" not in state and isinstance(model, dict) and _EMBEDDING in model.get(MODEL, {})


def arguments(weights: Mapping[str, LazyTensor], heads: int | None, where: str) -> Namespace:
    """The arguments that the run would have saved.

    weights: a rank's tensors by their later names. heads: number of attention heads, if it is known. where: the file,
    for messages. Raises UsageError without the number of heads.
    """
    if heads is None:
        raise UsageError(
            f"{where}: a GPT-2 of Megatron-LM's first release doesn't store its number of attention heads; "
            "give --num-attention-heads N, or --config with the directory of a config.json"
        )
    positions, hidden = weights[_POSITIONS].shape
    _log.warning(
        "%s: the optimizer state of Megatron-LM's first release can't be read; only weights are converted",
        where,
    )
    return Namespace(
        hidden_size=hidden,
        num_attention_heads=heads,
        max_position_embeddings=positions,
        layernorm_epsilon=_NORM_EPSILON,
        openai_gelu=True,  # its gelu is the approximation by tanh
        apply_residual_connection_post_layernorm=False,
    )
