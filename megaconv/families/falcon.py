"""Falcon: LayerNorm, and attention and the MLP in parallel: after one norm (7B, 11B) or after a norm each (40B, 180B).

Megatron core has no such layer: these models are converted between Hugging Face's files, and trained. A model with
`parallel_attn: false` is converted to Megatron core as well. Models with `alibi` are refused: transformers rounds their
slopes to bfloat16.
"""

from dataclasses import replace

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.bloom import FUSED, MODULES
from megaconv.families.parts.decoder_keys import GELUS, LAYER_NORM, model_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    flags,
    need_flag,
    need_size,
    number,
    size,
)
from megaconv.families.parts.rope import FULL_ROTATION, rope
from megaconv.families.parts.row_changes import (
    in_core,
    respelled,
    with_modules,
    with_norm_biases,
    with_shared_norm,
    without_gate,
)
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_OWN_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
"""Names of two norms before parallel sublayers."""


_PLACES = ("layers.{l}.input_norm", "layers.{l}.mlp_norm")


def _norms(rows: tuple[Row, ...], features: str) -> tuple[Row, ...]:
    """The norms before sublayers, for models with these features alone."""
    found = [row for row in rows if row.canonical.startswith(_PLACES)]
    return tuple(replace(row, when=f"{features} {row.when or ''}".strip()) for row in found)


_ALL = with_modules(respelled(with_norm_biases(without_gate(LLAMA_ROWS)), FUSED), MODULES)
ROWS = in_core((
    *(row for row in _ALL if not row.canonical.startswith(_PLACES)),
    *_norms(_ALL, "!parallel"),
    *_norms(with_shared_norm(_ALL), "shared_norm"),
    *_norms(with_modules(_ALL, _OWN_NORMS), "parallel !shared_norm"),
))  # fmt: skip

_NEW, _PARALLEL, _NORMS = "new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn"
_HEADS, _KV_HEADS, _SHARES_KV = "num_attention_heads", "num_kv_heads", "multi_query"


def _read_layers(raw: Raw) -> Fields:
    """The heads and the order of sublayers."""
    new = need_flag(raw, _NEW, False)
    heads, hidden = need_size(raw, _HEADS, 71), need_size(raw, "hidden_size", 4544)
    older = 1 if need_flag(raw, _SHARES_KV, True) else heads
    kv_heads = need_size(raw, _KV_HEADS, heads) if new else older
    if heads % kv_heads or hidden % heads:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {kv_heads} key/value heads should divide {_HEADS} {heads}, which should divide hidden_size {hidden}"
        )
    parallel = need_flag(raw, _PARALLEL, True)
    return {
        "attention.heads": heads,
        "attention.kv_heads": kv_heads,
        "attention.head_dim": hidden // heads,
        "parallel_residual": parallel,
        "norm.shared": parallel and _norm_count(raw, new=new) == 1,
    }


def _norm_count(raw: Raw, *, new: bool) -> int:
    """The number of norms before parallel sublayers."""
    found = need_size(raw, _NORMS, 2 if new else 1)
    if found > 2 or (found == 2 and not new):
        raise NotExpressible(
            f"{CONFIG_NAME}: {_NORMS} {found} with {_NEW} {new} is not supported; transformers computes 1, and 2 in the new architecture"
        )
    if new and not need_flag(raw, _PARALLEL, True):
        raise NotExpressible(f"{CONFIG_NAME}: {_NEW} with {_PARALLEL} false is not supported")
    return found


def _write_layers(config: ModelConfig) -> Raw:
    heads, kv_heads = config.attention.heads, config.attention.kv_heads
    parallel = config.parallel_residual
    # The older architecture has one key/value head or as many as heads, and no two norms before parallel sublayers.
    new = parallel and (not config.norm.shared or kv_heads not in (1, heads))
    norms = 2 if new else None
    return {
        _HEADS: heads,
        _NEW: new,
        _PARALLEL: parallel,
        _SHARES_KV: kv_heads == 1,
        _KV_HEADS: kv_heads,
        _NORMS: 1 if config.norm.shared else norms,
    }


def _read_width(raw: Raw) -> Fields:
    stated = raw.get("ffn_hidden_size")
    return {"mlp.ffn": stated or 4 * need_size(raw, "hidden_size", 4544)}


_KEYS = (
    size("hidden_size", "hidden", 4544),
    size("num_hidden_layers", "layers.count", 32),
    size("max_position_embeddings", "max_positions", 2048),
    number("layer_norm_epsilon", "norm.epsilon", 1e-5),
    rope(10000.0),
    FULL_ROTATION,
    Keys((_HEADS, _KV_HEADS, _SHARES_KV, _NEW, _PARALLEL, _NORMS), _read_layers, _write_layers),
    Keys(("ffn_hidden_size",), _read_width, lambda config: {"ffn_hidden_size": config.mlp.ffn}),
    choice("activation", "mlp.activation", GELUS, "gelu"),
    flags("bias", ("attention.qkv_bias", "attention.o_bias", "mlp.bias"), default=False),
    *model_keys(tied=True, tokens=(11, 11, None)),
)

FAMILY = Family(
    name="falcon",
    architectures=("FalconForCausalLM",),
    model_type="falcon",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LAYER_NORM, "mlp.gated": False},
    only={"alibi": False},
    prefix="transformer.",
    recognized=None,
    proven="names",
)
