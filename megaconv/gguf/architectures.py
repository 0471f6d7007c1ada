"""llama.cpp's architectures whose config.json follows from the fields of the model: one record each.

    starcoder2.embedding_length 3072    hidden
    phi2.rope.dimension_count 32        positions.rotary_percent, as a share of a head's elements
    blk.0.attn_q.bias                   attention.qkv_bias

The metadata give fields, and the family writes its own config.json from these fields. A field without a key has the value
that all models of the family have, or its default. The saver reads back what it wrote, so it refuses every other value.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaconv.families import family
from megaconv.model.ceilings import require_possible
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import from_fields
from megaconv.model.table import Fused, RotaryPairs, Spelling

_L = "blk.{l}."
_QKV = {what: f"layers.{{l}}.attn.{{q|k|v}}.{what}" for what in ("weight", "bias")}
PAIRS: Mapping[str, Spelling] = {
    canonical: RotaryPairs(f"{_L}attn_{{q|k|v}}.{what}", rotating=(0, 1))
    for what, canonical in _QKV.items()
}
"""Rows of q and k for rope that rotates pairs of neighbours, where Hugging Face's rotates halves."""
JOINED: Mapping[str, Spelling] = {
    canonical: Fused(f"{_L}attn_qkv.{what}") for what, canonical in _QKV.items()
}
"""q, k and v in one tensor."""

Fields = dict[str, Any]
Get = Callable[[str], Any]
"""A function that gives the value of a key without the architecture's prefix; None for a missing key."""


@dataclass(frozen=True)
class Number:
    """A field with a key of its own.

    inverse: True if the file holds 1 / the field. neutral: the value of a field that is None.
    """

    field: str
    key: str
    inverse: bool = False
    neutral: float = 1.0

    def read(self, get: Get) -> Any:
        value = get(self.key)
        if value is None or value == self.neutral:
            return None
        return 1 / value if self.inverse else value

    def stored(self, value: float | None) -> float | None:
        """The value of the key; None if the file doesn't need it, because llama.cpp takes a missing key for 0."""
        if value is None:
            return self.neutral or None
        return float(1 / value if self.inverse else value)


@dataclass(frozen=True)
class Flag:
    """A field that is true or false, with a key of its own."""

    field: str
    key: str

    def read(self, get: Get) -> bool:
        return bool(get(self.key))

    def stored(self, value: bool) -> bool:
        return value


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures."""

    family: str
    name: str
    """llama.cpp's name."""
    own: tuple[Number | Flag, ...] = ()
    """Fields with keys that other architectures lack."""
    names: Mapping[str, Spelling] = field(default_factory=dict)
    """Names of rows that differ from the usual ones (names.py)."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields with the only value that llama.cpp computes."""
    layers: Callable[[int, Get], Fields] = lambda layers, get: {}
    """Fields of layers that llama.cpp computes without a key, or from one."""


def _command_layers(layers: int, get: Get) -> Fields:
    """Cohere 2: three of four layers have a window, and these alone rotate."""
    windowed = [bool((layer + 1) % 4) for layer in range(layers)]
    window = get("attention.sliding_window")
    return {
        "layers.window": tuple(window if each else None for each in windowed),
        "layers.rotates": tuple(windowed),
    }


