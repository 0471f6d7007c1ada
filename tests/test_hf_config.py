"""Configurations: config.json in old and new words, and Megatron's arguments, mean the same model wherever they are read."""

import json
from argparse import Namespace
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaconv.config import STRUCTURE, ModelConfig
from megaconv.conversion import ConvertOptions, convert, fingerprint
from megaconv.errors import CheckpointError, CorruptCheckpoint, NotExpressible, UnknownFamily
from megaconv.families import families, family, family_of_hf
from megaconv.hf_config import config_json, load_config
from megaconv.layout import Layout
from megaconv.megatron.args import to_arguments
from megaconv.megatron.read_args import from_arguments, true_vocab
from megaconv.options import SaveOptions
from megaconv.training import TrainingState
from tests.models import write_llama
from tests.strategies import Draw

Raw = dict[str, Any]

FAMILIES = sorted(name for name in families() if name not in ("bert", "t5"))
"""Decoders that Megatron's arguments can describe as well; those with an encoder are in test_encoder_config.py."""
LLAMA_LIKE = [name for name in FAMILIES if name != "gpt2"]
SCALED = [name for name in LLAMA_LIKE if name not in ("phi3", "gpt_oss")]
"""Phi-3 knows one kind of rope scaling, of its own; GPT-OSS is scaled if it says nothing."""
"""Families whose config.json has Llama's words."""
LATENT_WORDS: Raw = {
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
EXPERT_WORDS: dict[str, Raw] = {
    "deepseek_v2": LATENT_WORDS,
    "deepseek_v3": {**LATENT_WORDS, "n_group": 3, "topk_group": 2},
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


def raw_config(name: str, **words: Any) -> Raw:
    """A complete config.json without words that changed between transformers 4 and 5."""
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
        **EXPERT_WORDS.get(name, {}),
        **({"hidden_act": "gelu_pytorch_tanh"} if name == "gemma" else {}),
        **words,
    }


def raw_gpt2(**words: Any) -> Raw:
    """A complete config.json of a GPT-2, which has other words."""
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
        **words,
    }


def read(raw: Mapping[str, Any]) -> ModelConfig:
    return family_of_hf(raw, "config.json").read_hf(raw)


def in_old_words(raw: Raw, theta: float, scaling: Raw | None) -> Raw:
    return raw | {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    }


def in_new_words(raw: Raw, theta: float, scaling: Raw | None) -> Raw:
    return raw | {
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
        "dtype": "bfloat16",
    }


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("name", SCALED)
def test_old_and_new_words_mean_the_same_model(name: str, scaling: Raw | None) -> None:
    old, new = in_old_words(raw_config(name), 5e5, scaling), in_new_words(raw_config(name), 5e5, scaling)
    config = read(old)
    assert config == read(new)
    assert (config.family, config.rope_theta, config.dtype) == (name, 5e5, "bfloat16")
    assert config.rope_scaling == (None if scaling in (None, {"rope_type": "default"}) else scaling)


