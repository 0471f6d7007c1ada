"""LongCat-Flash: two latent attentions and two MLPs in each of its layers, and experts beside the first MLP.

    h = x + attention_0(norm(x));      n = norm(h);    y = h + mlp_0(n)
    z = y + attention_1(norm(y));      output = z + mlp_1(norm(z)) + experts(n)

megaconv describes each of these layers as two. The first has experts, whose shared expert is mlp_0, and the experts' sum joins
after the second. Some experts compute nothing: they return their input. transformers stores gate and up for these too, and
doesn't load a file without them; published files have none. megaconv keeps either form.

    hf           model.layers.{l/2}.{input_layernorm, self_attn, post_attention_layernorm, mlps}.{0, 1}, mlp.{router, experts}
    hf_stacked   model.layers.{l/2}.mlp.experts.{gate_up_proj, down_proj}

Megatron core has no such layers: these models are converted between Hugging Face's files. Source: LongcatFlashConfig and
modeling_longcat_flash.py of transformers 5.24.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from formats.tensor import LazyTensor
from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.experts import MOE_NORM
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    count,
    need_positive,
    need_size,
    size,
)
from megaconv.families.parts.latent_attention import LATENT_ATTENTION, LATENT_NORMS, latent_heads
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import hf_only, respelled, with_modules, without_biases
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.pieces import Pieces, Template
from megaconv.model.table import Row, RowParts, Stacked

_MIXTURE = "model.layers.{l/2}.mlp."
_DENSE = "model.layers.{l/2}.mlps.{l%2}."
_EXPERTS = _MIXTURE + "experts."


@dataclass(frozen=True)
class _StackedBeforeIdle(Stacked):
    """All experts in one tensor, with rows for the experts that compute nothing behind the others."""

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        idle = pieces.rank.whole["zero_experts"]
        for template in super().natives(pieces):
            experts, rows, columns = template.native.shape
            shape = (experts + idle, rows, columns)
            yield Template(template.native._replace(shape=shape, padding_rows=idle * rows))


_NAMES = {
    "layers.{l}.mlp.{gate|up}.weight": {"hf": _DENSE + "{gate_proj|up_proj}.weight"},
    "layers.{l}.mlp.down.weight": {"hf": _DENSE + "down_proj.weight"},
}
_MODULES = {
    "model.layers.{l}.": "model.layers.{l/2}.",
    "input_layernorm": "input_layernorm.{l%2}",
    "self_attn": "self_attn.{l%2}",
    "post_attention_layernorm": "post_attention_layernorm.{l%2}",
}
_LAYERS = (*LATENT_ATTENTION, MOE_NORM, *without_biases(MLP))
_MIXTURES = (
    Row("layers.{l}.mlp.router.weight", ("routes hidden",), when="moe",
        hf=_MIXTURE + "router.classifier.weight"),
    Row("layers.{l}.mlp.router.bias", ("routes",), when="moe router_bias",
        hf=_MIXTURE + "router.e_score_correction_bias"),
    Row("layers.{l}.mlp.experts.{e}.{gate|up}.weight", ("moe_ffn hidden", "moe_ffn hidden"), tp=0, when="moe",
        hf=_EXPERTS + "{e}.{gate_proj|up_proj}.weight",
        hf_stacked=_StackedBeforeIdle(_EXPERTS + "gate_up_proj")),
    Row("layers.{l}.mlp.experts.{e}.down.weight", ("hidden moe_ffn",), tp=1, when="moe",
        hf=_EXPERTS + "{e}.down_proj.weight",
        hf_stacked=Stacked(_EXPERTS + "down_proj")),
    Row("layers.{l}.mlp.idle.gate.weight", ("zero_experts*moe_ffn hidden",), when="moe stored_idle",
        hf=RowParts(_EXPERTS + "{p}.gate_proj.weight", parts="zero_experts", first="experts")),
    Row("layers.{l}.mlp.idle.up.weight", ("zero_experts*moe_ffn hidden",), when="moe stored_idle",
        hf=RowParts(_EXPERTS + "{p}.up_proj.weight", parts="zero_experts", first="experts")),
    Row("layers.{l}.mlp.shared.{gate|up}.weight", ("shared_ffn hidden", "shared_ffn hidden"), tp=0, when="moe shared_ffn",
        hf=_DENSE + "{gate_proj|up_proj}.weight"),
    Row("layers.{l}.mlp.shared.down.weight", ("hidden shared_ffn",), tp=1, when="moe shared_ffn",
        hf=_DENSE + "down_proj.weight"),
)  # fmt: skip
_TWICE = with_modules(respelled(_LAYERS, _NAMES), _MODULES)
ROWS = hf_only((EMBEDDING, *_TWICE, *_MIXTURES, *HEAD))

_NUM, _TOTAL = "num_layers", "num_hidden_layers"
_HEADS = latent_heads(kv_rank=512, q_rank=1536, rope=64, nope=128, v=128)


def _read_layers(raw: Raw) -> Fields:
    pairs = need_size(raw, _NUM, 28)
    if raw.get(_TOTAL, 2 * pairs) != 2 * pairs:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_NUM} is {pairs} and {_TOTAL} {raw[_TOTAL]!r}; expected {2 * pairs}, two for each; leave {_TOTAL} out"
        )
    return {"layers.count": 2 * pairs, "layers.mlp": ("experts", "dense") * pairs}


def _read_heads(raw: Raw) -> Fields:
    found = _HEADS.read(raw)
    for key, field in (("head_dim", "latent.rope_dim"), ("qk_head_dim", "attention.head_dim")):
        stated = raw.get(key)
        if stated is not None and stated != found[field]:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} is {stated!r:.40}, but qk_rope_head_dim and qk_nope_head_dim make it {found[field]}; correct it"
            )
    heads, groups = found["attention.heads"], raw.get("num_key_value_heads")
    if groups not in (None, heads):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: num_key_value_heads is {groups!r:.40}, and num_attention_heads {heads}; expected the same"
        )
    need_size({"q_lora_rank": 1536, **raw}, "q_lora_rank")
    return found


def _read_width(raw: Raw) -> Fields:
    width = need_size(raw, "ffn_hidden_size", 12288)
    return {"mlp.ffn": width, "experts.shared_ffn": width}


def _read_scale(raw: Raw) -> Fields:
    return {"experts.scale": need_positive(raw, "routed_scaling_factor", 6.0)}


_BODY = body_keys(positions=131072, epsilon=1e-5, rotation=rope(1e7), tokens=(1, 2, None))
_KEYS = (
    *without_keys(_BODY, "num_hidden_layers", "intermediate_size"),
    Keys((_NUM, _TOTAL), _read_layers, lambda config: {_NUM: config.layer_count // 2}),
    Keys(_HEADS.names, _read_heads, _HEADS.write),
    Keys(("ffn_hidden_size",), _read_width, lambda config: {"ffn_hidden_size": config.mlp.ffn}),
    size("n_routed_experts", "experts.count", 512),
    size("moe_topk", "experts.per_token", 12),
    size("expert_ffn_hidden_size", "experts.ffn", 2048),
    count("zero_expert_num", "experts.zero", 256),
    Keys(("routed_scaling_factor",), _read_scale, lambda config: {"routed_scaling_factor": config.experts.scale or 1.0}),
)  # fmt: skip
_FIXED = {
    **LLAMA_LIKE,
    **LATENT_NORMS,
    "latent.scaled": True,
    "experts.router_bias": True,
    "experts.renormalize": False,
    "experts.joins_late": True,
}
_ONLY = {
    **SILU,
    "attention_bias": False,
    "attention_method": "MLA",
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "norm_topk_prob": False,
    "router_bias": False,
    "zero_expert_type": "identity",
}
_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_experts_per_tok": "moe_topk",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
}


def _with_stored_idle(config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> ModelConfig:
    """The model with the matrices of experts that compute nothing, if the files hold them."""
    first = f"layers.0.mlp.experts.{config.experts.count}.gate_proj.weight"
    stores = any(name.endswith(first) for name in tensors)
    return changed(config, {"experts.stores_idle": stores})


FAMILY = Family(
    name="longcat_flash",
    architectures=("LongcatFlashForCausalLM",),
    model_type="longcat_flash",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    aliases=_ALIASES,
    ignored=ROPE_FREQUENCIES,
    left_out=MTP_LEFT_OUT,
    features=("mla", "q_latent"),
    complete=_with_stored_idle,
    recognized=None,
    proven="names",
)
