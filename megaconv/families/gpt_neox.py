"""GPT-NeoX: Pythia, GPT-NeoX 20B and other models of the class: LayerNorm, biases, rope on a part of each head.

In most of these models, attention and the MLP of a layer work in parallel on the same input, each after its own norm.
Megatron core has no such layer: these models are converted between Hugging Face's files, and trained. A model with
`use_parallel_residual: false` is converted to Megatron core as well.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LAYER_NORM, body_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, choice, flags
from megaconv.families.parts.rope import partial_rotation, rope
from megaconv.families.parts.row_changes import in_core, respelled, with_norm_biases, without_gate
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, Spelling

_L = "gpt_neox.layers.{l}."
_QKV = _L + "attention.query_key_value."
_NORM = "{weight|bias}"
_NAMES: dict[str, dict[str, Spelling]] = {
    "embed.weight": {"hf": "gpt_neox.embed_in.weight"},
    f"layers.{{l}}.input_norm.{_NORM}": {"hf": f"{_L}input_layernorm.{_NORM}"},
    "layers.{l}.attn.{q|k|v}.weight": {"hf": Fused(_QKV + "weight", groups="kv_heads")},
    "layers.{l}.attn.{q|k|v}.bias": {"hf": Fused(_QKV + "bias", groups="kv_heads")},
    "layers.{l}.attn.o.weight": {"hf": _L + "attention.dense.weight"},
    "layers.{l}.attn.o.bias": {"hf": _L + "attention.dense.bias"},
    f"layers.{{l}}.mlp_norm.{_NORM}": {"hf": f"{_L}post_attention_layernorm.{_NORM}"},
    "layers.{l}.mlp.up.weight": {"hf": _L + "mlp.dense_h_to_4h.weight"},
    "layers.{l}.mlp.up.bias": {"hf": _L + "mlp.dense_h_to_4h.bias"},
    "layers.{l}.mlp.down.weight": {"hf": _L + "mlp.dense_4h_to_h.weight"},
    "layers.{l}.mlp.down.bias": {"hf": _L + "mlp.dense_4h_to_h.bias"},
    f"final_norm.{_NORM}": {"hf": f"gpt_neox.final_layer_norm.{_NORM}"},
    "head.weight": {"hf": "embed_out.weight"},
}  # fmt: skip
_BASE, _SHARE = "rotary_emb_base", "rotary_pct"
_ROPE = rope(10000.0)


def _in_usual_words(raw: Raw) -> Raw:
    """The same rope under the keys of other architectures. transformers' class ignores these keys themselves."""
    usual = {"rope_theta": _BASE, "partial_rotary_factor": _SHARE}
    others = {key: value for key, value in raw.items() if key not in usual}
    return others | {word: raw[own] for word, own in usual.items() if own in raw}


def _read_rope(raw: Raw) -> Fields:
    return _ROPE.read(_in_usual_words(raw))


def _write_rope(config: ModelConfig) -> Raw:
    found = dict(_ROPE.write(config))
    return {_BASE: found.pop("rope_theta"), **found}


def own_share(default: float) -> Keys:
    """The rotating share of each head. default: the share if the key is missing."""
    part = partial_rotation(default)
    return Keys(
        (_SHARE,),
        lambda raw: part.read(_in_usual_words(raw)),
        lambda config: {_SHARE: config.positions.rotary_percent},
    )


OWN_ROPE = Keys((_BASE, *_ROPE.names[1:]), _read_rope, _write_rope)
_HEADS = multi_head("num_attention_heads", "hidden_size")


def _read_heads(raw: Raw) -> Fields:
    """The heads. A head_dim, which transformers reads for rope alone, has to be their size."""
    found = _HEADS.read(raw)
    stated, size = raw.get("head_dim"), found["attention.head_dim"]
    if stated not in (None, size):
        raise NotExpressible(
            f"{CONFIG_NAME}: head_dim {stated!r:.40} is not supported in this architecture, whose heads have {size} elements: "
            "transformers would only rotate more or fewer of them; leave it out"
        )
    return found


_OF_CLASS = Keys(("is_decoder",), lambda raw: {}, lambda config: {})
"""A key that says which class of transformers it is for, and changes no logits."""
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_KEYS = (
    *body_keys(
        positions=2048, epsilon=1e-5, epsilon_key="layer_norm_eps", rotation=OWN_ROPE, partial=own_share(0.25), tokens=(0, 2, None)
    ),
    Keys((*_HEADS.names, "head_dim"), _read_heads, _HEADS.write),
    choice("hidden_act", "mlp.activation", _ACTIVATIONS, "gelu"),
    flags("attention_bias", ("attention.qkv_bias", "attention.o_bias"), default=True),
    flags("use_parallel_residual", ("parallel_residual",), default=True),
    _OF_CLASS,
)  # fmt: skip
_MASKS = (r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)
"""Older files store the causal mask and the rotary frequencies."""

FAMILY = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    model_type="gpt_neox",
    rows=in_core(respelled(with_norm_biases(without_gate(LLAMA_ROWS)), _NAMES)),
    keys=_KEYS,
    fixed=LAYER_NORM | {"mlp.gated": False, "mlp.bias": True},
    ignored=_MASKS,
    prefix="gpt_neox.",
    renamed={"lm_head.": "embed_out."},
    recognized=None,
)
