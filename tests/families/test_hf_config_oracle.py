"""The keys of a config.json mean what transformers makes of them."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaconv.errors import CorruptCheckpoint, UnknownFamily
from megaconv.families import family
from megaconv.families.parts.hf_config import updated
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import changed, fields_of
from tests.config_models import (
    DEEPSEEKS,
    IN_TRANSFORMERS,
    LLAMA_LIKE,
    SCALED,
    SCALINGS,
    WITHOUT_CLASS,
    Raw,
    configs,
    in_new_keys,
    in_old_keys,
    raw_config,
    raw_gpt2,
    read,
)

NEEDED = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


def hybrid_as_transformers_has_it(config: Any) -> dict[str, Any]:
    mixers = {
        "linear_attention": "mamba",
        "full_attention": "attention",
        "moe": "none",
        "mlp": "none",
    }
    return {
        "layers.count": config.num_hidden_layers,
        "mixers": [mixers[kind] for kind in config.layers_block_type],
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "attention.heads": config.num_attention_heads,
        "attention.kv_heads": config.num_key_value_heads,
        "attention.head_dim": config.head_dim,
        "mlp.ffn": config.intermediate_size,
        "mamba.heads": config.mamba_num_heads,
        "mamba.head_dim": config.mamba_head_dim,
        "mamba.groups": config.n_groups,
        "mamba.state": config.ssm_state_size,
        "tie_embeddings": config.tie_word_embeddings,
    }


WITHOUT_DENSE_LAYERS = ("lara_mini", "qwen3_5_moe_text")
"""Classes with experts in every layer. Their configurations have no intermediate_size."""


def as_transformers_has_it(raw: Raw) -> Any:
    """transformers' own reading, as one of our configurations."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**deepcopy({"model_type": raw["model_type"], **raw}))
    if raw["model_type"] == "gpt2":
        return gpt2_as_transformers_has_it(config)
    if raw["model_type"] == "nemotron_h":
        return hybrid_as_transformers_has_it(config)
    config.standardize_rope_params()  # the model does this again after all keys have become attributes
    rope, local = dict(config.rope_parameters), {}
    if "full_attention" in rope:
        local = two_ropes_as_transformers_has_them(raw["model_type"], rope)
        rope = dict(rope["full_attention"])
    temperature = {}
    if raw["model_type"] == "ministral3":
        temperature = {"temperature.scale": rope.pop("llama_4_scaling_beta", 0.0)}
        for other in ("type", "max_position_embeddings"):  # repeat another value
            rope.pop(other, None)
    window = getattr(config, "sliding_window", None) or None
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    if config.model_type == "bamba":  # each of whose layers is two of ours
        count, kinds = 2 * count, ["full_attention"] * 2 * count
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    is_latent = raw["model_type"].startswith("deepseek") or raw["model_type"] in (
        "glm4_moe_lite",
        "glm_moe_dsa",
        "sarvam_mla",
        "youtu",
    )
    latent = latent_as_transformers_has_it(config) if is_latent else {}
    return {
        "layers.count": count,
        "hidden": config.hidden_size,
        "attention.heads": config.num_attention_heads,
        "attention.kv_heads": getattr(config, "num_key_value_heads", None)
        or config.num_attention_heads,
        "attention.head_dim": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        "mlp.ffn": config.moe_intermediate_size
        if raw["model_type"] in WITHOUT_DENSE_LAYERS
        # A Solar Open without dense layers may leave this size out.
        else getattr(config, "intermediate_size", 1280),
        "vocab": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "norm.epsilon": getattr(config, EPSILON.get(config.model_type, "rms_norm_eps")),
        "positions.theta": rope.pop("rope_theta"),
        "positions.rotary_percent": rope.pop("partial_rotary_factor", 1.0),
        "positions.scaling": None if rope["rope_type"] == "default" else rope,
        "tie_embeddings": config.tie_word_embeddings,
        **biases_as_transformers_has_them(config),
        "windows": windows,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": tuple(config.eos_token_id)
        if isinstance(config.eos_token_id, list)
        else config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        **experts_as_transformers_has_them(config),
        **latent,
        **local,
        **temperature,
        **gemma_2_as_transformers_has_it(config),
        **(
            {"rotates": [not window or kind == "sliding_attention" for kind in kinds]}
            if config.model_type == "exaone4"
            else {}
        ),
        **(linear_as_transformers_has_it(config) if "linear_attention" in kinds else {}),
    }


