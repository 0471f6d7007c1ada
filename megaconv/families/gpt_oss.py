"""GPT-OSS: experts with biases and alternating gate and up rows, attention sinks, windows on every other layer; MXFP4
as shipped.

An expert's gate and up stay one canonical tensor with rows g0 u0 g1 u1 ..., as in Hugging Face's files. Plain weights
store each expert transposed; MXFP4 (`hf+stacked`, see megaconv/values/quantized.py) stores the rows. Megatron stores
[gate; up]. A sink is Megatron's learnable softmax offset.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    ROPE_FREQUENCIES,
    SINKS,
)
from megaconv.families.parts.experts import EXPERTS_WIDTH, MOE_NORM
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, flags, number, size
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import windows_by_layer
from megaconv.model.table import Halves, Row, Stacked, StackedTransposed

_HF = "model.layers.{l}."
_CORE = "decoder.layers.{l}."
_EXPERTS, _CORE_EXPERTS = _HF + "mlp.experts.", _CORE + "mlp.experts."
_LOCAL_EXPERT = _CORE_EXPERTS + "local_experts.{e}."

_OWN = (
    SINKS,
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
ROWS = (*in_core((EMBEDDING, *ATTENTION, MOE_NORM, *HEAD)), *_OWN)

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The default rope scaling of the class, for a config.json without any."""


def _read_alpha(raw: Raw) -> Fields:
    if raw.get("swiglu_alpha", 1.702) != 1.702:
        raise NotExpressible(
            f"{CONFIG_NAME}: swiglu_alpha {raw['swiglu_alpha']!r} is not supported, only 1.702 is"
        )
    return {}


_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=8, head_dim=64, epsilon=1e-5, rotation=rope(150000.0, _YARN)
    ),
    flags("attention_bias", ("attention.qkv_bias", "attention.o_bias"), default=True),
    windows_by_layer(128, full_every=2),
    size("num_local_experts", "experts.count", 128),
    size("num_experts_per_tok", "experts.per_token", 4),
    EXPERTS_WIDTH,
    number("swiglu_limit", "mlp.clamp", 7.0),
    # Megatron's quick gelu has a fixed alpha; older transformers don't know the key.
    Keys(("swiglu_alpha",), _read_alpha, lambda config: {}),
)
_GPT_OSS = {
    "layers.mlp": "experts",
    "mlp.activation": "quick_gelu",
    "mlp.offset": 1.0,
    "mlp.bias": True,
    "attention.sinks": True,
}

FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_type="gpt_oss",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | _GPT_OSS,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized="rope !norm_bias gated quick_gelu clamped sinks mlp_bias mixture !mla !zero_centered",
    aliases={"num_experts": "num_local_experts"},
)
