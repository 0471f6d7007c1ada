"""Gemma 1 and CodeGemma: norms that multiply by their weight + 1, a scaled embedding, gated gelu, a tied head.

Megatron supports the norms (layernorm_zero_centered_gamma: the stored values are the same), but not the scale of the
embedding. Like Megatron-Bridge and NeMo, megaconv leaves the weights unchanged, and the model has to be built with the
scale.
"""

from megaconv.errors import NotExpressible, UnknownFamily
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, LLAMA_LIKE, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, choice, follows
from megaconv.families.parts.row_changes import in_core

ROWS = in_core(LLAMA_ROWS)

_ACTIVATIONS = dict.fromkeys(("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast"), "gelu_tanh")
"""The first releases say `gelu` and mean its approximation. transformers reads it so as well."""


def _hidden_activation(raw: Raw) -> Fields:
    """Check hidden_activation, which takes precedence over hidden_act."""
    if raw.get("hidden_activation") not in (None, *_ACTIVATIONS):
        raise UnknownFamily(
            f"{CONFIG_NAME}: hidden_activation {raw['hidden_activation']!r} is not supported in this architecture"
        )
    return {}


def _bidirectional(raw: Raw) -> Fields:
    if raw.get("use_bidirectional_attention"):
        raise NotExpressible(
            f"{CONFIG_NAME}: use_bidirectional_attention makes an encoder of the model; only decoders are supported"
        )
    return {}


DECODER_ONLY = Keys(("use_bidirectional_attention",), _bidirectional, lambda config: {})

_KEYS = (
    *decoder_keys(positions=8192, kv_heads=16, head_dim=256, tokens=(2, 1, 0), tied=True),
    ATTENTION_BIASES,
    choice("hidden_act", "mlp.activation", _ACTIVATIONS, "gelu_pytorch_tanh"),
    Keys(
        ("hidden_activation",),
        _hidden_activation,
        lambda config: {"hidden_activation": "gelu_pytorch_tanh"},
    ),
    DECODER_ONLY,
    follows("embedding_scale", lambda raw: raw["hidden_size"] ** 0.5),
)
_GEMMA = {"mlp.activation": "gelu_tanh", "norm.zero_centered": True}

FAMILY = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    model_type="gemma",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | _GEMMA,
    ignored=ROPE_FREQUENCIES,
    features=("zero_centered",),
    recognized="rope pre_norm !norm_bias zero_centered gelu_tanh gated !mixture !mla !sinks",
    assumed=lambda fields: {"embedding_scale": fields["hidden"] ** 0.5},
    proven="custom module",
)