def two_ropes_as_transformers_has_them(model_type: str, parameters: Raw) -> Raw:
    """The base of layers with a window, which nothing scales."""
    full, windowed = parameters["full_attention"], parameters["sliding_attention"]
    return (
        {}
        if model_type == "olmo3" and full == windowed
        else {"positions.local_theta": windowed["rope_theta"]}
    )


def gemma_2_as_transformers_has_it(config: Any) -> Raw:
    if config.model_type not in ("gemma2", "gemma3_text"):
        return {}
    scalar, scale = config.query_pre_attn_scalar, config.query_pre_attn_scalar**-0.5
    caps = {
        "attention.score_cap": config.attn_logit_softcapping,
        "head.logit_cap": config.final_logit_softcapping,
    }
    return caps | {"attention.scale": None if scalar == config.head_dim else scale}


EPSILON = {
    "nemotron": "norm_eps",
    "starcoder2": "norm_epsilon",
    "gpt_neox": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "jais2": "layer_norm_eps",
}


def biases_as_transformers_has_them(config: Any) -> Raw:
    """Biases as transformers sets them: on q, k and v, on all of attention, or on everything, by one key or by
    several."""
    everywhere = getattr(config, "use_bias", False)
    on_attention = everywhere or getattr(config, "attention_bias", config.model_type == "seed_oss")
    only_inputs = config.model_type in ("glm", "glm4", "glm4_moe", "solar_open")
    return {
        "attention.o_bias": getattr(config, "attention_out_bias", on_attention and not only_inputs),
        "mlp.bias": everywhere or getattr(config, "mlp_bias", config.model_type == "gpt_neox"),
        **(
            {"attention.qkv_bias": config.attention_bias}
            if config.model_type in ("seed_oss", "glm", "jais2")
            else {}
        ),
        **({"attention.qkv_bias": config.use_qkv_bias} if config.model_type == "stablelm" else {}),
    }


def linear_as_transformers_has_it(config: Any) -> Raw:
    return {
        "linear.key_heads": config.linear_num_key_heads,
        "linear.value_heads": config.linear_num_value_heads,
        "linear.key_dim": config.linear_key_head_dim,
        "linear.value_dim": config.linear_value_head_dim,
        "linear.conv": config.linear_conv_kernel_dim,
        "mixers": [
            "linear" if kind == "linear_attention" else "attention" for kind in config.layer_types
        ],
    }


def latent_as_transformers_has_it(config: Any) -> Raw:
    return {
        "attention.kv_heads": config.num_attention_heads,
        "attention.head_dim": config.qk_head_dim,
        "latent.rope_dim": config.qk_rope_head_dim,
        "latent.v_dim": config.v_head_dim,
        "latent.kv_rank": config.kv_lora_rank,
        "latent.q_rank": config.q_lora_rank or 0,
        "mtp_layers": getattr(config, "num_nextn_predict_layers", 0),
        **(
            {
                "indexer.heads": config.index_n_heads,
                "indexer.head_dim": config.index_head_dim,
                "indexer.topk": config.index_topk,
                "indexer.interleaved": config.model_type == "glm_moe_dsa",
            }
            if hasattr(config, "index_topk")
            else {}
        ),
    }


