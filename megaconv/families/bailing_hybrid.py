"""Ling 3.0: Kimi delta attention with a bounded decay, gated latent attention in the last layer of each group, experts.

    hf     model.layers.{l}.{input_layernorm, attention, post_attention_layernorm, mlp}, model.word_embeddings

The gates of Kimi Linear are products of two narrow matrices, those of Ling 3.0 one matrix each. Layers for multi-token
prediction are left out. Converted between Hugging Face's files. Source: BailingHybridConfig and
modeling_bailing_hybrid.py of transformers 5.23.
"""

from megaconv.errors import UnknownFamily
from megaconv.families import Family
from megaconv.families.kimi_linear import FAMILY as KIMI
from megaconv.families.kimi_linear import KDA, OWN_HEAD
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.kda_config import WORDS
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    follows,
    need_flag,
    need_number,
    need_size,
    size,
)
from megaconv.families.parts.latent_attention import LATENT_ATTENTION, LATENT_NORMS, latent_heads
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.mtp import MTP_LEFT_OUT, mtp_apart
from megaconv.families.parts.rope import rope, rope_in_one_object
from megaconv.families.parts.row_changes import hf_only, with_modules, without_biases
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_HF = "model.layers.{l}.attention."
_MODULES = {"self_attn.": "attention.", "o_proj": "dense"}
_OTHER_GATES = ("_down.weight", "_up.weight", ".A_log")
_KDA = tuple(row for row in KDA if not row.canonical.endswith(_OTHER_GATES))
_LATENT = tuple(row for row in LATENT_ATTENTION if row.when != "q_latent")
_GATES = (
    Row("layers.{l}.kda.{forget|gate}.weight",
        ("linear_key_heads*linear_key_dim hidden", "linear_value_heads*linear_value_dim hidden"), tp=0, when="kda",
        hf=_HF + "{f|g}_proj.weight"),
    Row("layers.{l}.kda.A_log", ("linear_value_heads",), tp=0, when="kda",
        hf=_HF + "A_log"),
    Row("layers.{l}.attn.head_gate.weight", ("heads hidden",), tp=0, when="attention head_gate",
        hf=_HF + "g_proj.weight"),
)  # fmt: skip
_MIXERS = with_modules((*_KDA, *rows_of("attention", _LATENT)), _MODULES)
_BIAS = ROUTER_BIAS.renamed(hf="model.layers.{l}.mlp.gate.expert_bias")
_MLPS = (*without_biases(DEEPSEEK_MLPS), _BIAS)
_EMBEDDING = OWN_HEAD.renamed(hf="model.word_embeddings.weight")
ROWS = hf_only((_EMBEDDING, *_MIXERS, *_GATES, *_MLPS, *HEAD))


def _words(raw: Raw, layers: int) -> list[str]:
    """The words of a model in which the last of each layer_group_size layers has latent attention."""
    group = need_size(raw, "layer_group_size", 6)
    linear, full = WORDS
    return [linear if (layer + 1) % group else full for layer in range(layers)]


def _no_query_latents(raw: Raw) -> int:
    """The rank of queries: 0. Raises UnknownFamily for another one, which transformers' class doesn't read."""
    if raw.get("q_lora_rank"):
        raise UnknownFamily(
            f"{CONFIG_NAME}: q_lora_rank {raw['q_lora_rank']!r} is not supported in this architecture, only None is"
        )
    return 0


def _read_sizes(raw: Raw) -> Fields:
    """The sizes of Kimi delta attention: transformers' keys, or those of the published models."""
    heads = need_size(raw, "linear_num_heads", need_size(raw, "num_attention_heads"))
    width = need_size(raw, "linear_head_dim", need_size(raw, "head_dim", 128))
    positions = need_size(
        raw, "linear_conv_kernel_dim", need_size(raw, "short_conv_kernel_size", 4)
    )
    sizes = {"linear.key_heads": heads, "linear.value_heads": heads, "linear.conv": positions}
    return {**sizes, "linear.key_dim": width, "linear.value_dim": width}


def _write_sizes(config: ModelConfig) -> Raw:
    linear = config.linear
    return {
        "head_dim": linear.value_dim,
        "linear_head_dim": linear.value_dim,
        "linear_num_heads": linear.value_heads,
        "short_conv_kernel_size": linear.conv,
        "linear_conv_kernel_dim": linear.conv,
    }


def _read_bound(raw: Raw) -> Fields:
    bound = need_number(raw, "kda_lower_bound", -5.0)
    return {"linear.forget_bound": bound if need_flag(raw, "kda_safe_gate", True) else None}


def _write_bound(config: ModelConfig) -> Raw:
    bound = config.linear.forget_bound
    if bound is None:
        return {"kda_safe_gate": False}
    return {"kda_safe_gate": True, "kda_lower_bound": bound}


_LINEAR_KEYS = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "short_conv_kernel_size")  # fmt: skip
_MTP = "num_nextn_predict_layers"
_BODY = body_keys(
    positions=262144, ffn=6144, rotation=rope_in_one_object(rope(6000000.0)), tokens=(None, 156895, 156892)
)  # fmt: skip
_KEYS = (
    *without_keys(_BODY, "max_position_embeddings"),
    size("model_max_length", "max_positions", 262144),
    latent_heads(kv_rank=512, q_rank=0, rope=64, nope=128, v=128),
    follows("latent.q_rank", _no_query_latents),
    Keys(_LINEAR_KEYS, _read_sizes, _write_sizes),
    Keys(("kda_safe_gate", "kda_lower_bound"), _read_bound, _write_bound),
    layer_mixers(WORDS, _words, "layer_group_size"),
    mlp_layer_types(dense=2, older="first_k_dense_replace"),
    *routed_experts(
        count=512, width=768, count_key="num_experts", per_token_key="num_experts_per_token"
    ),
    shared_experts(count=1, width=768, key="num_shared_experts"),
    *sigmoid_routing(
        scale=2.5, groups=8, group_topk=4, groups_key="num_expert_group", renormalize_key="moe_renormalize"
    ),
    Keys((_MTP,), lambda raw: {}, lambda config: {_MTP: 0}),
)  # fmt: skip
_FIXED = {
    **LLAMA_LIKE,
    **SIGMOID_ROUTER,
    **LATENT_NORMS,
    "attention.head_gate": True,
    "linear.full_rank_gates": True,
}
_ONLY = {**SILU, "attention_bias": False}

FAMILY = Family(
    name="bailing_hybrid",
    architectures=("BailingHybridForCausalLM",),
    model_type="bailing_hybrid",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    aliases={**KIMI.aliases, "num_mtp_layers": _MTP},
    ignored=ROPE_FREQUENCIES,
    features=("mla",),
    left_out=MTP_LEFT_OUT,
    other_names=mtp_apart,
    recognized=None,
    proven="names",
)
