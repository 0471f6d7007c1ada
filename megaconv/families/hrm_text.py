"""HRM-Text: two stacks of layers that take turns several times, gated attention, and norms without weights.

    hf            model.{L_module|H_module}.layers.{l}.{attn.{gqkv_proj, o_proj}, mlp.{gate_up_proj, down_proj}}, model.z_L_init
    hf_separate   the same with the names of transformers' class: self_attn.{gate_proj, q_proj, k_proj, v_proj, o_proj}

The low stack runs L_cycles times before each of the H_cycles runs of the high stack. Layer l of the description is the l-th
layer of both stacks. Megatron core has no such recurrence: these models are converted between Hugging Face's files. Source:
HrmTextConfig and modeling_hrm_text.py of transformers 5.23.
"""

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import HEADS_DIVIDE_HIDDEN, LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    flags,
    need_number,
    need_size,
    size,
)
from megaconv.families.parts.row_changes import hf_only
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, Row

_WIDE = "heads*head_dim hidden"


def _of_stack(stack: str, module: str) -> tuple[Row, ...]:
    """The rows of one of the stacks. module: Hugging Face's name of the stack."""
    own, hf = f"layers.{{l}}.{stack}.", f"model.{module}.layers.{{l}}."
    return (
        Row(own + "attn.{gate|q|k|v}.weight", (_WIDE,) * 4, tp=0,
            hf=Fused(hf + "attn.gqkv_proj.weight"),
            hf_separate=hf + "self_attn.{gate_proj|q_proj|k_proj|v_proj}.weight"),
        Row(own + "attn.o.weight", ("hidden heads*head_dim",), tp=1,
            hf=hf + "attn.o_proj.weight",
            hf_separate=hf + "self_attn.o_proj.weight"),
        Row(own + "mlp.{gate|up}.weight", ("ffn hidden", "ffn hidden"), tp=0,
            hf=Fused(hf + "mlp.gate_up_proj.weight"),
            hf_separate=hf + "mlp.{gate|up}_proj.weight"),
        Row(own + "mlp.down.weight", ("hidden ffn",), tp=1,
            hf=hf + "mlp.down_proj.weight"),
    )  # fmt: skip


_START = Row("low_start", ("hidden",), stage="first", hf="model.z_L_init")
_STACKS = (*_of_stack("low", "L_module"), *_of_stack("high", "H_module"))
ROWS = hf_only((EMBEDDING, _START, *_STACKS, *HEAD[1:]))

_TOTAL, _STACK = "num_hidden_layers", "num_layers_per_stack"
_HIGH, _LOW = "H_cycles", "L_cycles"


def _read_layers(raw: Raw) -> Fields:
    """The layers of a stack. With num_layers_per_stack, num_hidden_layers counts each run of each layer."""
    high, low = need_size(raw, _HIGH, 2), need_size(raw, _LOW, 3)
    cycles = {"recurrence.high": high, "recurrence.low": low}
    if raw.get(_STACK) is None:
        return {"layers.count": need_size(raw, _TOTAL, 16), **cycles}
    layers = need_size(raw, _STACK)
    runs = layers * high * (low + 1)
    if need_size(raw, _TOTAL, runs) != runs:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_TOTAL} should be {runs}, the runs of all {layers} layers of both stacks, found {raw[_TOTAL]}"
        )
    return {"layers.count": layers, **cycles}


def _write_layers(config: ModelConfig) -> Raw:
    cycles, layers = config.recurrence, config.layer_count
    runs = layers * cycles.high * (cycles.low + 1)
    return {_HIGH: cycles.high, _LOW: cycles.low, _STACK: layers, _TOTAL: runs}


_SCALE = "embedding_scale"


def _read_scale(raw: Raw) -> Fields:
    stated = raw.get(_SCALE)
    usual = 1 / need_number(raw, "initializer_range", 0.02) if stated is None else 1.0
    return {_SCALE: usual if stated is None else need_number(raw, _SCALE, usual)}


def _read_heads(raw: Raw) -> Fields:
    heads = need_size(raw, "num_attention_heads", 12)
    return {
        "attention.heads": heads,
        "attention.kv_heads": heads,
        "attention.head_dim": need_size(raw, "head_dim", 128),
    }


def _write_heads(config: ModelConfig) -> Raw:
    attention = config.attention
    return {"num_attention_heads": attention.heads, "head_dim": attention.head_dim}


_BODY = without_keys(body_keys(positions=2048, ffn=4096), _TOTAL, "hidden_size")
_KEYS = (
    *_BODY,
    size("hidden_size", "hidden", 1536),
    Keys((_TOTAL, _STACK, _HIGH, _LOW), _read_layers, _write_layers),
    Keys(("num_attention_heads", "head_dim"), _read_heads, _write_heads),
    Keys((_SCALE,), _read_scale, lambda config: {_SCALE: config.embedding_scale}),
    flags("prefix_lm", ("attention.prefix",), default=True),
    HEADS_DIVIDE_HIDDEN,
)
_FIXED = {
    **LLAMA_LIKE,
    "norm.weight": False,
    "attention.output_gate": True,
}

FAMILY = Family(
    name="hrm_text",
    architectures=("HrmTextForCausalLM",),
    model_type="hrm_text",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "attention_bias": False, "mlp_bias": False},
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
