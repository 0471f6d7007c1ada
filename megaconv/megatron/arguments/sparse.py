"""Translates between Megatron's arguments of sparse attention and the configuration.

    experimental_attention_variant        `dsa`
    dsa_indexer_n_heads, dsa_indexer_head_dim, dsa_indexer_topk
    dsa_indexer_rope_interleaved          since core 0.19, like the arguments below; 0.16 to 0.18 rotate neighbours
    dsa_indexer_k_norm_epsilon            1e-6 in transformers; if missing, the epsilon of all other norms
    dsa_indexer_rotate_activation         a Hadamard rotation, which transformers leaves out: the same scores, rounded differently

megaconv's own argument gives the order of the indexer's elements. Source: TransformerConfig of Megatron core, 0.16.1 to
0.19.0.
"""

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of

INDEXER_ORDER = "megaconv_indexer_order"
ROPE_LAST = "rope_last"
"""The argument's only value, for the order of core 0.16 to 0.18.

Without it, the order is that of files and later releases.
"""

INDEXER_FOR, INDEXER_FROM = "indexer_for", "indexer_from"
"""The option of the saver, and the option of the loader."""
ORDERS = {"0.16": True, "0.19": False}
"""The values of these options: the first release of Megatron core with an order -> True if the order is ROPE_LAST."""

_SIZES = {
    "dsa_indexer_n_heads": "indexer.heads",
    "dsa_indexer_head_dim": "indexer.head_dim",
    "dsa_indexer_topk": "indexer.topk",
}
_VARIANT = "dsa"


def sparse_arguments(config: ModelConfig) -> dict[str, Any]:
    """All arguments of an indexer; empty for models without one."""
    if not config.indexer.heads:
        return {}
    return {name: value_of(config, field) for name, field in _SIZES.items()} | {
        "experimental_attention_variant": _VARIANT,
        "dsa_indexer_rope_interleaved": config.indexer.interleaved,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_rotate_activation": False,
    }


def read_sparse(args: Namespace) -> dict[str, Any]:
    """The fields of sparse attention; empty for other attention."""
    if getattr(args, "experimental_attention_variant", None) != _VARIANT:
        return {}
    found = {field: getattr(args, name, None) for name, field in _SIZES.items()}
    found["indexer.interleaved"] = getattr(args, "dsa_indexer_rope_interleaved", None)
    return {field: value for field, value in found.items() if value is not None}


def writes_rope_last(config: ModelConfig, asked: Mapping[str, str]) -> bool:
    """True if the output has the order ROPE_LAST. asked: the saver's options.

    Raises UsageError for an unknown value, or for a model without indexers.
    """
    release = _release(asked, INDEXER_FOR)
    if release is not None and not config.indexer.heads:
        raise UsageError(f"--option {INDEXER_FOR}={release}: the model has no indexer")
    return release is not None and ORDERS[release]


def reads_rope_last(args: Namespace, names: Collection[str], asked: Mapping[str, str]) -> bool:
    """True if the checkpoint has the order ROPE_LAST: by the option, otherwise by its tensors and args.

    Only releases with that order put latent norms into Transformer Engine's linear layers. names: the checkpoint's
    tensors.
    asked: the loader's options. Raises UsageError for an unknown value.
    """
    release = _release(asked, INDEXER_FROM)
    if not any(".indexer." in name for name in names):
        return False
    if release is not None:
        return ORDERS[release]
    fused = any(name.endswith("linear_kv_up_proj.layer_norm_weight") for name in names)
    return fused or getattr(args, INDEXER_ORDER, None) == ROPE_LAST


def _release(asked: Mapping[str, str], option: str) -> str | None:
    release = asked.get(option)
    if release not in (None, *ORDERS):
        raise UsageError(f"--option {option}={release}: is not known; choose {' or '.join(ORDERS)}")
    return release