def test_the_oldest_words_for_rope_scaling_are_understood() -> None:
    old = read(in_old_words(raw_config("llama"), 1e4, {"type": "linear", "factor": 2.0}))
    assert old.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("word", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_read_in_every_spelling(key: str, word: str) -> None:
    assert read(raw_config("llama", **{key: word})).dtype == "bfloat16"


@pytest.mark.parametrize(("eos", "expected"), [(2, 2), ([2, 7], (2, 7)), ([2], (2,)), (None, None)])
def test_end_of_sequence_tokens_may_be_several(eos: object, expected: object) -> None:
    config = read(raw_config("llama", eos_token_id=eos))
    assert config.eos_token_id == expected
    assert family("llama").write_hf(config)["eos_token_id"] == eos


def test_an_architecture_without_a_name_is_known_by_its_model_type() -> None:
    raw = raw_config("qwen2")
    del raw["architectures"]
    assert read(raw).family == "qwen2"


# What transformers itself makes of the same words.

NEEDED = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


def as_transformers_has_it(raw: Raw) -> Any:
    """transformers' own reading, as one of our configurations."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**deepcopy({"model_type": raw["model_type"], **raw}))
    if raw["model_type"] == "gpt2":
        return gpt2_as_transformers_has_it(config)
    rope = dict(config.rope_parameters)
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    latent = latent_as_transformers_has_it(config) if raw["model_type"].startswith("deepseek") else {}
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "norm_epsilon": config.rms_norm_eps,
        "rope_theta": rope.pop("rope_theta"),
        "rotary_percent": rope.pop("partial_rotary_factor", 1.0),
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_embeddings": config.tie_word_embeddings,
        "o_bias": getattr(config, "attention_bias", False) and raw["model_type"] != "glm4_moe",
        "mlp_bias": getattr(config, "mlp_bias", False),
        "windows": windows,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": tuple(config.eos_token_id) if isinstance(config.eos_token_id, list) else config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        **experts_as_transformers_has_them(config),
        **latent,
    }


def latent_as_transformers_has_it(config: Any) -> Raw:
    return {
        "kv_heads": config.num_attention_heads,
        "head_dim": config.qk_head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "v_dim": config.v_head_dim,
        "kv_rank": config.kv_lora_rank,
        "q_rank": config.q_lora_rank or 0,
        "mtp_layers": getattr(config, "num_nextn_predict_layers", 0),
    }


def experts_as_transformers_has_them(config: Any) -> Raw:
    layers = range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        experts = {"experts": config.num_local_experts, "moe_ffn": config.intermediate_size}
        return experts | {"experts_per_token": config.num_experts_per_tok, "moe_layers": None}
    if config.model_type == "gpt_oss":
        biases = {"qkv_bias": config.attention_bias, "mlp_bias": True}
        experts = {"experts": config.num_local_experts, "moe_ffn": config.intermediate_size, "moe_layers": None}
        return biases | experts | {"experts_per_token": config.num_experts_per_tok, "glu_limit": config.swiglu_limit}
    if config.model_type in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        moe_layers = [layer for layer in layers if layer >= config.first_k_dense_replace]
        more = {
            "experts": config.n_routed_experts,
            "shared_ffn": config.n_shared_experts * config.moe_intermediate_size,
            "router_scale": config.routed_scaling_factor,
            "qkv_bias": config.attention_bias,
        }
        if config.model_type != "deepseek_v2":
            more |= {"router_groups": config.n_group, "router_group_topk": config.topk_group}
        if config.model_type == "glm4_moe":
            more |= {"qk_norm": config.use_qk_norm}
    elif config.model_type in ("qwen2_moe", "qwen3_moe"):
        dense, step = config.mlp_only_layers, config.decoder_sparse_step
        moe_layers = [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]
        more = {"experts": config.num_experts}
        if config.model_type == "qwen2_moe":
            more |= {"shared_ffn": config.shared_expert_intermediate_size, "qkv_bias": config.qkv_bias}
    else:
        return {}
    return more | {
        "experts_per_token": config.num_experts_per_tok,
        "moe_ffn": config.moe_intermediate_size,
        "moe_layers": None if len(moe_layers) == len(layers) else tuple(moe_layers),
        "renormalize": config.norm_topk_prob,
    }


def gpt2_as_transformers_has_it(config: Any) -> Raw:
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    return {
        "layers": config.n_layer,
        "hidden": config.n_embd,
        "heads": config.n_head,
        "kv_heads": config.n_head,
        "head_dim": config.n_embd // config.n_head,
        "ffn": config.n_inner or 4 * config.n_embd,
        "vocab": config.vocab_size,
        "max_positions": config.n_positions,
        "norm_epsilon": config.layer_norm_epsilon,
        "activation": activations[config.activation_function],
        "tie_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": tuple(config.eos_token_id) if isinstance(config.eos_token_id, list) else config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def as_we_have_it(config: ModelConfig) -> dict[str, Any]:
    """Ours in the same words."""
    windowed = range(config.layers) if config.windowed_layers is None else config.windowed_layers
    described = {item: getattr(config, item) for item in vars(config)}
    described["windows"] = [config.sliding_window if layer in windowed else None for layer in range(config.layers)]
    return described


def assert_read_alike(raw: Raw) -> None:
    ours, theirs = as_we_have_it(read(raw)), as_transformers_has_it(raw)
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.oracle
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("words", [in_old_words, in_new_words])
@pytest.mark.parametrize("name", SCALED)
def test_a_complete_config_is_read_as_transformers_reads_it(name: str, words: Any, scaling: Raw | None) -> None:
    assert_read_alike(words(raw_config(name, pad_token_id=0, eos_token_id=[2, 7]), 5e5, scaling))


@pytest.mark.oracle
@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_keys_that_are_left_out_have_the_values_that_transformers_gives_them(name: str) -> None:
    raw = raw_config(name, hidden_size=64, num_attention_heads=32)
    needed = (*NEEDED, "num_experts_per_tok") if name == "deepseek_v2" else NEEDED
    assert_read_alike({key: raw[key] for key in needed})


TRANSFORMERS_CANNOT = (
    ("qwen3", "head_dim"),
    ("mistral", "num_key_value_heads"),
    ("mixtral", "num_key_value_heads"),
    ("qwen2_moe", "num_key_value_heads"),
    ("qwen3_moe", "num_key_value_heads"),
    ("glm4_moe", "num_key_value_heads"),
    ("gemma", "num_key_value_heads"),
    ("gemma", "head_dim"),
    ("gpt_oss", "num_key_value_heads"),
    ("gpt_oss", "head_dim"),
)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "words", [{}, {"n_inner": 48}, {"n_inner": None}, {"tie_word_embeddings": False}, {"eos_token_id": [2, 7]}]
)
@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
def test_a_gpt2_is_read_as_transformers_reads_it(activation: str, words: Raw) -> None:
    assert_read_alike(raw_gpt2(activation_function=activation, pad_token_id=0, **words))


@pytest.mark.oracle
def test_keys_that_a_gpt2_leaves_out_have_the_values_that_transformers_gives_them() -> None:
    raw = raw_gpt2()
    sizes = ("architectures", "model_type", "n_embd", "n_layer", "n_head", "n_positions", "vocab_size")
    assert_read_alike({key: raw[key] for key in sizes})


def test_a_gpt2_has_learned_positions_layer_norms_and_biases() -> None:
    config = read(raw_gpt2())
    assert (config.positions, config.normalization, config.gated) == ("learned", "LayerNorm", False)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.tie_embeddings) == (True,) * 4


@pytest.mark.parametrize(
    "words",
    [{"activation_function": "relu"}, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}],
)
def test_a_gpt2_that_computes_something_else_is_refused(words: Raw) -> None:
    with pytest.raises(NotExpressible, match="not GPT-2's own"):
        read(raw_gpt2(**words))


@pytest.mark.parametrize(
    ("name", "words", "layers"),
    [
        ("mixtral", {}, None),
        ("qwen2_moe", {}, (1, 3)),
        ("qwen2_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [3]}, (0, 1, 2)),
        ("qwen3_moe", {}, (1, 3)),
        ("qwen3_moe", {"mlp_only_layers": None}, None),
        ("glm4_moe", {}, (2, 3)),
        ("glm4_moe", {"first_k_dense_replace": 0}, None),
    ],
)
def test_layers_have_experts_where_the_config_says_so(name: str, words: Raw, layers: tuple[int, ...] | None) -> None:
    assert read(raw_config(name, **words)).moe_layers == layers


@pytest.mark.oracle
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "sliding_window", "rope_scaling", "eos_token_id"])
@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_keys_that_are_null_have_the_values_that_transformers_gives_them(name: str, key: str) -> None:
    if (name, key) in TRANSFORMERS_CANNOT:
        pytest.skip("transformers 5 refuses it, or has no model for it")
    assert_read_alike(raw_config(name, **{key: None}))


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_key_value_heads_that_are_null_are_as_many_as_heads(name: str) -> None:
    assert read(raw_config(name, num_attention_heads=16, num_key_value_heads=None)).kv_heads == 16


WINDOW_WORDS = st.fixed_dictionaries(
    {},
    optional={
        "use_sliding_window": st.booleans(),
        "sliding_window": st.none() | st.integers(1, 64),
        "max_window_layers": st.integers(0, 6),
        "layer_types": st.none()
        | st.lists(st.sampled_from(("full_attention", "sliding_attention")), min_size=4, max_size=4),
    },
)


@pytest.mark.oracle
@given(st.sampled_from(("qwen2", "qwen3", "qwen2_moe")), WINDOW_WORDS)
@settings(max_examples=100, deadline=None)
def test_sliding_windows_of_qwen_are_those_of_transformers(name: str, words: Raw) -> None:
    assert_read_alike(raw_config(name, **words))


@pytest.mark.parametrize(
    ("words", "windows"),
    [
        ({"sliding_window": 8}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": True}, [None] * 4),  # 28 layers come first without one
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 8]),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, [8] * 4),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None] * 4),
        ({"use_sliding_window": True, "max_window_layers": 2}, [None, None, 4096, 4096]),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, None, 8, None],
        ),
        ({"sliding_window": 8, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, [None] * 4),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_qwen_has_its_window_only_where_it_says_so(name: str, words: Raw, windows: list[int | None]) -> None:
    assert as_we_have_it(read(raw_config(name, **words)))["windows"] == windows


@pytest.mark.parametrize(
    ("words", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 16}, 16)]
)
def test_a_mistral_has_a_window_unless_it_says_no(words: Raw, window: int | None) -> None:
    config = read(raw_config("mistral", **words))
    assert (config.sliding_window, config.windowed_layers) == (window, None)


# There and back.


@st.composite
def scalings(draw: Draw) -> Raw | None:
    """What Megatron core has words for."""
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
    words = {
        "n_head": heads,
        "n_embd": heads * draw(st.integers(1, 20)),
        "n_inner": draw(st.none() | st.integers(1, 99)),
        "activation_function": draw(st.sampled_from(("gelu_new", "gelu"))),
        "tie_word_embeddings": draw(st.booleans()),
        "torch_dtype": draw(st.sampled_from(("bfloat16", "float16", "float32"))),
    }
    return read(raw_gpt2(bos_token_id=None, eos_token_id=None, **words))


@st.composite
def with_experts(draw: Draw, config: ModelConfig) -> ModelConfig:
    """The model with experts, as its family has them."""
    name, experts, moe_ffn = config.family, draw(st.integers(1, 9)), draw(st.integers(1, 99))
    config = replace(config, experts=experts, experts_per_token=draw(st.integers(1, experts)), moe_ffn=moe_ffn)
    if name in ("mixtral", "gpt_oss"):
        return replace(config, ffn=moe_ffn)
    if name in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        first = draw(st.integers(0, config.layers - 1))
        config = replace(
            config,
            moe_layers=tuple(range(first, config.layers)) if first else None,
            shared_ffn=moe_ffn * draw(st.integers(0, 3)),
            router_scale=draw(st.sampled_from((1.0, 2.5))),
        )
        if name == "deepseek_v2":
            return replace(config, renormalize=False)
        groups, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        if groups > 1:  # Megatron ranks groups as this class does only then
            config = replace(config, experts=8 * groups, experts_per_token=2 * topk)
        config = replace(config, router_score="sigmoid", router_bias=True, router_groups=groups, router_group_topk=topk)
        return replace(config, rotary_percent=draw(st.sampled_from((0.25, 0.5, 1.0)))) if name == "glm4_moe" else config
    layers = tuple(sorted(draw(st.sets(st.integers(0, config.layers - 1), min_size=1))))
    config = replace(
        config, moe_layers=layers if len(layers) < config.layers else None, renormalize=draw(st.booleans())
    )
    shared = draw(st.integers(1, 99))
    return replace(config, shared_ffn=shared, shared_gate=True) if name == "qwen2_moe" else config


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
    return replace(
        config,
        norm_epsilon=1e-6,
        kv_heads=config.heads,
        rope_dim=rope_dim,
        head_dim=rope_dim + draw(st.integers(1, 9)),
        v_dim=draw(st.integers(1, 9)),
        kv_rank=draw(st.integers(1, 9)),
        q_rank=draw(st.integers(0, 9)),
        rope_scaling=draw(st.sampled_from((None, yarn | mscales))),
    )


@st.composite
def configs(draw: Draw) -> ModelConfig:
    """A model that its family's config.json and Megatron's arguments can both describe."""
    name = draw(st.sampled_from(FAMILIES))
    if name == "gpt2":
        return draw(gpt2_configs())
    layers, kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    config = ModelConfig(
        family=name,
        layers=layers,
        hidden=draw(st.integers(1, 99)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 50)),
        ffn=draw(st.integers(1, 99)),
        vocab=draw(st.integers(1, 999)),
        max_positions=draw(st.integers(1, 9999)),
        norm_epsilon=draw(st.sampled_from((1e-5, 1e-6, 3e-7))),
        rope_theta=draw(st.sampled_from((1e4, 5e5, 1e6, 12345.5))),
        rope_scaling=draw(scalings()),
        tie_embeddings=draw(st.booleans()),
        dtype=draw(st.sampled_from(("bfloat16", "float16", "float32"))),
    )
    if name == "llama":
        bias = draw(st.booleans())
        return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    if name == "gemma":
        scale = config.hidden**0.5
        return replace(config, zero_centered_norm=True, activation="gelu_tanh", embedding_scale=scale)
    if name.startswith("deepseek"):
        return draw(with_latent_attention(draw(with_experts(config))))
    if name == "mistral":
        return replace(config, sliding_window=draw(st.integers(1, 99)))
    if name == "phi3":
        return replace(config, sliding_window=draw(st.none() | st.integers(1, 99)), rope_scaling=None)
    if name in EXPERT_WORDS:
        config = draw(with_experts(config))
    if name == "glm4_moe":
        if config.rotary_percent != 1 and (config.rope_scaling or {}).get("rope_type") == "yarn":
            config = replace(config, rope_scaling=None)  # Megatron's yarn is for whole heads
        return replace(config, qkv_bias=draw(st.booleans()), qk_norm=draw(st.booleans()))
    if name == "gpt_oss":
        experts = {"activation": "quick_gelu", "glu_limit": draw(st.sampled_from((7.0, 5.5))), "glu_offset": 1.0}
        biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "sinks"), True)
        config = replace(config, **experts, **biases)
    if name in ("mixtral", "qwen3_moe"):
        window = draw(st.none() | st.integers(1, 99))
        return replace(config, sliding_window=window, qk_norm=name == "qwen3_moe")
    if name != "gpt_oss":
        config = replace(config, qkv_bias=name in ("qwen2", "qwen2_moe"), qk_norm=name == "qwen3")
    windowed = tuple(sorted(draw(st.sets(st.integers(0, layers - 1)))))
    if not windowed:
        return config
    return replace(
        config, sliding_window=draw(st.integers(1, 99)), windowed_layers=windowed if len(windowed) < layers else None
    )


@given(
    configs(),
    st.none() | st.integers(0, 9),
    st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1).map(tuple),
)
@settings(max_examples=200, deadline=None)
def test_what_is_written_for_hugging_face_means_the_same_model(config: ModelConfig, bos: int | None, eos: Any) -> None:
    config = replace(config, bos_token_id=bos, eos_token_id=eos, pad_token_id=bos)
    written = family(config.family).write_hf(config)
    assert read(json.loads(json.dumps(written))) == config


@pytest.mark.oracle
@given(configs())
@settings(max_examples=60, deadline=None)
def test_what_is_written_for_hugging_face_means_the_same_to_transformers(config: ModelConfig) -> None:
    if config.family != "gpt2":
        heads = config.kv_heads  # transformers wants a hidden size that heads divide
        config = replace(config, heads=heads, hidden=heads * config.hidden)
    if config.family == "gemma":
        config = replace(config, embedding_scale=config.hidden**0.5)
    theirs = as_transformers_has_it(family(config.family).write_hf(config))
    ours = as_we_have_it(config)
    if config.family == "qwen2":
        theirs["head_dim"] = ours["head_dim"]
    assert {name: ours[name] for name in theirs} == theirs


def arguments(config: ModelConfig, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"transformer_impl": "local", "vocab_divisor": 8, "padded_vocab": config.vocab}
    options |= {"grouped_experts": False, **more}
    return to_arguments(config, Layout(stage_layers=(config.layers,)), TrainingState(), **options)


def found_in_tensors(config: ModelConfig) -> dict[str, Any]:
    """What a loader reads off the tensors."""
    fields = (
        "layers",
        "hidden",
        "ffn",
        "vocab",
        "tie_embeddings",
        "qkv_bias",
        "o_bias",
        "mlp_bias",
        "qk_norm",
        "sinks",
        "gated",
        "experts",
        "moe_layers",
        "shared_gate",
        "router_bias",
        "dtype",
    )
    return {name: getattr(config, name) for name in fields}


@given(configs())
@settings(max_examples=200, deadline=None)
def test_megatrons_arguments_lead_back_to_the_same_model(config: ModelConfig) -> None:
    if config.family == "phi3":  # to Megatron it is a Llama or, with a window, a Mistral
        config = replace(config, family="mistral" if config.sliding_window else "llama")
    assert from_arguments(Namespace(**arguments(config)), found_in_tensors(config)) == config


LLAMA = read(in_old_words(raw_config("llama", bos_token_id=None, eos_token_id=None), 1e4, None))
"""A Llama as Megatron's arguments can describe it: without token ids."""


@pytest.mark.parametrize(
    ("names", "epsilon"),
    [
        ({"norm_epsilon": 3e-6}, 3e-6),
        ({"layernorm_epsilon": 4e-6}, 4e-6),
        ({}, 1e-5),
        ({"norm_epsilon": None, "layernorm_epsilon": 2e-6}, 2e-6),
    ],
)
def test_the_norm_epsilon_is_read_in_every_spelling(names: dict[str, float | None], epsilon: float) -> None:
    args = arguments(LLAMA)
    del args["norm_epsilon"], args["layernorm_epsilon"]
    assert from_arguments(Namespace(**args, **names), found_in_tensors(LLAMA)).norm_epsilon == epsilon


def test_the_norm_epsilon_is_written_in_every_spelling() -> None:
    written = arguments(LLAMA)
    assert written["norm_epsilon"] == written["layernorm_epsilon"] == 1e-5
    assert written["apply_layernorm_1p"] is written["layernorm_zero_centered_gamma"] is False


def test_one_query_group_without_grouped_attention_means_as_many_as_heads() -> None:
    config = replace(LLAMA, kv_heads=8)
    args = arguments(config)
    assert (args["group_query_attention"], args["num_query_groups"]) == (False, 1)
    assert from_arguments(Namespace(**args), found_in_tensors(config)).kv_heads == 8


def test_one_query_group_with_grouped_attention_means_one() -> None:
    config = replace(LLAMA, kv_heads=1)
    args = arguments(config)
    assert (args["group_query_attention"], args["num_query_groups"]) == (True, 1)
    assert from_arguments(Namespace(**args), found_in_tensors(config)).kv_heads == 1


def test_arguments_of_old_releases_have_fewer_names() -> None:
    config = replace(LLAMA, kv_heads=8, head_dim=4, norm_epsilon=1e-5)
    args = arguments(config)
    kept = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "layernorm_epsilon",
        "position_embedding_type",
        "swiglu",
    )
    assert from_arguments(Namespace(**{name: args[name] for name in kept}), found_in_tensors(config)) == config


