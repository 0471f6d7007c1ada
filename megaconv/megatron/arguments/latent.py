"""Translates between Megatron's arguments of multi-head latent attention and the configuration.

    q_lora_rank, kv_lora_rank             widths of the latent vectors; without q_lora_rank, queries are computed directly
    qk_head_dim, qk_pos_emb_head_dim      elements of a head of q and k without and with rotation; v_head_dim of v
    rope_type                             `rope`, or `yarn` (also None) with rotary_scaling_factor, mscale, mscale_all_dim ...

    megaconv_latent_norm_epsilon          megaconv's own argument for a run that computes the norms of latent vectors as
                                          transformers does; Megatron gives all norms one epsilon

Rotating elements are stored in pairs, as in DeepSeek's own files. Source: MLATransformerConfig and
multi_latent_attention.py of megatron-core 0.12 to 0.16; DeepseekV3Attention and the yarn parameters of transformers 5.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible, UnknownFamily
from megaconv.megatron.arguments.beyond_core import positive_number
from megaconv.model.config import ModelConfig

LATENT_NORM_EPSILON = "megaconv_latent_norm_epsilon"

_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
"""Values that Megatron and transformers both use for a missing key."""


def latent_arguments(config: ModelConfig) -> dict[str, Any]:
    """All arguments of latent attention. Raises NotExpressible for a scaling that Megatron doesn't support."""
    if not config.latent.kv_rank:
        return {"multi_latent_attention": False}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": config.latent.q_rank or None,
        "kv_lora_rank": config.latent.kv_rank,
        "qk_head_dim": config.attention.head_dim - config.latent.rope_dim,
        "qk_pos_emb_head_dim": config.latent.rope_dim,
        "v_head_dim": config.latent.v_dim,
        "kv_channels": config.latent.v_dim,
        "group_query_attention": False,
        "num_query_groups": 1,
        "qk_layernorm": True,
        "moe_router_dtype": "fp32",
    } | _scaling(config.positions.scaling)


def latent_norm_argument(config: ModelConfig) -> dict[str, Any]:
    """The argument for a run with other norms of latent vectors than Megatron's; otherwise empty.

    Megatron doesn't read it.
    """
    epsilon = config.latent.norm_epsilon
    return {} if epsilon in (None, config.norm.epsilon) else {LATENT_NORM_EPSILON: epsilon}


def _scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    if scaling is None:
        plain = {"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
        return {"rope_type": "rope", **plain, "beta_fast": 32.0, "beta_slow": 1.0}
    known = {"rope_type", "factor", "mscale", "mscale_all_dim", *_YARN}
    others = sorted(
        name for name, value in scaling.items() if name not in known and value is not None
    )
    mscale: Any = scaling.get("mscale")
    mscale_all_dim: Any = scaling.get("mscale_all_dim")
    only_all_dim = mscale_all_dim and not mscale
    if scaling["rope_type"] != "yarn" or others or only_all_dim:
        raise NotExpressible(
            f"rope scaling {dict(scaling)} has no equivalent in Megatron's latent attention, "
            "which supports yarn only"
        )
    if not mscale_all_dim:
        # Without mscale_all_dim, the definitions of Megatron and transformers agree only if mscale is 1.
        mscale, mscale_all_dim = 1.0, 0.0
    found = {name: scaling.get(name) or value for name, value in _YARN.items()}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(scaling["factor"]),
        "mscale": float(mscale),
        "mscale_all_dim": float(mscale_all_dim),
        **found,
    }


def read_latent(args: Namespace) -> dict[str, Any]:
    """The fields of latent attention; for other attention, the field that says so. Raises UnknownFamily."""
    if not hasattr(args, "multi_latent_attention"):
        return {}
    if not args.multi_latent_attention:
        return {"latent.kv_rank": 0}
    rope_dim = args.qk_pos_emb_head_dim
    return {
        "attention.kv_heads": args.num_attention_heads,
        "attention.head_dim": args.qk_head_dim + rope_dim,
        "latent.rope_dim": rope_dim,
        "latent.v_dim": args.v_head_dim,
        "latent.kv_rank": args.kv_lora_rank,
        "latent.q_rank": args.q_lora_rank or 0,
        "latent.norm_epsilon": positive_number(args, LATENT_NORM_EPSILON),
        "positions.scaling": _read_scaling(args),
    }


def _read_scaling(args: Namespace) -> dict[str, Any] | None:
    """The yarn scaling, or None.

    The parser has a rope_type since core 0.14. If it is missing, the default of the configuration class is yarn.
    """
    given = getattr(args, "rope_type", None)
    factor = float(getattr(args, "rotary_scaling_factor", 40))
    mscales = {
        name: float(getattr(args, name, value))
        for name, value in (("mscale", 1.0), ("mscale_all_dim", 0.0))
    }
    _check_softmax(args, given, factor, mscales)
    if given == "rope" or (given is None and factor == 1):  # with a factor of 1, yarn has no effect
        return None
    if factor > 1 and not all(mscales.values()) and tuple(mscales.values()) != (1.0, 0.0):
        raise UnknownFamily(
            f"the checkpoint's yarn (rotary_scaling_factor {factor}) has mscale {mscales['mscale']} and mscale_all_dim "
            f"{mscales['mscale_all_dim']}; model families have both, or 1 and none"
        )
    usual: dict[str, Any] = dict(_YARN)
    if not hasattr(args, "rope_type"):
        usual["original_max_position_embeddings"] = args.max_position_embeddings
    numbers = {name: getattr(args, name, value) for name, value in usual.items()}
    return {"rope_type": "yarn", "factor": factor, **numbers} | (
        mscales if mscales["mscale_all_dim"] else {}
    )


def _check_softmax(
    args: Namespace, rope_type: str | None, factor: float, mscales: Mapping[str, float]
) -> None:
    """Check the scale of attention scores, which one of the mscales determines for any rope_type.

    Up to core 0.13 it is mscale, later mscale_all_dim. Raises UnknownFamily if it differs from the scale of the
    rotations.
    """
    name = "mscale_all_dim" if hasattr(args, "rope_type") else "mscale"
    expected = 0.0 if rope_type == "rope" else mscales["mscale_all_dim"]
    if factor > 1 and mscales[name] != expected:
        raise UnknownFamily(
            f"the checkpoint's attention scores are scaled by {name} {mscales[name]} (rotary_scaling_factor {factor}, rope_type "
            f"{rope_type}), its rotations by another; no supported model family has that"
        )
