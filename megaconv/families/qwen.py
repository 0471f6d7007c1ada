"""Qwen 1: Llama with other names and biases on q, k and v, which are one tensor.

No release of transformers contains this architecture. Names and defaults come from the repository Qwen/Qwen-7B
(modeling_qwen.py and configuration_qwen.py). Beyond seq_length tokens, its class may change the base of rope and scale
queries in generation (use_dynamic_ntk, use_logn_attn). megaconv describes the model up to seq_length tokens.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size, number, size
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, Spelling

_LAYER = "transformer.h.{l}."
_NAMES: dict[str, dict[str, Spelling]] = {
    "embed.weight": {"hf": "transformer.wte.weight"},
    "layers.{l}.input_norm.weight": {"hf": _LAYER + "ln_1.weight"},
    "layers.{l}.attn.{q|k|v}.weight": {"hf": Fused(_LAYER + "attn.c_attn.weight")},
    "layers.{l}.attn.{q|k|v}.bias": {"hf": Fused(_LAYER + "attn.c_attn.bias")},
    "layers.{l}.attn.o.weight": {"hf": _LAYER + "attn.c_proj.weight"},
    "layers.{l}.mlp_norm.weight": {"hf": _LAYER + "ln_2.weight"},
    "layers.{l}.mlp.{gate|up}.weight": {"hf": _LAYER + "mlp.{w2|w1}.weight"},
    "layers.{l}.mlp.down.weight": {"hf": _LAYER + "mlp.c_proj.weight"},
    "final_norm.weight": {"hf": "transformer.ln_f.weight"},
}


def _read_width(raw: Raw) -> Fields:
    """intermediate_size counts the gate too."""
    width = need_size(raw, "intermediate_size", 22016)
    if width % 2:
        raise NotExpressible(f"{CONFIG_NAME}: intermediate_size should be even, found {width}")
    return {"mlp.ffn": width // 2}


def _write_width(config: ModelConfig) -> Raw:
    return {"intermediate_size": 2 * config.mlp.ffn}


_BEYOND = ("use_dynamic_ntk", "use_logn_attn")
_KEYS = (
    size("hidden_size", "hidden"),
    size("num_hidden_layers", "layers.count"),
    multi_head("num_attention_heads", "hidden_size"),
    Keys(("intermediate_size",), _read_width, _write_width),
    size("seq_length", "max_positions", 8192),
    number("layer_norm_epsilon", "norm.epsilon", 1e-6),
    number("rotary_emb_base", "positions.theta", 10000.0),
    Keys(_BEYOND, lambda raw: {}, lambda config: dict.fromkeys(_BEYOND, False)),
    *model_keys(tied=False, tokens=(None, None, None)),
)

FAMILY = Family(
    name="qwen",
    architectures=("QWenLMHeadModel",),
    model_type="qwen",
    rows=in_core(respelled(LLAMA_ROWS, _NAMES)),
    keys=_KEYS,
    fixed=LLAMA_LIKE | {"attention.qkv_bias": True},
    only={"rotary_pct": 1.0, "no_bias": True, "scale_attn_weights": True},
    ignored=(r"transformer\.rotary_emb\.inv_freq",),
    features=("qkv_bias",),
    recognized=None,
    proven="names",
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from Qwen 2."""