def experts_as_transformers_has_them(config: Any) -> Raw:
    layers = range(config.num_hidden_layers)
    if config.model_type in ("mixtral", "olmoe", "minimax_m2"):
        experts = {
            "experts.count": config.num_local_experts,
            "experts.ffn": config.intermediate_size,
        }
        return experts | {"experts.per_token": config.num_experts_per_tok, "moe_layers": None}
    if config.model_type == "llama4_text":
        return {
            "experts.count": config.num_local_experts,
            "experts.per_token": config.num_experts_per_tok,
            "experts.ffn": config.intermediate_size,
            "experts.shared_ffn": config.intermediate_size,
            "mlp.ffn": config.intermediate_size_mlp,
            "moe_layers": None if config.moe_layers == list(layers) else tuple(config.moe_layers),
            "rotates": [bool(word) for word in config.no_rope_layers],
            "attention.qk_l2_norm": config.use_qk_norm,
        }
    if config.model_type == "gpt_oss":
        biases = {"attention.qkv_bias": config.attention_bias, "mlp.bias": True}
        experts = {
            "experts.count": config.num_local_experts,
            "experts.ffn": config.intermediate_size,
            "moe_layers": None,
        }
        return (
            biases
            | experts
            | {"experts.per_token": config.num_experts_per_tok, "mlp.clamp": config.swiglu_limit}
        )
    if config.model_type in DEEPSEEKS:
        moe_layers = [
            layer for layer in layers if layer >= getattr(config, "first_k_dense_replace", 0)
        ]
        if hasattr(config, "mlp_layer_types"):
            moe_layers = [layer for layer in layers if config.mlp_layer_types[layer] == "sparse"]
        if config.model_type == "ernie4_5_moe":
            first, last = config.moe_layer_start_index, config.moe_layer_end_index
            moe_layers = [layer for layer in layers if first <= layer <= last]
        words = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        shared = next(getattr(config, word) for word in words if hasattr(config, word)) or 0
        more = {
            "experts.count": config.num_experts
            if hasattr(config, "num_experts")
            else config.n_routed_experts,
            "experts.shared_ffn": shared * config.moe_intermediate_size,
            "attention.qkv_bias": getattr(config, "attention_bias", False),
        }
        if config.model_type != "ernie4_5_moe":
            factor = getattr(config, "router_scaling_factor", None)
            more |= {"experts.scale": config.routed_scaling_factor if factor is None else factor}
        if hasattr(config, "n_group") and config.model_type != "deepseek_v2":
            more |= {"experts.groups": config.n_group, "experts.group_topk": config.topk_group}
        if config.model_type == "glm4_moe":
            more |= {"attention.qk_norm": config.use_qk_norm}
    elif config.model_type in WITHOUT_DENSE_LAYERS:
        return {
            "experts.count": config.num_experts,
            "experts.per_token": config.num_experts_per_tok,
            "experts.ffn": config.moe_intermediate_size,
            "experts.shared_ffn": config.shared_expert_intermediate_size,
            "experts.renormalize": getattr(config, "norm_topk_prob", True),
            "moe_layers": None,
        }
    elif config.model_type in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        dense, step = config.mlp_only_layers, config.decoder_sparse_step
        moe_layers = [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]
        more = {"experts.count": config.num_experts}
        if config.model_type == "qwen2_moe":
            more |= {
                "experts.shared_ffn": config.shared_expert_intermediate_size,
                "attention.qkv_bias": config.qkv_bias,
            }
        if config.model_type == "qwen3_next":
            more |= {"experts.shared_ffn": config.shared_expert_intermediate_size}
    else:
        return {}
    return more | {
        "experts.per_token": config.num_experts_per_tok,
        "experts.ffn": config.moe_intermediate_size,
        "moe_layers": None if len(moe_layers) == len(layers) else tuple(moe_layers),
        "experts.renormalize": getattr(config, "norm_topk_prob", True),
    }


