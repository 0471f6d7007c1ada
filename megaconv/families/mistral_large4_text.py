"""The language model of Mistral Large 4: sparse latent attention as in GLM-5, with queries that are projected directly.

    hf            layers.{l}.{attention_norm, attention, ffn_norm, feed_forward, gate, experts, shared_experts}, embed_tokens
    hf_separate   the same in published files, with tok_embeddings, lerope.alpha, output, and other names of some matrices
    hf_stacked    model.layers.{l}.{input_layernorm, self_attn, post_attention_layernorm, mlp}, model.rotary_emb.alpha

transformers has a class of the language model without a head. The first form is what it writes and reads. The other two
are those of whole models. Some layers have no rope, and some take the latent keys and values of an earlier layer, or the
positions that an earlier indexer selected. Megatron core has no such layers: these models are converted between Hugging
Face's files. Source: MistralLarge4TextConfig, modeling_mistral_large4.py and conversion_mapping.py of transformers 5.23.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import HEAD, MLP
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_SHARED,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS
from megaconv.families.parts.headless import EMBEDDING_ALONE, tied_without
from megaconv.families.parts.indexer import indexer_keys
from megaconv.families.parts.indexer_types import types_by_pattern
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    need_size,
    number,
    require_each_layer,
)
from megaconv.families.parts.latent_attention import latent_heads, require_own_groups
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.rope import rope, rotating_layers
from megaconv.families.parts.row_changes import hf_only, respelled, without_biases
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Fused, Row, Spelling, Stacked

_FILE, _CLASS = "layers.{l}.", "model.layers.{l}."
_ATTENTION, _OF_CLASS = _FILE + "attention.", _CLASS + "self_attn."
_INDEXER, _INDEXER_OF_CLASS = _ATTENTION + "indexer.", _OF_CLASS + "indexer."
_MLP = _CLASS + "mlp."
_NORM: dict[str, Spelling] = {
    "hf": _FILE + "ffn_norm.weight",
    "hf_stacked": _CLASS + "post_attention_layernorm.weight",
}
_NAMES: dict[str, dict[str, Spelling]] = {
    "embed.weight": {
        "hf": "embed_tokens.weight",
        "hf_separate": "tok_embeddings.weight",
        "hf_stacked": "model.embed_tokens.weight",
    },
    "final_norm.weight": {"hf": "norm.weight", "hf_stacked": "model.norm.weight"},
    "head.weight": {"hf": "lm_head.weight", "hf_separate": "output.weight"},
    "layers.{l}.mlp_norm.weight": _NORM,
    "layers.{l}.mlp.{gate|up}.weight": {
        "hf": _FILE + "feed_forward.{gate|up}_proj.weight",
        "hf_separate": _FILE + "feed_forward.{w1|w3}.weight",
        "hf_stacked": _MLP + "{gate|up}_proj.weight",
    },
    "layers.{l}.mlp.down.weight": {
        "hf": _FILE + "feed_forward.down_proj.weight",
        "hf_separate": _FILE + "feed_forward.w2.weight",
        "hf_stacked": _MLP + "down_proj.weight",
    },
    "layers.{l}.mlp.router.weight": {"hf": _FILE + "gate.weight", "hf_stacked": _MLP + "gate.weight"},
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": {
        "hf": _FILE + "experts.{e}.{w1|w3}.weight",
        "hf_stacked": Stacked(_MLP + "experts.gate_up_proj"),
    },
    "layers.{l}.mlp.experts.{e}.down.weight": {
        "hf": _FILE + "experts.{e}.w2.weight",
        "hf_stacked": Stacked(_MLP + "experts.down_proj"),
    },
    "layers.{l}.mlp.shared.{gate|up}.weight": {
        "hf": _FILE + "shared_experts.{gate|up}_proj.weight",
        "hf_separate": _FILE + "shared_experts.{w1|w3}.weight",
        "hf_stacked": _MLP + "shared_experts.{gate|up}_proj.weight",
    },
    "layers.{l}.mlp.shared.down.weight": {
        "hf": _FILE + "shared_experts.down_proj.weight",
        "hf_separate": _FILE + "shared_experts.w2.weight",
        "hf_stacked": _MLP + "shared_experts.down_proj.weight",
    },
}  # fmt: skip
_WHEN_ROTATING, _WHEN_STILL = "rotating", "!rotating"
_VALUES = "heads*v_dim kv_rank"


def _latent_rows(when: str, down: str, keys: str) -> tuple[Row, ...]:
    """The projections to latent keys and values and back, in layers of one kind. down, keys: shapes."""
    return (
        Row("layers.{l}.attn.kv_down.weight", (down,), when=f"own_latent {when}",
            hf=_ATTENTION + "wkv_a_with_mqa.weight",
            hf_stacked=_OF_CLASS + "kv_a_proj_with_mqa.weight"),
        Row("layers.{l}.attn.{k|v}_up.weight", (keys, _VALUES), tp=0, when=when,
            hf=Fused(_ATTENTION + "wkv_b.weight", groups="heads"),
            hf_stacked=Fused(_OF_CLASS + "kv_b_proj.weight", groups="heads")),
    )  # fmt: skip


_ROWS_OF_ATTENTION = (
    Row("rope.alpha", ("rope_pairs",), stage="first", when="scaled_frequencies",
        hf="rotary_emb.alpha",
        hf_separate="lerope.alpha",
        hf_stacked="model.rotary_emb.alpha"),
    Row("layers.{l}.input_norm.weight", ("hidden",),
        hf=_FILE + "attention_norm.weight",
        hf_stacked=_CLASS + "input_layernorm.weight"),
    Row("layers.{l}.attn.q.weight", ("heads*head_dim hidden",), tp=0,
        hf=_ATTENTION + "wq.weight",
        hf_stacked=_OF_CLASS + "q_proj.weight"),
    Row("layers.{l}.attn.q_growth.{scale|bias}", ("heads", "heads"), tp=0, when="growing_queries",
        hf=_ATTENTION + "ssmax_scaling.{s|b}",
        hf_stacked=_OF_CLASS + "softmax_scaling.{scale|bias}"),
    *_latent_rows(_WHEN_ROTATING, "kv_and_rope hidden", "heads*nope_dim kv_rank"),
    *_latent_rows(_WHEN_STILL, "kv_rank hidden", "heads*head_dim kv_rank"),
    Row("layers.{l}.attn.kv_latent_norm.weight", ("kv_rank",), when="own_latent",
        hf=_ATTENTION + "kv_a_norm.weight",
        hf_stacked=_OF_CLASS + "kv_a_layernorm.weight"),
    Row("layers.{l}.attn.o.weight", ("hidden heads*v_dim",), tp=1,
        hf=_ATTENTION + "o_proj.weight",
        hf_separate=_ATTENTION + "wo.weight",
        hf_stacked=_OF_CLASS + "o_proj.weight"),
    Row("layers.{l}.attn.indexer.q_norm.{weight|bias}", ("hidden", "hidden"), when="own_index",
        hf=_INDEXER + "q_input_norm.{weight|bias}",
        hf_stacked=_INDEXER_OF_CLASS + "q_input_norm.{weight|bias}"),
    Row("layers.{l}.attn.indexer.q.weight", ("index_heads*index_dim hidden",), when="own_index",
        hf=_INDEXER + "wq_b.weight",
        hf_stacked=_INDEXER_OF_CLASS + "wq_b.weight"),
    Row("layers.{l}.attn.indexer.q_growth.{scale|bias}", ("index_heads", "index_heads"), when="own_index growing_queries",
        hf=_INDEXER + "ssmax_scaling.{s|b}",
        hf_stacked=_INDEXER_OF_CLASS + "softmax_scaling.{scale|bias}"),
    Row("layers.{l}.attn.indexer.k.weight", ("index_dim hidden",), when="own_index",
        hf=_INDEXER + "wk.weight",
        hf_stacked=_INDEXER_OF_CLASS + "wk.weight"),
    Row("layers.{l}.attn.indexer.k_norm.{weight|bias}", ("index_dim", "index_dim"), when="own_index",
        hf=_INDEXER + "k_norm.{weight|bias}",
        hf_stacked=_INDEXER_OF_CLASS + "k_norm.{weight|bias}"),
    Row("layers.{l}.attn.indexer.scale.weight", ("index_heads hidden",), when="own_index",
        hf=_INDEXER + "weights_proj.weight",
        hf_stacked=_INDEXER_OF_CLASS + "weights_proj.weight"),
)  # fmt: skip
_MLPS = (*without_biases(MLP), MOE_NORM, *QWEN_EXPERTS, *DEEPSEEK_SHARED)
ROWS = hf_only(respelled((EMBEDDING_ALONE, *_ROWS_OF_ATTENTION, *_MLPS, *HEAD), _NAMES))

_LATENT = latent_heads(kv_rank=512, q_rank=0, rope=64, nope=64, v=128)
_Q_RANK = "q_lora_rank"


def _read_heads(raw: Raw) -> Fields:
    """The sizes of heads. Queries have no latent vector, whatever q_lora_rank says: the class doesn't read it."""
    require_own_groups(raw.get("num_key_value_heads", 64), raw.get("num_attention_heads"))
    return _LATENT.read({**raw, _Q_RANK: None})