_LOGIT_SCALE = Number("head.divisor", "logit_scale", inverse=True)
_GRANITE = (
    Number("head.divisor", "logit_scale"),
    Number("residual_scale", "residual_scale"),
    Number("embedding_scale", "embedding_scale"),
    Number("attention.scale", "attention.scale", neutral=0.0),
)
_FURTHER = (
    Architecture("starcoder2", "starcoder2"),
    Architecture("stablelm", "stablelm"),
    Architecture("nemotron", "nemotron"),
    Architecture("arcee", "arcee", names=PAIRS),
    Architecture("jais2", "jais2"),
    Architecture("ernie4_5", "ernie4_5"),
    Architecture(
        "seed_oss", "seed_oss",
        names={"layers.{l}.mlp_norm.weight": _L + "post_attention_norm.weight"},
    ),
    Architecture("phi", "phi2", fixed={"mlp.activation": "gelu_tanh"}),
    Architecture(
        "gpt_neox", "gptneox", (Flag("parallel_residual", "use_parallel_residual"),), JOINED,
        fixed={"mlp.activation": "gelu_tanh"},
    ),
    Architecture(
        "bloom", "bloom",
        names={**JOINED, "embed_norm.{weight|bias}": "token_embd_norm.{weight|bias}"},
    ),
    Architecture("olmo", "olmo", (Number("attention.clip", "attention.clamp_kqv", neutral=0.0),), PAIRS),
    Architecture("cohere", "command-r", (_LOGIT_SCALE,)),
    Architecture("cohere2", "cohere2", (_LOGIT_SCALE,), layers=_command_layers),
    Architecture("granite", "granite", _GRANITE, PAIRS),
)  # fmt: skip
BY_NAME: Mapping[str, Architecture] = {each.name: each for each in _FURTHER}
"""llama.cpp's name -> the architecture."""
BY_FAMILY: Mapping[str, Architecture] = {each.family: each for each in _FURTHER}
"""megaconv's family -> the architecture."""

_SIZES = {
    "hidden": "embedding_length",
    "layers.count": "block_count",
    "mlp.ffn": "feed_forward_length",
    "attention.heads": "attention.head_count",
    "max_positions": "context_length",
}
_EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
_BY_TENSOR = {
    "attention.qkv_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
    "attention.o_bias": ("blk.0.attn_output.bias",),
    "attention.qk_norm": ("blk.0.attn_q_norm.weight",),
    "mlp.bias": ("blk.0.ffn_up.bias",),
}
"""Field -> names of tensors of which a file has one if the field is true."""


def needed(get: Get) -> str | None:
    """A key that the file lacks; None if it has all."""
    if all(get(key) is None for key in _EPSILONS):
        return _EPSILONS[0]
    return next((key for key in _SIZES.values() if get(key) is None), None)


def described(
    architecture: str, get: Get, tensors: Collection[str], vocab: int, tokens: Fields
) -> dict[str, Any]:
    """The config.json of a model. Raises NotExpressible if the family can't represent it.

    get: gives values of the file's metadata, which has the keys of `needed`. tensors: names of its tensors. vocab: rows of the
    embedding. tokens: ids of the special tokens by the names of their fields.
    """
    record = BY_NAME[architecture]
    its_family = family(record.family)
    fields: Fields = {name: get(key) for name, key in _SIZES.items()}
    require_possible(fields)  # before anything is listed for each layer
    fields |= _heads(fields, get)
    fields |= {
        name: any(each in tensors for each in names)
        for name, names in _BY_TENSOR.items()
        if name not in its_family.fixed
    }
    fields["norm.epsilon"] = next(get(key) for key in _EPSILONS if get(key) is not None)
    fields |= {each.field: each.read(get) for each in record.own}
    fields |= record.layers(fields["layers.count"], get)
    fields |= {"vocab": vocab, "tie_embeddings": "output.weight" not in tensors, **tokens}
    config = from_fields(record.family, {**its_family.fixed, **record.fixed, **fields})
    return its_family.write_hf(config)


def _heads(fields: Fields, get: Get) -> Fields:
    """Heads and rope."""
    heads = fields["attention.heads"]
    head_dim = get("attention.key_length") or fields["hidden"] // heads
    rotating = get("rope.dimension_count") or head_dim
    return {
        "attention.kv_heads": get("attention.head_count_kv") or heads,
        "attention.head_dim": head_dim,
        "positions.theta": get("rope.freq_base") or 10000.0,
        "positions.rotary_percent": rotating / head_dim,
    }


def numbers_of(config: ModelConfig) -> dict[str, float | int | bool]:
    """The metadata of a model's own keys, without the architecture's prefix."""
    record = BY_FAMILY[config.family]
    found: dict[str, float | int | bool] = {}
    for each in record.own:
        stored = each.stored(value_of(config, each.field))
        if stored is not None:
            found[each.key] = stored
    if config.has("rope"):
        head_dim = config.attention.head_dim
        found["rope.dimension_count"] = int(head_dim * config.positions.rotary_percent)
    if config.window is not None and record.family == "cohere2":
        found["attention.sliding_window"] = config.window
    return found
