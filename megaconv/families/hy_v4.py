"""Hunyuan V4: sparse latent attention with gates and sinks, and residual streams that each sublayer reads and writes.

    hf    model.layers.{l}.{input_layernorm, self_attn, hc_attn_layer, post_attention_layernorm, mlp, hc_mlp_layer}, model.hc_head

This form is that of the published files. transformers' class has other names, and its save_pretrained makes a mixture of
both; megaconv reads all three. Some layers have no indexer, and attend to the positions that an earlier one selected. Only
routed experts limit their activations. Megatron core has no such layers: these models are converted between Hugging
Face's files. Layers for multi-token prediction are left out. Source: HYV4Config, modeling_hy_v4.py and
conversion_mapping.py of transformers 5.23, and the names and shapes of the published files as public projects list them.
"""

import re
from collections.abc import Collection, Mapping

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.hyper_connections import HYPER_KEYS, hyper_connections
from megaconv.families.parts.indexer import indexer_keys, sparse_attention
from megaconv.families.parts.indexer_types import indexer_types, indexers_where_owned
from megaconv.families.parts.keys import (
    Keys,
    Raw,
    number,
    only_in_files,
)
from megaconv.families.parts.latent_attention import LATENT_NORMS, latent_heads
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.row_changes import hf_only, in_all_forms
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row, Spelling, Stacked

_LAYER = "model.layers.{l}."
_ATTENTION, _EXPERTS = _LAYER + "self_attn.", _LAYER + "mlp.experts."
_GATE_AND_SINKS = (
    Row("layers.{l}.attn.gate.weight", ("heads*v_dim hidden",), tp=0, when="output_gate",
        hf=_ATTENTION + "linear_gate.weight"),
    Row("layers.{l}.attn.sinks", ("heads",), tp=0, when="sinks",
        hf=_ATTENTION + "learnable_sink_param"),
)  # fmt: skip
_STACKED: dict[str, Spelling] = {
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": Stacked(_EXPERTS + "gate_up_proj"),
    "layers.{l}.mlp.experts.{e}.down.weight": Stacked(_EXPERTS + "down_proj"),
}
"""transformers reads no other form of this architecture's experts."""


_LATENT = indexers_where_owned(sparse_attention(halves=True))
_STREAMS = hyper_connections(
    (
        _LAYER + "hc_attn_layer.hc_pre.hc_",
        _LAYER + "hc_mlp_layer.hc_pre.hc_",
        "model.hc_head.hc_head_",
    ),
    scales=2,
)
ROWS = hf_only(
    in_all_forms(
        (EMBEDDING, *_LATENT, *_GATE_AND_SINKS, *DEEPSEEK_MLPS, *_STREAMS, *HEAD), _STACKED
    )
)

_PUBLISHED = (
    # what save_pretrained writes: its renamings, read backwards, also fit other names
    (r"(model\.layers\.\d+\.)hc_pre\.(hc_attn_layer|hc_mlp_layer)\.", r"\1\2.hc_pre."),
    (r"model\.hc_pre\.hc_head\.", "model.hc_head."),
    (r"model\.hc_head\.hc_pre\.", "model.hc_head."),
    (r"(model\.layers\.\d+\.mlp\.(?:shared_experts\.)?)linear_gate\.", r"\1gate_proj."),
    # the names of transformers' class
    (r"(model\.layers\.\d+\.)attn_hc\.", r"\1hc_attn_layer.hc_pre.hc_"),
    (r"(model\.layers\.\d+\.)ffn_hc\.", r"\1hc_mlp_layer.hc_pre.hc_"),
    (r"model\.hc_head\.hc_(fn|base|scale)$", r"model.hc_head.hc_head_\1"),
    (r"(model\.layers\.\d+\.self_attn\.)gate_proj\.", r"\1linear_gate."),
    (r"(model\.layers\.\d+\.self_attn\.)sinks$", r"\1learnable_sink_param"),
)
"""(pattern of another name, what replaces it)."""


def _published_names(names: Collection[str]) -> Mapping[str, str]:
    """The published names of tensors in files of transformers."""
    found = {}
    for name in names:
        published = name
        for pattern, new in _PUBLISHED:
            published = re.sub(f"^{pattern}", new, published)
        if published != name:
            found[name] = published
    return found


def _usual_types(raw: Raw, layers: int) -> list[str]:
    """The first layer has an indexer, and so has every fourth one from the second on."""
    return ["shared" if layer and (layer - 1) % 4 else "full" for layer in range(layers)]


_MTP = "num_nextn_predict_layers"


_OF_PUBLISHED: Raw = {
    "enable_ihc": True, "gated_mla": True, "gating_type": "elementwise", "learnable_sink": True, "use_dsa": True, "use_mla": True,
}  # fmt: skip
"""Keys of the publisher's own class, which published files have -> the values that transformers' class computes."""


def _write_mtp(config: ModelConfig) -> Raw:
    return {_MTP: 0}


_STREAM_KEYS = tuple(keys for keys in HYPER_KEYS if "hc_sinkhorn_iters" not in keys.names)
_KEYS = (
    *body_keys(positions=262144, ffn=6912, epsilon=1e-5, tokens=(120000, 120025, 120002)),
    latent_heads(kv_rank=512, q_rank=1536, rope=64, nope=192, v=256),
    *routed_experts(count=256, width=768),
    shared_experts(count=1, width=768),
    mlp_layer_types(dense=1),
    *sigmoid_routing(scale=2.827, groups=1, group_topk=1),
    *indexer_keys(heads=16),
    indexer_types(_usual_types),
    *_STREAM_KEYS,
    number("hc_magnitude", "hyper.magnitude", 2.0),
    number("swiglu_limit", "experts.clamp", 10.0),
    only_in_files(_OF_PUBLISHED),
    Keys((_MTP,), lambda raw: {}, _write_mtp),
)
_FIXED = {
    **LLAMA_LIKE,
    **SIGMOID_ROUTER,
    **LATENT_NORMS,
    "latent.halves": True,
    "indexer.rotates_last": True,
    "attention.output_gate": True,
    "attention.sinks": True,
    "hyper.mixes": False,
}

FAMILY = Family(
    name="hy_v4",
    architectures=("HYV4ForCausalLM",),
    model_type="hy_v4",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "attention_bias": False},
    aliases={"num_local_experts": "n_routed_experts"},
    left_out=MTP_LEFT_OUT,
    features=("mla", "q_latent", "indexer"),
    other_names=_published_names,
    recognized=None,
    proven="names",
)