def _write_heads(config: ModelConfig) -> Raw:
    return {key: value for key, value in _LATENT.write(config).items() if key != _Q_RANK}


_ROTATING, _STEP, _SOURCES = "no_rope_layers", "no_rope_layer_interval", "kv_source_layers"


def _read_layers(raw: Raw) -> Fields:
    """The layers that rotate, and those that take latent keys and values of an earlier layer."""
    layers = need_size(raw, "num_hidden_layers")
    rotates = tuple(bool(each) for each in rotating_layers(raw)[:layers])
    require_each_layer(_ROTATING, rotates, layers)
    stated = raw.get(_SOURCES)
    sources = list(range(layers)) if stated is None else stated
    require_each_layer(_SOURCES, sources, layers)
    _require_sources(sources, rotates)
    taken = (None if source == layer else source for layer, source in enumerate(sources))
    return {"layers.rotates": one_or_each(rotates), "layers.kv_source": one_or_each(tuple(taken))}


def _require_sources(sources: list[Any], rotates: tuple[bool, ...]) -> None:
    """Raise an error unless each layer takes what transformers gives it: the latent vectors of the last layer before it
    that gives them to others and rotates if it does."""
    for layer, source in enumerate(sources):
        if type(source) is not int or not 0 <= source <= layer or sources[source] != source:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {_SOURCES} gives layer {layer} the source {source!r}; expected the layer or an earlier one that is its own"
            )
    givers = {source for layer, source in enumerate(sources) if source != layer}
    last: dict[bool, int] = {}
    for layer, source in enumerate(sources):
        if layer in givers:
            last[rotates[layer]] = layer
        elif source != layer and last.get(rotates[layer]) != source:
            raise NotExpressible(
                f"{CONFIG_NAME}: {_SOURCES} gives layer {layer} the source {source}, but the last source that {_ROTATING} makes "
                f"like it is {last.get(rotates[layer])}, which is the one that transformers takes"
            )


