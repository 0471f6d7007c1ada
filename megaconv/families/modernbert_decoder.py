"""ModernBERT's decoders (Ettin): ModernBERT's layers with causal attention, and a matrix with a norm before the head.

    model.embeddings.{tok_embeddings, norm}, model.layers.{l}.{attn_norm, attn, mlp_norm, mlp}, model.final_norm
    lm_head.{dense, norm}, decoder    the matrix and the norm before the head, and the head

Layer 0 has no norm before attention, because the norm of the embedding comes before it. Megatron core has no such layer:
these models are converted between Hugging Face's files, and trained; core's names are those of the trainer's checkpoints.
Source: ModernBertDecoderConfig and modeling_modernbert_decoder.py of transformers 5.24.
"""

from dataclasses import replace

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    GELUS,
    LAYER_NORM,
    body_keys,
    multi_head,
)
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, choice, flags, need_size
from megaconv.families.parts.layer_ropes import layer_ropes, length_of
from megaconv.families.parts.row_changes import (
    in_core,
    respelled,
    with_head_bias,
    with_modules,
    with_optional_norm_biases,
    without_rows,
)
from megaconv.families.parts.windows import windows_by_layer
from megaconv.model.config import ModelConfig
from megaconv.model.table import Copied, Fused, Row

_MODULES = {
    "model.embed_tokens": "model.embeddings.tok_embeddings",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn.Wo",
    "self_attn.": "attn.",
    "post_attention_layernorm": "mlp_norm",
    "mlp.down_proj": "mlp.Wo",
    "model.norm": "model.final_norm",
    "lm_head": "decoder",
}
_FUSED = {
    f"layers.{{l}}.mlp.{{gate|up}}.{kind}": {"hf": Fused(f"model.layers.{{l}}.mlp.Wi.{kind}")}
    for kind in ("weight", "bias")
}
_COPY = Copied("head", {"hf": ("decoder.weight",), "core": ("output_layer.weight",)})
_EMBEDDING = replace(EMBEDDING, copies=(_COPY,))
_INPUT_NORM, *_PROJECTIONS = without_rows(ATTENTION, "layers.{l}.attn.{q|k}_norm.weight")
_LAYERS = (replace(_INPUT_NORM, when="later_layer"), *_PROJECTIONS, *MLP)
_EMBED_NORM = Row(
    "embed_norm.weight", ("hidden",), stage="first",
    hf="model.embeddings.norm.weight",
    core="embedding.norm.weight",
)  # fmt: skip
_BEFORE_HEAD = (
    Row("head_projection.weight", ("hidden hidden",), stage="last",
        hf="lm_head.dense.weight",
        core="head_projection.dense.weight"),
    Row("head_norm.weight", ("hidden",), stage="last",
        hf="lm_head.norm.weight",
        core="head_projection.norm.weight"),
)  # fmt: skip
_SPELLED = respelled(with_head_bias((_EMBEDDING, *_LAYERS, *HEAD)), _FUSED)
*_BODY, _HEAD, _BIAS = with_modules(_SPELLED, _MODULES)
ROWS = in_core(with_optional_norm_biases((*_BODY, _EMBED_NORM, *_BEFORE_HEAD, _HEAD, _BIAS)))

_HEADS = multi_head("num_attention_heads", "hidden_size")


def _read_heads(raw: Raw) -> Fields:
    """The heads. transformers' class rotates head_dim elements, but divides hidden_size for everything else."""
    found = _HEADS.read(raw)
    width = found["attention.head_dim"]
    if raw.get("head_dim", width) != width:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: head_dim is {raw['head_dim']!r:.40}, but hidden_size {raw['hidden_size']} divided by "
            f"{raw['num_attention_heads']} heads is {width}; leave head_dim out"
        )
    return found


_LOCAL, _WINDOW = "local_attention", "sliding_window"
_WINDOWS = windows_by_layer(
    64, full_every=3, full_first=True, pattern=("global_attn_every_n_layers",)
)


def _read_windows(raw: Raw) -> Fields:
    """The window of each layer, which is half of local_attention. Without layer_types, every third layer has none.

    transformers 5 computes with a contradicting sliding_window, transformers 4 with half of local_attention.
    """
    local = need_size({_LOCAL: 128, **raw}, _LOCAL)
    size = need_size({_WINDOW: local // 2, **raw}, _WINDOW)
    if size != local // 2:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_WINDOW} is {size}, but half of {_LOCAL} is {local // 2}; correct one of them"
        )
    return _WINDOWS.read({**raw, _WINDOW: size})


def _write_windows(config: ModelConfig) -> Raw:
    written = _WINDOWS.write(config)
    return {**written, _LOCAL: 2 * written[_WINDOW]}


_ROPES, _THETAS = "rope_parameters", (160_000.0, 10_000.0)
_GLOBAL_THETA, _LOCAL_THETA = "global_rope_theta", "local_rope_theta"
_LAYER_ROPES = layer_ropes(*_THETAS)


def _read_ropes(raw: Raw) -> Fields:
    """The ropes of both kinds of layers. A base may be beside them, as transformers 4 writes it."""
    bases = {
        "rope_theta": raw.get(_GLOBAL_THETA, _THETAS[0]),
        "rope_local_base_freq": raw.get(_LOCAL_THETA, _THETAS[1]),
    }
    return _LAYER_ROPES.read({**length_of(raw), **bases, _ROPES: raw.get(_ROPES)})


def _write_ropes(config: ModelConfig) -> Raw:
    written = _LAYER_ROPES.write(config)
    return {
        _ROPES: written[_ROPES],
        _GLOBAL_THETA: written["rope_theta"],
        _LOCAL_THETA: written["rope_local_base_freq"],
    }


_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", **GELUS}
_KEYS = (
    *body_keys(
        positions=8192,
        ffn=1152,
        epsilon=1e-5,
        epsilon_key="norm_eps",
        rotation=Keys((_ROPES, _GLOBAL_THETA, _LOCAL_THETA), _read_ropes, _write_ropes),
        tied=True,
        tokens=(50281, 50282, 50283),
    ),
    Keys((*_HEADS.names, "head_dim"), _read_heads, _HEADS.write),
    Keys((*_WINDOWS.names, _LOCAL), _read_windows, _write_windows),
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    flags("norm_bias", ("norm.bias",), default=False),
    flags("decoder_bias", ("head.bias",), default=True),
    choice("hidden_activation", "mlp.activation", _ACTIVATIONS, "gelu"),
    choice("classifier_activation", "head.projection", _ACTIVATIONS, "gelu"),
)
_FIXED = {
    **LAYER_NORM,
    "norm.embedding": True,
    "norm.skips_first": True,
    "mlp.gated": True,
}

FAMILY = Family(
    name="modernbert_decoder",
    architectures=("ModernBertDecoderForCausalLM",),
    model_type="modernbert-decoder",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={"classifier_bias": False, "rope_scaling": None},
    recognized=None,
    proven="names",
)
