"""XGLM: BioGPT with positions that are computed as sines and cosines."""

from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.families.opt import FAMILY as OPT
from megaconv.families.opt import FIXED, MODULES
from megaconv.families.parts.decoder_keys import ALL_BIASES, GELUS, model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    follows,
    need_flag,
    need_size,
    size,
)
from megaconv.families.parts.row_changes import (
    in_core,
    with_modules,
    with_norm_biases,
    without_gate,
)

_OWN_MODULES = {"model.norm": "model.layer_norm"}
ROWS = in_core(with_modules(with_norm_biases(without_gate(LLAMA_ROWS)), MODULES | _OWN_MODULES))

_SCALES = "scale_embedding"


def _read_scale(raw: Raw) -> Fields:
    scaled = need_flag(raw, _SCALES, True)
    return {"embedding_scale": need_size(raw, "d_model") ** 0.5 if scaled else None}


def _base(raw: Raw) -> float:
    """The base of the frequencies. The last of them is 1 / 10000, whereas it is a little larger elsewhere.

    transformers' class sets the row of pad_token_id to zero. Rows before the second one stand for no position.
    """
    padding = raw.get("pad_token_id", 1)
    if padding is not None and padding > 1:
        raise NotExpressible(
            f"{CONFIG_NAME}: pad_token_id {padding} gives a position no sines; in this architecture, it has to be 0 or 1"
        )
    pairs = need_size(raw, "d_model") // 2
    return float(10000.0 ** (pairs / (pairs - 1)))


_KEYS = (
    size("d_model", "hidden"),
    size("num_layers", "layers.count"),
    size("ffn_dim", "mlp.ffn"),
    size("max_position_embeddings", "max_positions", 2048),
    multi_head("attention_heads", "d_model"),
    follows("positions.theta", _base),
    Keys((_SCALES,), _read_scale, lambda config: {_SCALES: config.embedding_scale is not None}),
    Keys(("decoder_start_token_id",), lambda raw: {}, lambda config: {}),
    choice("activation_function", "mlp.activation", GELUS, "gelu"),
    *model_keys(tied=True, tokens=(0, 2, 1)),
)
_ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "attention_heads",
}

FAMILY = replace(
    OPT, name="xglm", architectures=("XGLMForCausalLM",), model_type="xglm", rows=ROWS, keys=_KEYS, aliases=_ALIASES, only={},
    fixed={**FIXED, **ALL_BIASES, "positions.kind": "sinusoidal"}, prefix="model.",
)  # fmt: skip
