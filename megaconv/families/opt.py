"""OPT: learned positions, of which the table's first two rows are unused; LayerNorm, biases, ReLU.

The model of 350 million parameters is refused: its norms follow the sums, and its embedding has another width.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LEARNED_POSITIONS, model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, choice, flags, size
from megaconv.families.parts.row_changes import (
    in_core,
    with_modules,
    with_norm_biases,
    with_positions,
    without_gate,
)

MODULES = {
    "input_layernorm": "self_attn_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "post_attention_layernorm": "final_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
_OWN_MODULES = {
    "model.embed_tokens": "model.decoder.embed_tokens",
    "model.layers": "model.decoder.layers",
    "model.norm": "model.decoder.final_layer_norm",
}
_LAYERS = with_modules(with_norm_biases(without_gate(LLAMA_ROWS)), MODULES | _OWN_MODULES)
ROWS = in_core(with_positions(_LAYERS, "model.decoder.embed_positions"))

_EMBEDDING_WIDTH = "word_embed_proj_dim"


def _read_embedding_width(raw: Raw) -> Fields:
    stated = raw.get(_EMBEDDING_WIDTH)
    if stated not in (None, raw.get("hidden_size")):
        raise NotExpressible(
            f"{CONFIG_NAME}: {_EMBEDDING_WIDTH} {stated} differs from hidden_size {raw.get('hidden_size')}, which is not supported"
        )
    return {}


_KEYS = (
    size("hidden_size", "hidden"),
    size("num_hidden_layers", "layers.count"),
    size("ffn_dim", "mlp.ffn"),
    size("max_position_embeddings", "max_positions", 2048),
    multi_head("num_attention_heads", "hidden_size"),
    Keys((_EMBEDDING_WIDTH,), _read_embedding_width, lambda config: {_EMBEDDING_WIDTH: config.hidden}),
    choice("activation_function", "mlp.activation", {"relu": "relu", "gelu": "gelu"}, "relu"),
    flags("enable_bias", ("attention.qkv_bias", "attention.o_bias", "mlp.bias"), default=True),
    *model_keys(tied=True, tokens=(2, 2, 1)),
)  # fmt: skip
_ONLY = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
}
FIXED = {**LEARNED_POSITIONS, "positions.offset": 2, "norm.epsilon": 1e-5}

FAMILY = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    model_type="opt",
    rows=ROWS,
    keys=_KEYS,
    fixed=FIXED,
    only=_ONLY,
    prefix="model.",
    recognized=None,
    proven="names",
)