def test_tensors_are_believed_where_arguments_say_something_else() -> None:
    args = arguments(LLAMA) | {
        "ffn_hidden_size": 1,
        "params_dtype": "float32",
        "untie_embeddings_and_output_weights": False,
        "num_layers": 9,
    }
    assert from_arguments(Namespace(**args), found_in_tensors(LLAMA)) == LLAMA


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_attention_heads": None}, CorruptCheckpoint, "don't say num_attention_heads; give --config"),
        ({"max_position_embeddings": None}, CorruptCheckpoint, "don't say max_position_embeddings"),
        ({"position_embedding_type": "alibi"}, UnknownFamily, "position_embedding_type is 'alibi'"),
        (
            {"position_embedding_type": "learned_absolute"},
            UnknownFamily,
            "no model family that we know .positions learned",
        ),
        ({"normalization": "LayerNorm"}, UnknownFamily, "no model family that we know .*normalization LayerNorm"),
        ({"normalization": "other"}, UnknownFamily, "normalization is 'other'"),
        ({"squared_relu": True}, UnknownFamily, "squared_relu is True"),
        ({"layernorm_zero_centered_gamma": True}, UnknownFamily, "zero-centered"),
        ({"apply_layernorm_1p": True}, UnknownFamily, "zero-centered"),
        ({"softmax_type": "off-by-one"}, UnknownFamily, "softmax_type is 'off-by-one'"),
        (
            {"activation_func_clamp_value": 7.0},
            UnknownFamily,
            "as only GPT-OSS has, but differs from it: activation silu",
        ),
        ({"glu_linear_offset": 1.0}, UnknownFamily, "as only GPT-OSS has"),
        ({"quick_geglu": True, "swiglu": False}, UnknownFamily, "differs from it: glu_offset 0"),
        ({"position_embedding_type": "yarn"}, CorruptCheckpoint, "don't say yarn_rotary_scaling_factor; give --config"),
        ({"enable_gpt_oss": True}, CorruptCheckpoint, "don't say yarn_rotary_scaling_factor"),
    ],
)
def test_arguments_of_another_kind_of_model_are_refused(
    changed: Raw, error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_arguments(Namespace(**(arguments(LLAMA) | changed)), found_in_tensors(LLAMA))


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"rotary_percent": 0.5}, "rotary_percent"), ({"rotary_interleaved": True}, "rotary_interleaved")],
)
def test_arguments_that_turn_another_part_of_a_head_are_refused(changed: Raw, message: str) -> None:
    """A Llama's config.json has no words for them, and without them the model computes something else."""
    with pytest.raises(CheckpointError, match=message):
        from_arguments(Namespace(**(arguments(LLAMA) | changed)), found_in_tensors(LLAMA))


