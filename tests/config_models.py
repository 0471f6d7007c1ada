"""Configurations of every decoder: as config.json says them, and any that may be, for hypothesis."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from megaconv.families import families, family_of_hf
from megaconv.model.config import ModelConfig, value_of
from megaconv.model.fields import changed, from_fields, per_layer
from tests.strategies import Draw, has_linear_attention, with_linear_attention

Raw = dict[str, Any]

FAMILIES = sorted(name for name in families() if name not in ("bert", "t5"))
"""Decoders that Megatron's arguments can describe as well; those with an encoder are in test_encoder_config.py."""
LLAMA_LIKE = [name for name in FAMILIES if name != "gpt2"]
"""Families whose config.json has Llama's keys."""
SCALED = [name for name in LLAMA_LIKE if name not in ("phi3", "gpt_oss")]
"""Phi-3 knows one kind of rope scaling, of its own; GPT-OSS is scaled if it says nothing."""
LATENT_KEYS: Raw = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
}
LINEAR_KEYS: Raw = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
EXPERT_KEYS: dict[str, Raw] = {
    "deepseek_v2": LATENT_KEYS,
    "deepseek_v3": {**LATENT_KEYS, "n_group": 3, "topk_group": 2},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 5.0, "sliding_window": 16},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        **LINEAR_KEYS,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0, 2],
    },
    "qwen3_5_moe": {
        **LINEAR_KEYS,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0, 2],
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 2.5,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.25,
    },
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 99, "beta_fast": 8.0, "beta_slow": 0.5}
SCALINGS: dict[str, Raw | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}


def raw_config(name: str, **keys: Any) -> Raw:
    """A complete config.json without keys that changed between transformers 4 and 5."""
    table = families()[name]
    return {
        "architectures": [table.architectures[0]],
        "model_type": table.model_type,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "vocab_size": 131,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **EXPERT_KEYS.get(name, {}),
        **(LINEAR_KEYS if name == "qwen3_5" else {}),
        **({"hidden_act": "gelu_pytorch_tanh"} if name == "gemma" else {}),
        **keys,
    }


