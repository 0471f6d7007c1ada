"""Mistral 4, text only: DeepSeek V3's latent attention, experts by softmax scores, and a factor on q as in Ministral 3.

transformers computes this architecture with yarn only. Published models (Mistral Small 4) are multimodal, with such a
model inside.
"""

from math import isclose

from megaconv.errors import CorruptCheckpoint, UnknownFamily
from megaconv.families import Family
from megaconv.families.deepseek_v2 import ROWS as DEEPSEEK_V2_ROWS
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import first_dense, routed_experts, shared_experts
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, flags, number
from megaconv.families.parts.latent_attention import LATENT_NORMS, latent_heads, one_epsilon
from megaconv.families.parts.rope import rotary_percent
from megaconv.families.parts.row_changes import in_all_forms, in_core
from megaconv.families.parts.tempered_rope import (
    mistral_yarn,
    no_temperature_in_core,
    tempered_rope,
    usual_temperature,
)
from megaconv.model.config import ModelConfig
from megaconv.model.table import Spelling, Stacked

_EXPERTS = "model.layers.{l}.mlp.experts."
_STACKED: dict[str, Spelling] = {
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": Stacked(_EXPERTS + "gate_up_proj"),
    "layers.{l}.mlp.experts.{e}.down.weight": Stacked(_EXPERTS + "down_proj"),
}
"""transformers reads no other form of this architecture's experts."""
ROWS = in_core(in_all_forms(DEEPSEEK_V2_ROWS, _STACKED))

_LATENT = latent_heads(kv_rank=256, q_rank=1024, rope=64, nope=64, v=128)
_WHOLE, _SHARE = ("head_dim", "qk_head_dim"), "partial_rotary_factor"


def _read_heads(raw: Raw) -> Fields:
    """The sizes of heads. Keys that follow from others have to agree with them."""
    found = _LATENT.read(raw)
    width, rope_dim = found["attention.head_dim"], found["latent.rope_dim"]
    for key in _WHOLE:
        if raw.get(key, width) != width:
            raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} is {raw[key]!r}, but heads have {width}")
    share = rotary_percent(raw, rope_dim / width)
    if not isclose(share, rope_dim / width):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_SHARE} is {share}, but {rope_dim} of {width} elements rotate"
        )
    return found


def _write_heads(config: ModelConfig) -> Raw:
    width = config.attention.head_dim
    share = config.latent.rope_dim / width
    return {**_LATENT.write(config), **dict.fromkeys(_WHOLE, width), _SHARE: share}


_HEADS = Keys((*_LATENT.names, _SHARE), _read_heads, _write_heads)
_ROPE = tempered_rope(1e4, mistral_yarn(factor=128.0, length=8192), stated_theta=1e4)


def _read_yarn(raw: Raw) -> Fields:
    found = _ROPE.read(raw)
    kind = (found["positions.scaling"] or {}).get("rope_type", "default")
    if kind != "yarn":
        raise UnknownFamily(
            f"{CONFIG_NAME}: rope_type {kind!r} is not supported in this architecture, only 'yarn' is"
        )
    return found


_YARN = Keys(_ROPE.names, _read_yarn, _ROPE.write)
_BODY = body_keys(positions=1048576, ffn=12288, rotation=_YARN, partial=_HEADS, tokens=(1, 2, 11))
_KEYS = (
    *_BODY,
    *routed_experts(count=128, per_token=4, width=2048),
    shared_experts(count=1, width=2048),
    first_dense(0),
    number("routed_scaling_factor", "experts.scale", 1.0),
    flags("norm_topk_prob", ("experts.renormalize",), default=True),
)
_ONLY = {**SILU, "attention_bias": False, "rope_interleave": True, "n_group": 1, "topk_group": 1}


def _notices(config: ModelConfig) -> tuple[str, ...]:
    return (*one_epsilon(config), *no_temperature_in_core(config))


FAMILY = Family(
    name="mistral4",
    architectures=("Mistral4ForCausalLM",),
    model_type="mistral4",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **LATENT_NORMS},
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("mla",),
    recognized=None,
    notices=_notices,
    assumed=usual_temperature,
    aliases={"num_local_experts": "n_routed_experts"},
)
"""`recognized` is None, since Megatron's arguments are those of DeepSeek V2."""