def gpt2_as_transformers_has_it(config: Any) -> Raw:
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    return {
        "layers.count": config.n_layer,
        "hidden": config.n_embd,
        "attention.heads": config.n_head,
        "attention.kv_heads": config.n_head,
        "attention.head_dim": config.n_embd // config.n_head,
        "mlp.ffn": config.n_inner or 4 * config.n_embd,
        "vocab": config.vocab_size,
        "max_positions": config.n_positions,
        "norm.epsilon": config.layer_norm_epsilon,
        "mlp.activation": activations[config.activation_function],
        "tie_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": tuple(config.eos_token_id)
        if isinstance(config.eos_token_id, list)
        else config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def as_we_have_it(config: ModelConfig) -> dict[str, Any]:
    """Ours under the same keys."""
    described = fields_of(config)
    described["windows"] = [kind.window for kind in config.layers]
    described["rotates"] = [kind.rotates for kind in config.layers]
    described["mixers"] = [kind.mixer for kind in config.layers]
    described["moe_layers"] = (
        None
        if config.layers_with("moe") == tuple(range(config.layer_count))
        else config.layers_with("moe")
    )
    return described


def assert_read_alike(raw: Raw) -> None:
    ours, theirs = as_we_have_it(read(raw)), as_transformers_has_it(raw)
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.oracle
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("keys", [in_old_keys, in_new_keys])
@pytest.mark.parametrize("name", SCALED)
def test_a_complete_config_is_read_as_transformers_reads_it(
    name: str, keys: Any, scaling: Raw | None
) -> None:
    assert_read_alike(keys(raw_config(name, pad_token_id=0, eos_token_id=[2, 7]), 5e5, scaling))


LINEAR: Raw = {"rope_type": "linear", "factor": 2.0}
YARN_ALONE: Raw = {"rope_type": "yarn", "factor": 4.0}
SAID_TWICE: dict[str, Raw] = {
    "the base inside rope_scaling": {"rope_scaling": {**LINEAR, "rope_theta": 777.0}},
    "the base inside and beside": {"rope_theta": 5e3, "rope_scaling": {**LINEAR, "rope_theta": 777.0}},
    "the base inside a rope_scaling that scales nothing": {"rope_scaling": {"rope_type": "default", "rope_theta": 777.0}},
    "rope_scaling beside rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}, "rope_scaling": LINEAR},
    "both, and the base beside": {
        "rope_theta": 777.0, "rope_parameters": {**LINEAR, "rope_theta": 5e3}, "rope_scaling": {"rope_type": "default"}
    },
    "the length in training beside": {"rope_scaling": YARN_ALONE, "original_max_position_embeddings": 24},
    "another length inside": {
        "rope_parameters": {**YARN_ALONE, "original_max_position_embeddings": 48, "rope_theta": 5e3}, "original_max_position_embeddings": 24
    },
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("keys", SAID_TWICE.values(), ids=SAID_TWICE)
@pytest.mark.parametrize("name", ["llama", "glm4", "deepseek_v3"])
def test_rope_keys_in_two_places_are_read_as_transformers_reads_them(name: str, keys: Raw) -> None:
    scaled = "yarn" in str(keys)
    assert_read_alike(
        raw_config(name, **keys, **({"max_position_embeddings": 96} if scaled else {}))
    )


@pytest.mark.oracle
@pytest.mark.parametrize(
    "keys",
    [
        {"partial_rotary_factor": None},
        {
            "rope_theta": 5e3,
            "rope_scaling": {**LINEAR, "partial_rotary_factor": 0.25},
            "partial_rotary_factor": 1.0,
        },
        {
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
            "rope_scaling": LINEAR,
        },
    ],
)
@pytest.mark.parametrize("name", ["glm", "glm4", "stablelm", "nemotron", "qwen3_next"])
def test_the_part_that_rotates_is_read_as_transformers_reads_it(name: str, keys: Raw) -> None:
    given = {
        key: value for key, value in raw_config(name).items() if key != "partial_rotary_factor"
    }
    assert_read_alike(given | keys)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["gemma3_text", "olmo3"])
def test_bases_beside_those_of_each_kind_of_layers_are_read_as_transformers_reads_them(
    name: str,
) -> None:
    nested = {
        "full_attention": {"rope_type": "default"},
        "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
    }
    assert_read_alike(raw_config(name, rope_parameters=nested, rope_theta=777.0))
    local: Raw = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e3},
        "sliding_attention": {"rope_type": "default"},
    }
    if name == "gemma3_text":
        assert_read_alike(raw_config(name, rope_parameters=local, rope_local_base_freq=44.0))


@pytest.mark.oracle
@pytest.mark.parametrize(
    "keys", [{"rope_parameters": {}}, {"rope_scaling": {}}, {"rope_parameters": None}, {}]
)
def test_an_empty_rotation_of_a_gpt_oss_is_read_as_transformers_reads_it(keys: Raw) -> None:
    parameters = pytest.importorskip("transformers").AutoConfig.for_model(
        **raw_config("gpt_oss", rope_theta=777.0, **keys)
    )
    scaled = parameters.rope_parameters["rope_type"] != "default"
    positions = read(raw_config("gpt_oss", rope_theta=777.0, **keys)).positions
    assert (positions.theta, positions.scaling is not None) == (777.0, scaled)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "smollm3",
            {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "use_sliding_window",
        ),
        ("glm4_moe", {"topk_group": 0}, "topk_group should be a positive number, found 0"),
        ("gpt2", {"num_attention_heads": 8}, "n_head is 4 and num_attention_heads 8"),
        ("ernie4_5_moe", {"num_experts_per_tok": 1}, "moe_k is 2 and num_experts_per_tok 1"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(name: str, keys: Raw, message: str) -> None:
    raw = raw_gpt2(**keys) if name == "gpt2" else raw_config(name, **keys)
    with pytest.raises(CorruptCheckpoint, match=message):
        read(raw)


@pytest.mark.parametrize("size", ["x", [7], {"size": 7}, 2.5, True])
@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_a_window_that_is_no_number_is_refused(name: str, size: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="attention window should be a positive number"):
        read(raw_config(name, sliding_window=size))


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "olmo3", "gpt_oss"])
def test_a_model_without_windows_is_written_so_that_transformers_can_run_it(name: str) -> None:
    """Its models make a mask with a window, whether a layer has one or not."""
    config = read(raw_config(name, layer_types=["full_attention"] * 4))
    written = family(name).write_hf(config)
    assert read(written).window is None
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**written)
    )
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 131)