@pytest.mark.parametrize(
    ("args", "padded", "tp", "vocab"),
    [
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 8}, 104, 1, 100),
        ({"vocab_size": 99, "make_vocab_size_divisible_by": 8, "tokenizer_type": "NullTokenizer"}, 104, 1, 100),
        ({"vocab_size": 100}, 128, 1, 100),
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 8}, 128, 4, 100),
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 8}, 128, 1, None),
        ({"vocab_size": 105, "make_vocab_size_divisible_by": 8}, 104, 1, None),
        ({"vocab_size": None}, 104, 1, None),
        ({}, 104, 1, None),
    ],
)
def test_the_true_vocabulary_is_believed_only_if_padding_leads_to_the_rows_there_are(
    args: Raw, padded: int, tp: int, vocab: int | None
) -> None:
    assert true_vocab(Namespace(**args), padded, tp) == vocab


# Refusals.


@pytest.mark.parametrize(
    "scaling",
    [SCALINGS["dynamic"], {"rope_type": "yarn", **YARN, "attention_factor": 1.5}, {"rope_type": "longrope"}],
    ids=str,
)
def test_rope_scaling_that_megatron_core_does_not_know_is_refused(scaling: Raw) -> None:
    config = replace(LLAMA, rope_scaling=scaling)
    with pytest.raises(
        NotExpressible,
        match=f"rope scaling .*{scaling['rope_type']}.* has no equivalent in Megatron core; with --allow-lossy rope_scaling",
    ):
        arguments(config)
    lossy = arguments(config, allow_lossy=True)
    assert (lossy["use_rope_scaling"], lossy["rotary_seq_len_interpolation_factor"]) == (False, None)
    assert lossy["position_embedding_type"] == "rope"


