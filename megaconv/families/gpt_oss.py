"""GPT-OSS: experts with biases whose gate and up rows alternate, attention sinks, windows on every other layer; MXFP4 as shipped.

An expert's gate and up stay one canonical tensor, with rows g0 u0 g1 u1 ... as every one of its files has them. As plain
weights Hugging Face keeps the transpose of each expert, as MXFP4 (`hf+stacked`, see megaconv/quantized.py) the rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaconv.config import ModelConfig
from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED
from megaconv.families.mixtral import MOE_NORM
from megaconv.hf_config import layer_types, read_decoder, refuse, windowed_layers, write_decoder
from megaconv.table import Row, Stacked, StackedTransposed

_HF = "model.layers.{l}."
_EXPERTS = _HF + "mlp.experts."

_OWN = (
    Row("layers.{l}.attn.sinks", ("heads",), tp=0, hf=_HF + "self_attn.sinks", core=None),
    Row("layers.{l}.mlp.router.weight", ("experts hidden",), when="moe", hf=_HF + "mlp.router.weight", core=None),
    Row("layers.{l}.mlp.router.linear_bias", ("experts",), when="moe", hf=_HF + "mlp.router.bias", core=None),
    Row("layers.{l}.mlp.experts.{e}.gate_up.weight", ("2*moe_ffn hidden",), tp=0, when="moe",
        hf=StackedTransposed(_EXPERTS + "gate_up_proj", "experts hidden 2*moe_ffn"),
        stacked=Stacked(_EXPERTS + "gate_up_proj"), core=None),
    Row("layers.{l}.mlp.experts.{e}.gate_up.bias", ("2*moe_ffn",), tp=0, when="moe",
        hf=StackedTransposed(_EXPERTS + "gate_up_proj_bias", "experts 2*moe_ffn"), core=None),
    Row("layers.{l}.mlp.experts.{e}.down.weight", ("hidden moe_ffn",), tp=1, when="moe",
        hf=StackedTransposed(_EXPERTS + "down_proj", "experts moe_ffn hidden"),
        stacked=Stacked(_EXPERTS + "down_proj"), core=None),
    Row("layers.{l}.mlp.experts.{e}.down.bias", ("hidden",), when="moe",
        hf=StackedTransposed(_EXPERTS + "down_proj_bias", "experts hidden"), core=None),
)  # fmt: skip
_SHARED = (EMBEDDING, *ATTENTION, MOE_NORM, *HEAD)
ROWS = (*(replace(row, core=None, core_local=None, legacy=None, meta=None) for row in _SHARED), *_OWN)

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What the class takes rope for that config.json doesn't speak of."""


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", True))
    layers = raw["num_hidden_layers"]
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    window = raw.get("sliding_window", 128)
    windowed = windowed_layers({**raw, "layer_types": raw.get("layer_types") or kinds})
    windows = {} if window is None or windowed == () else {"sliding_window": window, "windowed_layers": windowed}
    scaling = {} if raw.get("rope_scaling") or raw.get("rope_parameters") else {"rope_scaling": _YARN}
    experts = {"experts": raw.get("num_local_experts", 128), "experts_per_token": raw.get("num_experts_per_tok", 4)}
    experts["moe_ffn"] = raw["intermediate_size"]
    own = {"qkv_bias": bias, "o_bias": bias, **windows, **experts, **scaling, "hf": dict(raw)}
    return read_decoder(raw, "gpt_oss", _DEFAULTS, **own)


def write_hf(config: ModelConfig) -> dict[str, Any]:
    architecture = "GptOssForCausalLM"
    refuse(
        config,
        architecture,
        mlp_bias="MLP biases",
        qk_norm="q and k norms",
        moe_layers="dense layers",
        shared_ffn="a shared expert",
    )
    words = {
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "intermediate_size": config.moe_ffn,
        "attention_bias": config.qkv_bias,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }
    return write_decoder(config, architecture, "gpt_oss", **words)


FAMILY = Family(
    "gpt_oss",
    ("GptOssForCausalLM",),
    "gpt_oss",
    ROWS,
    read_hf,
    write_hf,
    IGNORED,
    hf_only="its experts' biases, alternating gate and up rows and attention sinks have no place in our tables of Megatron's names yet",
)