def test_no_rotation_of_before_is_left_beside_another_one() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
    given = raw_config("llama", rope_scaling=yarn, original_max_position_embeddings=24)
    config = read(given)
    longer = changed(config, {"positions.scaling": yarn | {"original_max_position_embeddings": 48}})
    table = family("llama")
    written = updated(given, table.write_hf(config), table.write_hf(longer), table.aliases)
    assert read(written).positions == longer.positions


@pytest.mark.oracle
@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_keys_that_are_left_out_have_the_values_that_transformers_gives_them(name: str) -> None:
    # The heads are a multiple of the key/value heads that transformers assumes.
    heads = {"helium": 20}.get(name, 32)
    raw = raw_config(name, hidden_size=64, num_attention_heads=heads)
    more = {
        "deepseek_v2": ("num_experts_per_tok",),
        "dots1": ("num_experts_per_tok", "n_routed_experts"),
    }
    needed = (*NEEDED, *more.get(name, ()))
    assert_read_alike({key: raw[key] for key in needed})


TRANSFORMERS_CANNOT = (
    *(
        (name, "num_key_value_heads")
        for name in ("cwm", "helium", "internlm3", "iquestcoder", "mellum", "ministral")
    ),
    *((name, "num_key_value_heads") for name in ("ministral3", "vaultgemma", "youtu")),
    *((name, "head_dim") for name in ("cwm", "helium", "mellum", "ministral3", "vaultgemma")),
    *((name, "sliding_window") for name in ("cwm", "lara_mini")),
    ("mellum", "rope_scaling"),
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
    *(
        (name, "num_key_value_heads")
        for name in ("exaone4", "gemma2", "gemma3_text", "glm4", "minimax_m2")
    ),
    *((name, "head_dim") for name in ("gemma2", "gemma3_text", "glm4", "minimax_m2")),
    ("exaone4", "sliding_window"),  # without layer_types beside it
    *(
        (name, "num_key_value_heads")
        for name in ("ernie4_5_moe", "exaone_moe", "glm", "hy_v3", "nemotron", "solar_open")
    ),
    *(
        (name, "num_key_value_heads")
        for name in ("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "stablelm", "starcoder2")
    ),
    *(
        (name, "head_dim")
        for name in ("deepseek_v32", "glm", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "solar_open")
    ),
    *(("llama4", key) for key in ("num_key_value_heads", "head_dim")),
    ("exaone_moe", "sliding_window"),  # without layer_types; with them its model divides by 0
    # These classes have their own default tokens.
    *((name, "eos_token_id") for name in ("cwm", "glm", "glm4")),
    *(
        (name, key)
        for name in ("lara_mini", "qwen3_next", "qwen3_5", "qwen3_5_moe", "sarvam_moe")
        for key in ("num_key_value_heads", "head_dim")
    ),
)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"n_inner": 48},
        {"n_inner": None},
        {"tie_word_embeddings": False},
        {"eos_token_id": [2, 7]},
    ],
)
@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
def test_a_gpt2_is_read_as_transformers_reads_it(activation: str, keys: Raw) -> None:
    assert_read_alike(raw_gpt2(activation_function=activation, pad_token_id=0, **keys))


@pytest.mark.oracle
def test_keys_that_a_gpt2_leaves_out_have_the_values_that_transformers_gives_them() -> None:
    raw = raw_gpt2()
    sizes = (
        "architectures",
        "model_type",
        "n_embd",
        "n_layer",
        "n_head",
        "n_positions",
        "vocab_size",
    )
    assert_read_alike({key: raw[key] for key in sizes})


def test_a_gpt2_has_learned_positions_layer_norms_and_biases() -> None:
    config = read(raw_gpt2())
    assert (config.positions.kind, config.norm.kind, config.mlp.gated) == (
        "learned",
        "LayerNorm",
        False,
    )
    assert (
        config.attention.qkv_bias,
        config.attention.o_bias,
        config.mlp.bias,
        config.tie_embeddings,
    ) == (True,) * 4


