"""Latent attention as in DeepSeek V2 and V3: queries, keys and values from narrow latent vectors with their own norms.

hf     model.layers.{l}.self_attn.{q_proj, q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj}
core   decoder.layers.{l}.self_attention.{linear_q_proj, linear_q_down_proj, linear_q_up_proj, linear_kv_down_proj, ...}
"""

from megaconv.errors import NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, OtherAxis, Row

_HF = "model.layers.{l}.self_attn."
_CORE = "decoder.layers.{l}.self_attention."

LATENT_ATTENTION = (
    Row("layers.{l}.input_norm.weight", ("hidden",),
        hf="model.layers.{l}.input_layernorm.weight",
        core="decoder.layers.{l}.input_layernorm.weight"),
    Row("layers.{l}.attn.q.weight", ("heads*head_dim hidden",), tp=0, when="q_direct",
        hf=_HF + "q_proj.weight",
        core=_CORE + "linear_q_proj.weight"),
    # Transformer Engine's ranks each hold the whole down projections, while ranks with local layers hold a shard.
    Row("layers.{l}.attn.q_down.weight", ("q_rank hidden",), when="q_latent",
        hf=_HF + "q_a_proj.weight",
        core=_CORE + "linear_q_down_proj.weight",
        core_local=OtherAxis(_CORE + "linear_q_down_proj.weight", tp=0)),
    Row("layers.{l}.attn.q_latent_norm.weight", ("q_rank",), when="q_latent",
        hf=_HF + "q_a_layernorm.weight",
        core=_CORE + "linear_q_up_proj.layer_norm_weight",
        core_local=_CORE + "q_layernorm.weight"),
    Row("layers.{l}.attn.q_up.weight", ("heads*head_dim q_rank",), tp=0, when="q_latent",
        hf=_HF + "q_b_proj.weight",
        core=_CORE + "linear_q_up_proj.weight"),
    Row("layers.{l}.attn.kv_down.weight", ("kv_and_rope hidden",),
        hf=_HF + "kv_a_proj_with_mqa.weight",
        core=_CORE + "linear_kv_down_proj.weight",
        core_local=OtherAxis(_CORE + "linear_kv_down_proj.weight", tp=0)),
    Row("layers.{l}.attn.kv_latent_norm.weight", ("kv_rank",),
        hf=_HF + "kv_a_layernorm.weight",
        core=_CORE + "linear_kv_up_proj.layer_norm_weight",
        core_local=_CORE + "kv_layernorm.weight"),
    Row("layers.{l}.attn.{k|v}_up.weight", ("heads*nope_dim kv_rank", "heads*v_dim kv_rank"), tp=0,
        hf=Fused(_HF + "kv_b_proj.weight", groups="heads"),
        core=Fused(_CORE + "linear_kv_up_proj.weight", groups="heads")),
    Row("layers.{l}.attn.o.weight", ("hidden heads*v_dim",), tp=1,
        hf=_HF + "o_proj.weight",
        core=_CORE + "linear_proj.weight"),
)  # fmt: skip


def latent_heads(*, kv_rank: int, q_rank: int, rope: int, nope: int, v: int) -> Keys:
    """Widths of the latent vectors, and of the parts of a head: rotating elements, other elements, values.

    The numbers are the defaults for missing keys.
    """
    usual = {
        "kv_lora_rank": kv_rank,
        "q_lora_rank": q_rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": v,
    }

    def read(raw: Raw) -> Fields:
        given = {**usual, **raw}
        heads = need_size(raw, "num_attention_heads")
        rope_dim = need_size(given, "qk_rope_head_dim")
        return {
            "attention.heads": heads,
            "attention.kv_heads": heads,
            "attention.head_dim": need_size(given, "qk_nope_head_dim") + rope_dim,
            "latent.rope_dim": rope_dim,
            "latent.v_dim": need_size(given, "v_head_dim"),
            "latent.kv_rank": need_size(given, "kv_lora_rank"),
            "latent.q_rank": given["q_lora_rank"] or 0,
        }

    return Keys(
        ("num_attention_heads", "num_key_value_heads", "head_dim", "qk_head_dim", *usual),
        read,
        _write_latent,
    )


def _write_latent(config: ModelConfig) -> Raw:
    latent = config.latent
    return {
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": config.attention.head_dim - latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank or None,
    }


def require_own_groups(groups: object, heads: object) -> None:
    """Raise NotExpressible unless each head has keys and values of its own. groups: the value of num_key_value_heads."""
    if groups != heads:
        raise NotExpressible(
            f"{CONFIG_NAME}: num_key_value_heads {groups!r} is not supported in this architecture, only num_attention_heads {heads!r} is"
        )


LATENT_HEADS = latent_heads(kv_rank=512, q_rank=1536, rope=64, nope=128, v=128)
"""The keys of V2 and V3."""

LATENT_EPSILON = 1e-6
"""Epsilon of the latent vectors' norms in transformers' classes, whatever rms_norm_eps says for the other norms."""
LATENT_NORMS = {"latent.norm_epsilon": LATENT_EPSILON}
"""The same epsilon as a field, for all models whose classes use it."""


def one_epsilon(config: ModelConfig) -> tuple[str, ...]:
    """The notice for a model whose norms have two epsilons in transformers (Moonlight, GLM-4.7-Flash)."""
    if config.norm.epsilon == LATENT_EPSILON:
        return ()
    return (
        f"the norms of the latent vectors (kv_a_layernorm, q_a_layernorm) have epsilon {LATENT_EPSILON:g} in transformers and "
        f"{config.norm.epsilon:g}, that of all other norms, in Megatron, which has one for all: the weights are the same, "
        "logits differ slightly (by some 1e-4 at an epsilon of 1e-05)",
    )