@pytest.mark.parametrize("changed", [{"rotary_percent": 0.5}, {}])
def test_yarn_is_for_core_models_whose_whole_heads_rotate(changed: Raw) -> None:
    config = replace(LLAMA, rope_scaling=SCALINGS["yarn"], **changed)
    with pytest.raises(NotExpressible, match="yarn"):
        arguments(config, legacy=not changed)


@pytest.mark.parametrize(
    "changed", [{"low_freq_factor": 2.0}, {"high_freq_factor": 8.0}, {"original_max_position_embeddings": 4096}]
)
def test_llama3_scaling_with_other_numbers_than_megatron_has_is_refused(changed: Raw) -> None:
    with pytest.raises(NotExpressible, match=r"llama3.* has no equivalent"):
        arguments(replace(LLAMA, rope_scaling={"rope_type": "llama3", **LLAMA3, **changed}))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear"},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "llama3", **LLAMA3, "factor": None},
    ],
)
def test_incomplete_rope_scaling_is_refused_and_no_crash(scaling: Raw) -> None:
    with pytest.raises(CheckpointError, match="rope"):
        arguments(read(in_old_words(raw_config("llama"), 1e4, scaling)))


def test_scaling_that_was_left_out_is_there_again_after_the_way_back(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", extra_config={"rope_scaling": SCALINGS["dynamic"]})
    with pytest.raises(NotExpressible, match="dynamic"):
        convert(hf, tmp_path / "core", "core", ConvertOptions())
    assert not (tmp_path / "core").exists()
    convert(hf, tmp_path / "core", "core", ConvertOptions(save=SaveOptions(allow_lossy=("rope_scaling",))))
    convert(tmp_path / "core", tmp_path / "back", "hf", ConvertOptions())
    assert load_config(tmp_path / "back" / "config.json") == load_config(hf / "config.json")
    assert fingerprint(tmp_path / "back") == fingerprint(hf)


@pytest.mark.parametrize(
    "biases",
    [
        {"qkv_bias": True, "o_bias": True},
        {"mlp_bias": True},
        {"o_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "mlp_bias": True},
    ],
)
def test_a_set_of_biases_that_megatron_core_does_not_know_is_refused(biases: Raw) -> None:
    with pytest.raises(NotExpressible, match="biases on all linear layers, on q, k and v only, or on none"):
        arguments(replace(LLAMA, **biases))


def test_attention_biases_without_mlp_biases_do_not_go_into_core(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf", extra_config={"attention_bias": True})
    with pytest.raises(NotExpressible, match="this model has another set"):
        convert(hf, tmp_path / "core", "core", ConvertOptions())


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            {"quantization_config": {"quant_method": "gptq"}},
            NotExpressible,
            r"quantized \(gptq\); convert an unquantized copy",
        ),
        ({"quantization_config": {"bits": 4}}, NotExpressible, "quantized"),
        ({"partial_rotary_factor": 0.5}, NotExpressible, r"partial_rotary_factor 0\.5"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
            NotExpressible,
            "partial_rotary",
        ),
        ({"hidden_act": "gelu"}, UnknownFamily, "hidden_act 'gelu'"),
        ({"hidden_size": None}, CorruptCheckpoint, "hidden_size should be a positive number, found None"),
        ({"num_hidden_layers": 0}, CorruptCheckpoint, "num_hidden_layers should be a positive number, found 0"),
        ({"vocab_size": "131"}, CorruptCheckpoint, "vocab_size should be a positive number, found '131'"),
        ({"num_attention_heads": True}, CorruptCheckpoint, "num_attention_heads should be"),
        ({"num_key_value_heads": "4"}, CorruptCheckpoint, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, CorruptCheckpoint, "num_key_value_heads"),
        ({"rope_scaling": "linear"}, CorruptCheckpoint, "rope_scaling"),
        ({"rope_theta": "big"}, CorruptCheckpoint, "rope_theta"),
        ({"rms_norm_eps": None}, CorruptCheckpoint, "rms_norm_eps"),
        ({"layer_types": ["sliding_attention"], "use_sliding_window": True}, CorruptCheckpoint, "layer_types"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_a_config_that_cannot_be_is_refused(name: str, words: Raw, error: type[CheckpointError], message: str) -> None:
    if name != "qwen2" and "layer_types" in words:
        pytest.skip("a Llama or Mixtral has no layer types")
    with pytest.raises(error, match=message):
        read(raw_config(name, **words))


@pytest.mark.parametrize(
    ("name", "features", "message"),
    [
        ("llama", {"qk_norm": True}, "q and k norms, for which LlamaForCausalLM has no place"),
        ("llama", {"sliding_window": 8}, "a sliding window"),
        ("llama", {"qkv_bias": True}, "biases on q, k, v but not on the output"),
        ("llama", {"o_bias": True}, "a bias on the output only"),
        ("mistral", {"qkv_bias": True}, "attention biases"),
        ("mistral", {"mlp_bias": True}, "MLP biases"),
        ("mistral", {"sliding_window": 8, "windowed_layers": (1,)}, "a sliding window on some layers only"),
        ("qwen2", {"qkv_bias": True, "o_bias": True}, "a bias on the attention output"),
        ("qwen2", {"qkv_bias": True, "mlp_bias": True}, "MLP biases"),
        ("qwen2", {"qkv_bias": True, "qk_norm": True}, "q and k norms"),
        ("qwen3", {"qk_norm": True, "mlp_bias": True}, "MLP biases"),
        ("qwen3", {"qk_norm": True, "qkv_bias": True}, "biases on q, k, v but not on the output"),
        ("mixtral", {"qkv_bias": True}, "attention biases"),
        ("mixtral", {"moe_layers": (1,)}, "dense layers"),
        ("mixtral", {"shared_ffn": 8}, "a shared expert"),
        ("qwen2_moe", {"router_scale": 2.0}, "a router scale"),
        ("qwen3_moe", {"shared_ffn": 8}, "a shared expert"),
        ("qwen3_moe", {"sliding_window": 8, "windowed_layers": (1,)}, "a sliding window on some layers only"),
        ("glm4_moe", {"moe_ffn": 8, "shared_ffn": 12}, "a shared expert of width 12"),
        ("glm4_moe", {"moe_ffn": 8, "moe_layers": (0, 2)}, "dense layers between layers with experts"),
        ("gpt2", {"experts": 4, "experts_per_token": 1, "moe_ffn": 8}, "experts"),
        ("gpt2", {}, "no place for grouped queries"),
    ],
)
def test_a_feature_without_a_place_in_config_json_is_refused(name: str, features: Raw, message: str) -> None:
    with pytest.raises(NotExpressible, match=message):
        family(name).write_hf(replace(LLAMA, family=name, **features))


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": [], "model_type": "mamba"}, "mamba"),
        ({"architectures": None, "model_type": None}, "no architecture"),
    ],
)
def test_an_unknown_architecture_is_told_what_is_known(words: Raw, asked: str) -> None:
    with pytest.raises(UnknownFamily) as caught:
        family_of_hf(raw_config("llama") | words, "m/config.json")
    message = str(caught.value)
    assert message.startswith(f"m/config.json: architecture {asked} is not known; known are ")
    for table in families().values():
        assert all(name in message for name in table.architectures)


@pytest.mark.parametrize("content", ["", "[1]", "{", "null", '"x"', "\xff"])
def test_a_config_file_that_is_no_json_object_is_corrupt(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(CorruptCheckpoint, match=r"config\.json"):
        load_config(path)


# The config.json that is shipped.


def test_a_models_own_words_are_kept_and_only_the_dtype_is_brought_up_to_date() -> None:
    raw = raw_config("llama", dtype="float32", custom={"a": 1}, torch_dtype_note="x")
    config = replace(read(raw), dtype="bfloat16")
    shipped = json.loads(config_json(config, family("llama").write_hf(config)))
    assert shipped == raw | {"dtype": "bfloat16"}


def test_without_words_of_its_own_a_model_gets_a_complete_config() -> None:
    shipped = json.loads(config_json(LLAMA, written := family("llama").write_hf(replace(LLAMA, hf=None))))
    assert shipped | {"torch_dtype": "bfloat16"} == shipped
    assert read(written) == LLAMA


def test_a_config_describes_at_least_what_decides_about_tensors() -> None:
    assert set(STRUCTURE) <= set(vars(LLAMA))


def test_a_router_that_is_not_mixtrals_is_not_written_as_mixtral() -> None:
    config = replace(read(raw_config("mixtral")), renormalize=False)
    with pytest.raises(NotExpressible, match="router isn't Mixtral's"):
        family("mixtral").write_hf(config)


def test_a_sigmoid_router_that_leaves_its_weights_alone_is_not_written_for_megatron() -> None:
    with pytest.raises(NotExpressible, match="sigmoid router"):
        arguments(replace(read(raw_config("glm4_moe")), renormalize=False))