@pytest.mark.parametrize(
    "keys",
    [
        {"activation_function": "relu"},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
    ],
)
def test_a_gpt2_that_computes_something_else_is_refused(keys: Raw) -> None:
    with pytest.raises(UnknownFamily, match=next(iter(keys))):
        read(raw_gpt2(**keys))


@pytest.mark.parametrize(
    ("name", "keys", "layers"),
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
def test_layers_have_experts_as_the_config_says(
    name: str, keys: Raw, layers: tuple[int, ...] | None
) -> None:
    assert read(raw_config(name, **keys)).layers_with("moe") == (layers or (0, 1, 2, 3))


@pytest.mark.oracle
@pytest.mark.parametrize(
    "key", ["num_key_value_heads", "head_dim", "sliding_window", "rope_scaling", "eos_token_id"]
)
@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_keys_that_are_null_have_the_values_that_transformers_gives_them(
    name: str, key: str
) -> None:
    if (name, key) in TRANSFORMERS_CANNOT:
        pytest.skip("transformers 5 refuses it, or has no model for it")
    assert_read_alike(raw_config(name, **{key: None}))


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_key_value_heads_that_are_null_are_as_many_as_heads(name: str) -> None:
    raw = raw_config(name, num_attention_heads=16, num_key_value_heads=None)
    raw.pop("head_dim", None)  # the size of a head changes with their number
    assert read(raw).attention.kv_heads == 16


WINDOW_KEYS = st.fixed_dictionaries(
    {},
    optional={
        "use_sliding_window": st.booleans(),
        "sliding_window": st.none() | st.integers(1, 64),
        "max_window_layers": st.integers(0, 6),
        "layer_types": st.none()
        | st.lists(
            st.sampled_from(("full_attention", "sliding_attention")), min_size=4, max_size=4
        ),
    },
)


@pytest.mark.oracle
@given(st.sampled_from(("qwen2", "qwen3", "qwen2_moe")), WINDOW_KEYS)
@settings(max_examples=100, deadline=None)
def test_sliding_windows_of_qwen_are_those_of_transformers(name: str, keys: Raw) -> None:
    assert_read_alike(raw_config(name, **keys))


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"sliding_window": 8}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, [None] * 4),
        # By default, the first 28 layers have no window.
        ({"sliding_window": 8, "use_sliding_window": True}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, [None] * 4),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 8],
        ),
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
        (
            {
                "sliding_window": 8,
                "use_sliding_window": False,
                "layer_types": ["sliding_attention"] * 4,
            },
            [None] * 4,
        ),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_qwen_has_its_window_only_with_use_sliding_window(
    name: str, keys: Raw, windows: list[int | None]
) -> None:
    assert as_we_have_it(read(raw_config(name, **keys)))["windows"] == windows


@pytest.mark.parametrize(
    ("keys", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 16}, 16)]
)
def test_a_mistral_has_a_window_unless_it_says_no(keys: Raw, window: int | None) -> None:
    config = read(raw_config("mistral", **keys))
    assert value_of(config, "layers.window") == window


@pytest.mark.oracle
# Left out: models whose logits another test compares.
@given(
    configs().filter(
        lambda config: config.family not in (*WITHOUT_CLASS, "bamba", "mamba2", "nemotron_h")
    )
)
@settings(max_examples=60, deadline=None)
def test_transformers_reads_a_written_config_json_as_the_same_model(
    config: ModelConfig,
) -> None:
    if config.family != "gpt2":
        heads = config.attention.kv_heads  # transformers wants a hidden size that heads divide
        config = changed(config, {"attention.heads": heads, "hidden": heads * config.hidden})
    if config.family.startswith(("gemma", "vaultgemma")):
        config = changed(config, {"embedding_scale": config.hidden**0.5})
    if config.family == "cwm":  # its class takes no null here
        config = changed(config, {"bos_token_id": 1})
    if config.family in ("gpt_neox", "stablelm"):
        config = changed(config, {"hidden": config.attention.heads * config.attention.head_dim})
    if config.family in ("cwm", "glm", "glm4"):  # their classes have default tokens for null
        config = changed(config, {"eos_token_id": 2})
    theirs = as_transformers_has_it(family(config.family).write_hf(config))
    ours = as_we_have_it(config)
    if config.family == "qwen2":
        theirs["attention.head_dim"] = ours["attention.head_dim"]
    assert {name: ours[name] for name in theirs} == theirs