def _write_layers(config: ModelConfig) -> Raw:
    kinds = config.layers
    sources = [layer if kind.kv_source is None else kind.kv_source for layer, kind in enumerate(kinds)]  # fmt: skip
    return {_ROTATING: [int(kind.rotates) for kind in kinds], _SOURCES: sources}


_YARN = {
    "rope_type": "yarn",
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
_ROUTING, _ = sigmoid_routing(scale=1.0, groups=1, group_topk=1)
_KEYS = (
    *body_keys(
        positions=1048576, ffn=24576, epsilon=1e-5, rotation=rope(1e4, _YARN), tokens=(1, 2, None)
    ),
    Keys(tuple(key for key in _LATENT.names if key != _Q_RANK), _read_heads, _write_heads),
    Keys((_ROTATING, _STEP, _SOURCES), _read_layers, _write_layers),
    *routed_experts(count=128, per_token=4, width=6144),
    shared_experts(count=1, width=6144),
    mlp_layer_types(dense=1, older="first_k_dense_replace"),
    _ROUTING,
    *indexer_keys(heads=32),
    types_by_pattern(),
    number("final_logit_softcapping", "head.logit_cap", 30.0),
)
_FIXED = {
    **LLAMA_LIKE,
    "indexer.interleaved": True,
    "indexer.from_hidden": True,
    "attention.growing": True,
    "positions.scaled_frequencies": True,
    "experts.score": "softmax",
    "experts.renormalize": True,
}

FAMILY = Family(
    name="mistral_large4_text",
    architectures=("MistralLarge4TextModel",),
    model_type="mistral_large4_text",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "attention_bias": False},
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    left_out=MTP_LEFT_OUT,
    complete=tied_without("lm_head.weight", "output.weight"),
    features=("mla", "indexer"),
    recognized=None,
    proven="names",
)
