"""GPT-OSS: experts with biases whose gate and up rows alternate, attention sinks, windows on every other layer; MXFP4 as shipped.

An expert's gate and up stay one canonical tensor, with rows g0 u0 g1 u1 ... as Hugging Face's files have them: as plain
weights the transpose of each expert, as MXFP4 (`hf+stacked`, see megaconv/engine/quantized.py) the rows. Megatron has [gate; up].
A sink is Megatron's learnable softmax offset.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.deepseek_v3 import require_only
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED
from megaconv.families.mixtral import MOE_NORM
from megaconv.families.parts.hf_config import layer_types, read_decoder, refuse, windowed_layers, write_decoder
from megaconv.model.config import ModelConfig
from megaconv.model.table import Halves, Row, Stacked, StackedTransposed

_HF = "model.layers.{l}."
_CORE = "decoder.layers.{l}."
_EXPERTS, _CORE_EXPERTS = _HF + "mlp.experts.", _CORE + "mlp.experts."
_LOCAL_EXPERT = _CORE_EXPERTS + "local_experts.{e}."

_OWN = (
    Row("layers.{l}.attn.sinks", ("heads",), tp=0,
        hf=_HF + "self_attn.sinks",
        core=_CORE + "self_attention.core_attention.softmax_offset"),
    Row("layers.{l}.mlp.router.weight", ("experts hidden",), when="moe",
        hf=_HF + "mlp.router.weight",
        core=_CORE + "mlp.router.weight"),
    Row("layers.{l}.mlp.router.linear_bias", ("experts",), when="moe",
        hf=_HF + "mlp.router.bias",
        core=_CORE + "mlp.router.bias"),
    Row("layers.{l}.mlp.experts.{e}.gate_up.weight", ("2*moe_ffn hidden",), tp=0, when="moe",
        hf=StackedTransposed(_EXPERTS + "gate_up_proj", "experts hidden 2*moe_ffn"),
        hf_stacked=Stacked(_EXPERTS + "gate_up_proj"),
        core=Halves(_LOCAL_EXPERT + "linear_fc1.weight"),
        core_grouped=Halves(_CORE_EXPERTS + "linear_fc1.weight{e}")),
    Row("layers.{l}.mlp.experts.{e}.gate_up.bias", ("2*moe_ffn",), tp=0, when="moe",
        hf=StackedTransposed(_EXPERTS + "gate_up_proj_bias", "experts 2*moe_ffn"),
        core=Halves(_LOCAL_EXPERT + "linear_fc1.bias"),
        core_grouped=Halves(_CORE_EXPERTS + "linear_fc1.bias{e}")),
    Row("layers.{l}.mlp.experts.{e}.down.weight", ("hidden moe_ffn",), tp=1, when="moe",
        hf=StackedTransposed(_EXPERTS + "down_proj", "experts moe_ffn hidden"),
        hf_stacked=Stacked(_EXPERTS + "down_proj"),
        core=_LOCAL_EXPERT + "linear_fc2.weight",
        core_grouped=_CORE_EXPERTS + "linear_fc2.weight{e}"),
    Row("layers.{l}.mlp.experts.{e}.down.bias", ("hidden",), when="moe",
        hf=StackedTransposed(_EXPERTS + "down_proj_bias", "experts hidden"),
        core=_LOCAL_EXPERT + "linear_fc2.bias",
        core_grouped=_CORE_EXPERTS + "linear_fc2.bias{e}"),
)  # fmt: skip
_SHARED = (EMBEDDING, *ATTENTION, MOE_NORM, *HEAD)
ROWS = (*(row.without("legacy", "meta") for row in _SHARED), *_OWN)

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
_ONLY = {"swiglu_alpha": 1.702}
"""What Megatron's quick gelu has; older transformers have no word for it."""


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    require_only(raw, _ONLY)
    bias = bool(raw.get("attention_bias", True))
    layers = raw["num_hidden_layers"]
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    window = raw.get("sliding_window", 128)
    windowed = windowed_layers({**raw, "layer_types": raw.get("layer_types") or kinds})
    windows = {} if window is None or windowed == () else {"sliding_window": window, "windowed_layers": windowed}
    scaling = {} if raw.get("rope_scaling") or raw.get("rope_parameters") else {"rope_scaling": _YARN}
    experts = {"experts": raw.get("num_local_experts", 128), "experts_per_token": raw.get("num_experts_per_tok", 4)}
    experts["moe_ffn"] = raw["intermediate_size"]
    experts |= {"activation": "quick_gelu", "glu_limit": float(raw.get("swiglu_limit", 7.0)), "glu_offset": 1.0}
    biases = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": True, "sinks": True}
    return read_decoder(raw, "gpt_oss", _DEFAULTS, **biases, **windows, **experts, **scaling, hf=dict(raw))


def write_hf(config: ModelConfig) -> dict[str, Any]:
    architecture = "GptOssForCausalLM"
    refuse(
        config,
        architecture,
        qk_norm="q and k norms",
        moe_layers="dense layers",
        shared_ffn="a shared expert",
        router_bias="a bias that takes part in the choice of experts alone",
        router_scale="a router scale",
    )
    if not config.renormalize or config.router_score != "softmax":
        raise NotExpressible("the model's router isn't GPT-OSS's: a softmax over the experts that were chosen")
    words = {
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "intermediate_size": config.moe_ffn,
        "attention_bias": config.qkv_bias,
        "swiglu_limit": config.glu_limit,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
        "rope_scaling": dict(config.rope_scaling or {"rope_type": "default"}),
    }
    return write_decoder(config, architecture, "gpt_oss", **words)


FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), "gpt_oss", ROWS, read_hf, write_hf, IGNORED)
