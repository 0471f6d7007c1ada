"""TensorRT-LLM's config.json: written from a model's description, and read back as a config.json of transformers.

The keys are those of nvidia-modelopt 0.47. Differences, because TensorRT-LLM's classes read these keys:

    position_embedding_type    learned_absolute for GPT-2; ModelOpt alone writes rope_gpt_neox
    rotary_base                where it isn't 10000; ModelOpt alone loses the base of transformers 5
    rotary_scaling             linear or llama3, with transformers' keys; ModelOpt alone loses it too
    attn_bias, mlp_bias        for a Llama with biases
    rank                       0
"""

import json
from collections.abc import Mapping
from typing import Any

from megaconv import _version
from megaconv.errors import NotExpressible
from megaconv.families import family_of_hf
from megaconv.model.config import ModelConfig
from megaconv.model.fields import NOT_COMPUTED
from megaconv.model.layout import Layout
from megaconv.model.meaning import require_kept

_WHERE = "TensorRT-LLM's config.json"
_USUAL_BASE = 10000.0
_SCALINGS = ("linear", "llama3")
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu"}
CLASSES = {"llama": ("LlamaForCausalLM", "llama"), "gpt2": ("GPT2LMHeadModel", "gpt")}
"""Family -> (architecture, decoder)."""
_POSITIONS = {"rope": "rope_gpt_neox", "learned": "learned_absolute"}
_Raw = dict[str, Any]


def config_json(config: ModelConfig, layout: Layout, quantization: Mapping[str, Any]) -> bytes:
    """The file. Raises NotExpressible, with the field's name, for a model that it can't describe."""
    written = _written(config, layout, quantization)
    raw = as_hf(written, config.family)
    back = family_of_hf(raw, _WHERE).read_hf(raw)
    require_kept(config, back, _WHERE, but=(*NOT_COMPUTED, "tie_embeddings"))
    return json.dumps(written, indent=4).encode()


def _written(config: ModelConfig, layout: Layout, quantization: Mapping[str, Any]) -> _Raw:
    architecture, decoder = CLASSES[config.family]
    is_bfloat16 = config.dtype == "bfloat16"
    attention = config.attention
    return {
        "producer": {"name": "megaconv", "version": _version.__version__},
        "architecture": architecture,
        "dtype": config.dtype,
        "logits_dtype": "float16" if is_bfloat16 else config.dtype,
        "num_hidden_layers": config.layer_count,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "hidden_size": config.hidden,
        "norm_epsilon": config.norm.epsilon,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        "hidden_act": _activation(config),
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "head_size": attention.head_dim,
        "intermediate_size": config.mlp.ffn,
        "position_embedding_type": _POSITIONS[config.positions.kind],
        "share_embedding_table": False,
        "residual_mlp": False,
        "bias": attention.o_bias,
        "rotary_pct": config.positions.rotary_percent,
        "rank": 0,
        "decoder": decoder,
        "rmsnorm": config.norm.kind == "RMSNorm",
        "lm_head_bias": False,
        **_rope(config),
        **_biases(config),
        "mapping": {
            "world_size": layout.tp * layout.pp,
            "tp_size": layout.tp,
            "pp_size": layout.pp,
        },
        "quantization": dict(quantization),
    }


def _activation(config: ModelConfig) -> str:
    """TensorRT-LLM's gelu is the approximation by tanh, for every name that it knows."""
    found = _ACTIVATIONS.get(config.mlp.activation)
    if found is None:
        raise NotExpressible(
            f"the model's mlp.activation is {config.mlp.activation!r}, which {_WHERE} can't represent; "
            f"it knows {' and '.join(_ACTIVATIONS)}"
        )
    return found


def _rope(config: ModelConfig) -> _Raw:
    positions = config.positions
    found: _Raw = {}
    if positions.kind == "rope" and positions.theta != _USUAL_BASE:
        found["rotary_base"] = positions.theta
    if positions.scaling:
        kind = positions.scaling["rope_type"]
        if kind not in _SCALINGS:
            raise NotExpressible(
                f"the model's positions are scaled by {kind}; --saver trtllm supports {' and '.join(_SCALINGS)}"
            )
        found["rotary_scaling"] = {"type": kind, **positions.scaling}
    return found


def _biases(config: ModelConfig) -> _Raw:
    """The keys of a Llama with biases. A GPT-2 always has them."""
    attention = config.attention
    if config.family == "gpt2" or not (attention.qkv_bias or config.mlp.bias):
        return {}
    return {"attn_bias": attention.qkv_bias, "mlp_bias": config.mlp.bias}


def as_hf(written: Mapping[str, Any], family: str) -> _Raw:
    """The file in the keys of transformers. family: a key of CLASSES."""
    return _gpt2_as_hf(written) if family == "gpt2" else _llama_as_hf(written)


def _gpt2_as_hf(written: Mapping[str, Any]) -> _Raw:
    activation = written["hidden_act"]
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": written["hidden_size"],
        "n_layer": written["num_hidden_layers"],
        "n_head": written["num_attention_heads"],
        "n_inner": written["intermediate_size"],
        "n_positions": written["max_position_embeddings"],
        "vocab_size": written["vocab_size"],
        "layer_norm_epsilon": written["norm_epsilon"],
        "activation_function": "gelu_new" if activation == "gelu" else activation,
    }


def _llama_as_hf(written: Mapping[str, Any]) -> _Raw:
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "max_position_embeddings", "vocab_size", "hidden_act",
    )  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: written[name] for name in names},
        "head_dim": written["head_size"],
        "rms_norm_eps": written["norm_epsilon"],
        "rope_theta": written.get("rotary_base", _USUAL_BASE),
        "rope_scaling": written.get("rotary_scaling"),
        "attention_bias": written.get("attn_bias", False),
        "mlp_bias": written.get("mlp_bias", False),
    }