def raw_gpt2(**keys: Any) -> Raw:
    """A complete config.json of a GPT-2, which has other keys."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 131,
        "layer_norm_epsilon": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **keys,
    }


def read(raw: Mapping[str, Any]) -> ModelConfig:
    return family_of_hf(raw, "config.json").read_hf(raw)


def in_old_keys(raw: Raw, theta: float, scaling: Raw | None) -> Raw:
    return raw | {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    }


def in_new_keys(raw: Raw, theta: float, scaling: Raw | None) -> Raw:
    return raw | {
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
        "dtype": "bfloat16",
    }


IN_TENSORS = (
    *(
        "layers.count",
        "layers.mixer",
        "layers.mlp",
        "hidden",
        "vocab",
        "tie_embeddings",
        "mtp_layers",
        "mlp.ffn",
        "mlp.bias",
        "mlp.gated",
        "dtype",
    ),
    *("attention.qkv_bias", "attention.o_bias", "attention.qk_norm", "attention.sinks"),
    *("experts.count", "experts.shared_gate", "experts.router_bias"),
)


def found_in_tensors(config: ModelConfig, *more: str) -> dict[str, Any]:
    """What a loader reads off the tensors."""
    return {name: value_of(config, name) for name in (*IN_TENSORS, *more)}


@st.composite
def scalings(draw: Draw) -> Raw | None:
    """What Megatron core can represent."""
    factor = float(draw(st.integers(1, 64)))
    return draw(
        st.sampled_from(
            (
                None,
                {"rope_type": "linear", "factor": factor},
                {"rope_type": "llama3", **LLAMA3, "factor": factor},
                {"rope_type": "yarn", **YARN, "factor": factor},
                {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False},
            )
        )
    )


@st.composite
def gpt2_configs(draw: Draw) -> ModelConfig:
    heads = draw(st.integers(1, 4))
    keys = {
        "n_head": heads,
        "n_embd": heads * draw(st.integers(1, 20)),
        "n_inner": draw(st.none() | st.integers(1, 99)),
        "activation_function": draw(st.sampled_from(("gelu_new", "gelu"))),
        "tie_word_embeddings": draw(st.booleans()),
        "torch_dtype": draw(st.sampled_from(("bfloat16", "float16", "float32"))),
    }
    return read(raw_gpt2(bos_token_id=None, eos_token_id=None, **keys))


@st.composite
def with_experts(draw: Draw, config: ModelConfig) -> ModelConfig:
    """The model with experts, as its family has them."""
    name, experts, moe_ffn = config.family, draw(st.integers(1, 9)), draw(st.integers(1, 99))
    config = changed(
        config, {"experts.count": experts, "experts.per_token": draw(st.integers(1, experts)), "experts.ffn": moe_ffn}
    )
    if name in ("mixtral", "gpt_oss"):
        return changed(config, {"mlp.ffn": moe_ffn, "layers.mlp": "experts"})
    if name in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        first = draw(st.integers(0, config.layer_count - 1))
        config = changed(
            config,
            {
                "layers.mlp": per_layer(range(first), config.layer_count, "dense", "experts"),
                "experts.shared_ffn": moe_ffn * draw(st.integers(0, 3)),
                "experts.scale": draw(st.sampled_from((1.0, 2.5))),
            },
        )
        if name == "deepseek_v2":
            return changed(config, {"experts.renormalize": False})
        groups, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        if groups > 1:  # Megatron ranks groups as this class does only then
            config = changed(config, {"experts.count": 8 * groups, "experts.per_token": 2 * topk})
        config = changed(
            config,
            {
                "experts.score": "sigmoid",
                "experts.router_bias": True,
                "experts.groups": groups,
                "experts.group_topk": topk,
            },
        )
        return (
            changed(config, {"positions.rotary_percent": draw(st.sampled_from((0.25, 0.5, 1.0)))})
            if name == "glm4_moe"
            else config
        )
    layers = draw(st.sets(st.integers(0, config.layer_count - 1), min_size=1))
    if name == "qwen3_5_moe":
        layers, config = set(range(config.layer_count)), changed(config, {"mlp.ffn": moe_ffn})
    config = changed(
        config,
        {
            "layers.mlp": per_layer(layers, config.layer_count, "experts", "dense"),
            "experts.renormalize": name == "qwen3_5_moe" or draw(st.booleans()),
        },
    )
    shared = draw(st.integers(1, 99))
    return (
        changed(config, {"experts.shared_ffn": shared, "experts.shared_gate": True})
        if name in ("qwen2_moe", "qwen3_next", "qwen3_5_moe")
        else config
    )


@st.composite
def with_latent_attention(draw: Draw, config: ModelConfig) -> ModelConfig:
    rope_dim = 2 * draw(st.integers(1, 9))
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 99,
    }
    mscales = draw(st.sampled_from(({}, {"mscale": 0.7, "mscale_all_dim": 0.9})))
    return changed(
        config,
        {
            "norm.epsilon": 1e-6,
            "attention.kv_heads": config.attention.heads,
            "latent.rope_dim": rope_dim,
            "attention.head_dim": rope_dim + draw(st.integers(1, 9)),
            "latent.v_dim": draw(st.integers(1, 9)),
            "latent.kv_rank": draw(st.integers(1, 9)),
            "latent.q_rank": draw(st.integers(0, 9)),
            "positions.scaling": draw(st.sampled_from((None, yarn | mscales))),
        },
    )


@st.composite
def configs(draw: Draw) -> ModelConfig:
    """A model that its family's config.json and Megatron's arguments can both describe."""
    name = draw(st.sampled_from(FAMILIES))
    if name == "gpt2":
        return draw(gpt2_configs())
    layers, kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    config = from_fields(
        name,
        {
            "layers.count": layers,
            "hidden": draw(st.integers(1, 99)),
            "attention.heads": kv_heads * draw(st.integers(1, 4)),
            "attention.kv_heads": kv_heads,
            "attention.head_dim": 2 * draw(st.integers(1, 50)),
            "mlp.ffn": draw(st.integers(1, 99)),
            "vocab": draw(st.integers(1, 999)),
            "max_positions": draw(st.integers(1, 9999)),
            "norm.epsilon": draw(st.sampled_from((1e-5, 1e-6, 3e-7))),
            "positions.theta": draw(st.sampled_from((1e4, 5e5, 1e6, 12345.5))),
            "positions.scaling": draw(scalings()),
            "tie_embeddings": draw(st.booleans()),
            "dtype": draw(st.sampled_from(("bfloat16", "float16", "float32"))),
        },
    )
    if name == "llama":
        bias = draw(st.booleans())
        return changed(config, {"attention.qkv_bias": bias, "attention.o_bias": bias, "mlp.bias": bias})
    if name == "gemma":
        scale = config.hidden**0.5
        return changed(config, {"norm.zero_centered": True, "mlp.activation": "gelu_tanh", "embedding_scale": scale})
    if name.startswith("deepseek"):
        return draw(with_latent_attention(draw(with_experts(config))))
    if name == "mistral":
        return changed(config, {"layers.window": draw(st.integers(1, 99))})
    if name == "phi3":
        return changed(config, {"layers.window": draw(st.none() | st.integers(1, 99)), "positions.scaling": None})
    if name in EXPERT_KEYS:
        config = draw(with_experts(config))
    if has_linear_attention(name):
        percent = 1.0 if (config.positions.scaling or {}).get("rope_type") == "yarn" else 0.25
        config = changed(config, {"positions.rotary_percent": percent})
        return draw(with_linear_attention(config))
    if name == "glm4_moe":
        if config.positions.rotary_percent != 1 and (config.positions.scaling or {}).get("rope_type") == "yarn":
            config = changed(config, {"positions.scaling": None})  # Megatron's yarn is for whole heads
        return changed(config, {"attention.qkv_bias": draw(st.booleans()), "attention.qk_norm": draw(st.booleans())})
    if name == "gpt_oss":
        experts = {"mlp.activation": "quick_gelu", "mlp.clamp": draw(st.sampled_from((7.0, 5.5))), "mlp.offset": 1.0}
        biases = dict.fromkeys(("attention.qkv_bias", "attention.o_bias", "mlp.bias", "attention.sinks"), True)
        config = changed(config, {**experts, **biases})
    if name in ("mixtral", "qwen3_moe"):
        window = draw(st.none() | st.integers(1, 99))
        return changed(config, {"layers.window": window, "attention.qk_norm": name == "qwen3_moe"})
    if name != "gpt_oss":
        config = changed(
            config, {"attention.qkv_bias": name in ("qwen2", "qwen2_moe"), "attention.qk_norm": name == "qwen3"}
        )
    windowed = draw(st.sets(st.integers(0, layers - 1)))
    if not windowed or (name == "llama" and len(windowed) == layers):
        return config
    return changed(config, {"layers.window": per_layer(windowed, layers, draw(st.integers(1, 99)), None)})


LLAMA = read(in_old_keys(raw_config("llama", bos_token_id=None, eos_token_id=None), 1e4, None))
"""A Llama as Megatron's arguments can describe it: without token ids."""
