"""Bamba: each layer is a Mamba 2 or attention, and a gated MLP. Half of each attention head rotates.

Megatron core's hybrid stack has layers of one part each. A Bamba of n layers is therefore described as 2n layers, `M-` or
`*-` for each of its own:

    hf       model.layers.{l/2}.{input_layernorm, mamba | self_attn}, model.layers.{l/2}.{pre_ff_layernorm, feed_forward}
    core     decoder.layers.{l}.{mixer | self_attention},             decoder.layers.{l}.mlp

Source: BambaConfig and BambaMixer of transformers 5; mamba_block.py of megatron-core 0.16.1.
"""

from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, MLP
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, flags, need_size
from megaconv.families.parts.mamba_and_mlp import HF, MAMBA_ONLY, MAMBA_SIZES, MIXERS
from megaconv.families.parts.rope import partial_rotation, rope, rope_object
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_NAMES = {
    "layers.{l}.mlp_norm.weight": {"hf": HF + "pre_ff_layernorm.weight"},
    "layers.{l}.mlp.{gate|up}.weight": {"hf": HF + "feed_forward.{gate|up}_proj.weight"},
    "layers.{l}.mlp.{gate|up}.bias": {"hf": HF + "feed_forward.{gate|up}_proj.bias"},
    "layers.{l}.mlp.down.weight": {"hf": HF + "feed_forward.down_proj.weight"},
    "layers.{l}.mlp.down.bias": {"hf": HF + "feed_forward.down_proj.bias"},
}
FEED_FORWARD = respelled(MLP, _NAMES)
"""The rows of the MLP under Bamba's and Falcon-H1's names."""


def _of_two_parts(row: Row) -> Row:
    """The row with Hugging Face's names, which count a mixer and the MLP after it as one layer."""
    names = dict(row.names)
    names["hf"] = tuple(
        replace(one, name=one.name.replace("{l}", "{l/2}")) for one in row.names["hf"]
    )
    return replace(row, names=names)


_FINAL_NORM = HEAD[0].renamed(hf="model.final_layernorm.weight", core="decoder.final_norm.weight")
_TABLE = (EMBEDDING, *MIXERS, *FEED_FORWARD, _FINAL_NORM, HEAD[1])
ROWS = tuple(map(_of_two_parts, in_core(_TABLE)))

_COUNT, _INDICES = "num_hidden_layers", "attn_layer_indices"


def _read_layers(raw: Raw) -> Fields:
    layers = need_size(raw, _COUNT, 32)
    attends = raw.get(_INDICES) or ()
    mixers = ("attention" if layer in attends else "mamba" for layer in range(layers))
    return {
        "layers.count": 2 * layers,
        "layers.mixer": tuple(part for mixer in mixers for part in (mixer, "none")),
        "layers.mlp": ("none", "dense") * layers,
    }


def _write_layers(config: ModelConfig) -> Raw:
    """Raises NotExpressible for a layer that isn't a mixer before an MLP, or an MLP after a mixer."""
    for layer, kind in enumerate(config.layers):
        of_mlp = kind.mixer == "none" and kind.mlp == "dense"
        of_mixer = kind.mixer in ("mamba", "attention") and kind.mlp == "none"
        if not (of_mlp if layer % 2 else of_mixer):
            raise NotExpressible(
                f"the model's layers.mixer and layers.mlp of layer {layer} are {kind.mixer!r} and {kind.mlp!r}; a Bamba has a mixer and "
                "an MLP by turns"
            )
    if config.layer_count % 2:
        raise NotExpressible(
            "the model's last layer is a mixer; a Bamba has an MLP after each mixer"
        )
    attends = [layer // 2 for layer in config.layers_with("attention")]
    return {_COUNT: config.layer_count // 2, _INDICES: attends}


_ROPE, _PARTIAL = rope(10000.0), partial_rotation(0.5)
_SHARE = "partial_rotary_factor"


def _read_share(raw: Raw) -> Fields:
    """The rotating share of each head. transformers reads it inside the rope object only, and takes 0.5 if it is missing there.

    Raises NotExpressible for another share beside the object.
    """
    beside = raw.get(_SHARE, 0.5)
    if beside != 0.5 and _SHARE not in rope_object(raw):
        raise NotExpressible(
            f"{CONFIG_NAME}: {_SHARE} {beside!r} outside of rope_parameters is not supported in this architecture: transformers takes "
            "0.5 then; write the share into rope_parameters"
        )
    return _PARTIAL.read(raw)


def _write_rope(config: ModelConfig) -> Raw:
    written = _ROPE.write(config)
    share = config.positions.rotary_percent
    if share == 0.5:
        return {**written, _SHARE: share}
    scaling = written["rope_scaling"] or {"rope_type": "default"}
    return {"rope_parameters": {**scaling, "rope_theta": written["rope_theta"], _SHARE: share}}


_ROTATION = Keys(_ROPE.names, _ROPE.read, _write_rope)
_OF_DECODERS = decoder_keys(
    positions=262144, kv_heads=8, ffn=14336, epsilon=1e-5, rotation=_ROTATION, partial=Keys((_SHARE,), _read_share, lambda config: {}),
    tokens=(1, 2, 0),
)  # fmt: skip
_KEYS = (
    *(keys for keys in _OF_DECODERS if _COUNT not in keys.names),
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    Keys((_COUNT, _INDICES), _read_layers, _write_layers),
    *MAMBA_SIZES,
)

FAMILY = Family(
    name="bamba",
    architectures=("BambaForCausalLM",),
    model_type="bamba",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE,
    only=MAMBA_ONLY,
    recognized="hybrid_stack mamba_layers rope !norm_bias !zero_centered silu gated !mixture",
    aliases={"layer_types": "layers_block_type"},
    proven="custom module",
)
