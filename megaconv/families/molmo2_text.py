"""The language model of Molmo 2: Qwen 3, or OLMo 2 with rope scaling in some layers, and an embedding with more rows than the head.

The last rows of the embedding are of tokens for images and videos, which the model reads and never predicts. The published
files, and those that transformers writes, have other names than transformers' class:

    hf                model.layers.{l}.{input_layernorm, self_attn.{q|k|v}_proj, mlp.{gate|up}_proj}, model.embed_tokens
    hf_fused          model.blocks.{l}.{attn_norm, self_attn.att_proj, mlp.ff_proj}, model.wte.{embedding, new_embedding}
    hf_fused_halved   the same, with the embedding in two halves, as transformers 5.23 writes it

In ff_proj, the rows of `up` are before those of `gate`. Megatron core pads the head to the rows of its embedding.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    count,
    flags,
    need_size,
)
from megaconv.families.parts.norm_places import norms_where_they_are, qk_norms_of_either_width
from megaconv.families.parts.row_changes import in_core, respelled, with_shorter_head, without_rows
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Fused, LastRowsApart, Spelling

_WTE, _LAYER = "model.wte.", "model.blocks.{l}."
_ATTENTION, _MLP = _LAYER + "self_attn.", _LAYER + "mlp."
_TOKENS, _NEW = _WTE + "embedding", _WTE + "new_embedding"
_GATE_UP = Fused(_MLP + "ff_proj.weight", members=(1, 0))
_NORMS = {_LAYER + "attn_norm.weight": ("input_norm", "attn_output_norm"),
          _LAYER + "ff_norm.weight": ("mlp_norm", "mlp_output_norm")}  # fmt: skip
_FUSED: dict[str, Spelling] = {
    **{f"layers.{{l}}.{norm}.weight": name for name, norms in _NORMS.items() for norm in norms},
    "layers.{l}.attn.{q|k|v}.weight": Fused(_ATTENTION + "att_proj.weight"),
    "layers.{l}.attn.{q|k|v}.bias": Fused(_ATTENTION + "att_proj.bias"),
    "layers.{l}.attn.{q|k}_norm.weight": _ATTENTION + "{q|k}_norm.weight",
    "layers.{l}.attn.o.weight": _ATTENTION + "attn_out.weight",
    "layers.{l}.mlp.{gate|up}.weight": _GATE_UP,
    "layers.{l}.mlp.down.weight": _MLP + "ff_out.weight",
    "final_norm.weight": "model.ln_f.weight",
}
_NAMES: dict[str, dict[str, Spelling]] = {
    "embed.weight": {
        "hf_fused": LastRowsApart(_TOKENS, rest=_NEW, rows="unpredicted"),
        "hf_fused_halved": LastRowsApart(_TOKENS, rest=_NEW),
    },
    **{canonical: {"hf_fused": spelling} for canonical, spelling in _FUSED.items()},
}


_LAYERS = norms_where_they_are(
    (*qk_norms_of_either_width(ATTENTION), *MLP), ("input_layernorm", "post_attention_layernorm")
)
_WITHOUT = ("layers.{l}.attn.o.bias", "layers.{l}.mlp.{gate|up}.bias", "layers.{l}.mlp.down.bias")
_ROWS = (EMBEDDING, *without_rows(_LAYERS, *_WITHOUT), *with_shorter_head(HEAD))
ROWS = in_core(respelled(_ROWS, _NAMES))

_VOCAB, _ADDED, _SCALED = "vocab_size", "additional_vocab_size", "rope_scaling_layers"
_ADDED_TOKENS = count(_ADDED, "head.unpredicted", 128)


def _read_vocabulary(raw: Raw) -> Fields:
    found = _ADDED_TOKENS.read(raw)
    return {**found, "vocab": need_size(raw, _VOCAB, 151936) + found["head.unpredicted"]}


def _write_vocabulary(config: ModelConfig) -> Raw:
    return {**_ADDED_TOKENS.write(config), _VOCAB: config.vocab - config.head.unpredicted}


def _read_scaled(raw: Raw) -> Fields:
    """The layers in which rope scaling applies: all of them, if the key is missing."""
    layers, listed = need_size(raw, "num_hidden_layers"), raw.get(_SCALED)
    if listed is None:
        return {"layers.scales_positions": True}
    known = range(layers)
    if not isinstance(listed, list) or not all(
        type(each) is int and each in known for each in listed
    ):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_SCALED} should list layers from 0 to {layers - 1}, found {listed!r:.80}"
        )
    return {"layers.scales_positions": per_layer(listed, layers, True, False)}


def _write_scaled(config: ModelConfig) -> Raw:
    return {_SCALED: [layer for layer, kind in enumerate(config.layers) if kind.scales_positions]}


_BODY = decoder_keys(positions=36864, kv_heads=8, head_dim=128, ffn=12288)
_KEYS = (
    *without_keys(_BODY, _VOCAB, "tie_word_embeddings"),
    Keys((_VOCAB, _ADDED), _read_vocabulary, _write_vocabulary),
    Keys((_SCALED,), _read_scaled, _write_scaled),
    flags("attention_bias", ("attention.qkv_bias",), default=False),
    choice("qk_norm_type", "attention.qk_norm_width", {"qwen3": "head", "olmo": "all"}, "qwen3"),
    choice("norm_after", "norm.place", {False: "before", True: "after"}, default=False),
)
_ONLY: dict[str, Any] = {**SILU, "tie_word_embeddings": False, "use_qk_norm": True}


def _notices(config: ModelConfig) -> tuple[str, ...]:
    added = config.head.unpredicted
    if not added:
        return ()
    return (
        f"Megatron core's head has rows for the model's {added:,} tokens of images too, which Molmo 2 never predicts; "
        "these rows are padding",
    )


FAMILY = Family(
    name="molmo2_text",
    architectures=("Molmo2TextModel",),
    model_type="molmo2_text",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | {"attention.qk_norm": True},
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=None,
    notices=_notices,
    proven="custom module",
    beyond_core=("head.unpredicted",),
    aliases={"qkv_bias": "attention_bias", "layer_norm_eps": "rms_norm_eps"},
)
"""`recognized` is None: Megatron's arguments describe a Qwen 3 or an OLMo 2 in the same way."""
