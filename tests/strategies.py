"""Random models and layouts for property tests: small, and with every feature that the tables know."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from megaconv.families import families
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, from_fields, one_or_each, per_layer
from megaconv.model.layout import Layout
from megaconv.model.naming import HF, LEGACY, META, NAMINGS, Naming
from megaconv.model.pattern import layer_fields
from megaconv.model.table import expressible

Draw = st.DrawFn


def has_experts(family: str) -> bool:
    return any(row.of_experts for row in families()[family].rows)


def has_indexer(family: str) -> bool:
    return "indexer" in families()[family].features


def stores_experts(naming: Naming) -> bool:
    """True for a naming scheme that is about the storage of experts."""
    return any(variant.endswith(("grouped", "stacked")) for variant in naming.variants)


FEATURES = {
    "qkv_bias": "attention.qkv_bias",
    "o_bias": "attention.o_bias",
    "mlp_bias": "mlp.bias",
    "qk_norm": "attention.qk_norm",
    "shared_gate": "experts.shared_gate",
    "router_bias": "experts.router_bias",
}
"""The names of features in the rows of tables -> the fields of the configuration."""

SPELLED = [
    (family, naming)
    for family, table in sorted(families().items())
    for naming in NAMINGS
    if expressible(table.rows, naming)
    and (has_experts(family) or not stores_experts(naming))
    and (has_indexer(family) or "rope_last" not in naming.variants)
]
"""(family, naming) for all that can be said."""


def has_latent_attention(family: str) -> bool:
    return "mla" in families()[family].features


def has_linear_attention(family: str) -> bool:
    return any("linear" in (row.when or "").split() for row in families()[family].rows)


def has_mamba(family: str) -> bool:
    return any("mamba" in (row.when or "").split() for row in families()[family].rows)


def has_convolutions(family: str) -> bool:
    return any("convolution" in (row.when or "").split() for row in families()[family].rows)


def has_layer_inputs(family: str) -> bool:
    return any("layer_inputs" in (row.when or "").split() for row in families()[family].rows)


def norms_all_heads(family: str) -> bool:
    """True if q and k are normed over all heads, so that ranks can't share a head."""
    return any(
        row.canonical.endswith("attn.{q|k}_norm.weight") and row.tp == 0
        for row in families()[family].rows
    )


def has_mtp(family: str) -> bool:
    return any(row.stage == "mtp" for row in families()[family].rows)


def speaks_of(family: str, naming: Naming, feature: str) -> bool:
    """True if a naming scheme can represent all parts that a feature adds to a family."""
    rows = [row for row in families()[family].rows if feature in (row.when or "").split()]
    return all(row.spelling(naming) for row in rows)


@st.composite
def stage_splits(draw: Draw, layers: int, stages: int) -> tuple[int, ...]:
    """Any way to share layers out over stages; a stage may have none."""
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True))


@st.composite
def layouts(draw: Draw, layers: int, tp: int = 1, ep: int = 1, etp: int = 1) -> Layout:
    """Any pipeline layout of this many layers."""
    pp = draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    return Layout(tp, pp, vpp, ep, etp, stage_layers=draw(stage_splits(layers, pp * vpp)))


@st.composite
def layouts_apart(draw: Draw, config: ModelConfig, tp: int) -> Layout:
    """An encoder and its decoder on stages of their own."""
    ours, theirs = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    encoder = draw(stage_splits(config.encoder.layers, ours))
    stages = (0,) * ours + draw(stage_splits(config.layer_count, theirs))
    return Layout(tp, ours + theirs, stage_layers=stages, encoder_stage_layers=encoder)


@st.composite
def with_linear_attention(draw: Draw, config: ModelConfig, tp: int = 1) -> ModelConfig:
    """The model with a gated delta net in some layers, and attention in the others, gated as its family has it."""
    key_heads, layers = tp * draw(st.integers(1, 2)), config.layer_count
    gated = bool(families()[config.family].fixed.get("attention.output_gate"))
    return changed(
        config,
        {
            "layers.mixer": per_layer(
                draw(st.sets(st.integers(0, layers - 1), min_size=1)), layers, "linear", "attention"
            ),
            "linear.key_heads": key_heads,
            "linear.value_heads": key_heads * draw(st.integers(1, 3)),
            "linear.key_dim": draw(st.integers(1, 3)),
            "linear.value_dim": draw(st.integers(1, 3)),
            "linear.conv": draw(st.integers(1, 4)),
            "attention.output_gate": gated,
            "attention.qk_norm": True,
            "norm.zero_centered": gated,
        },
    )


@st.composite
def with_convolutions(draw: Draw, config: ModelConfig, tp: int = 1) -> ModelConfig:
    """The model with a short convolution in some layers. Its channels are as many as the hidden states are wide."""
    layers = draw(st.sets(st.integers(0, config.layer_count - 1), min_size=1))
    mixers = per_layer(layers, config.layer_count, "convolution", "attention")
    width = draw(st.integers(1, 4))
    hidden = config.hidden * tp
    return changed(config, {"layers.mixer": mixers, "convolution.width": width, "hidden": hidden})


def hybrid_fields(
    pattern: str, groups: int = 2, experts: int = 4, width: int = 4, latent: int = 0
) -> dict[str, Any]:
    """The fields of a Nemotron-H with these layers. width: of its experts. latent: the width of a projection before
    them."""
    mamba = {
        "mamba.heads": 2 * groups,
        "mamba.head_dim": 3,
        "mamba.groups": groups,
        "mamba.state": 5,
    }
    widths = {
        "experts.count": experts,
        "experts.ffn": width,
        "experts.shared_ffn": width,
        "experts.latent": latent,
    }
    # Of one expert alone the weight is none to be divided by the sum.
    chosen = {"experts.per_token": min(2, experts), "experts.renormalize": experts > 1}
    groups_of_all = {"experts.scale": 1.0, "experts.groups": 1, "experts.group_topk": 1}
    routed = {
        **widths,
        **chosen,
        **groups_of_all,
        "experts.router_bias": True,
        "experts.score": "sigmoid",
    }
    others = {**families()["nemotron_h"].fixed, **dict.fromkeys(BIASES_AND_NORMS, False)}
    return {
        **layer_fields(pattern, "the test"),
        **others,
        **mamba,
        **(routed if "E" in pattern else {}),
    }


MIXED_LAYERS = ("bamba", "granite_moe_hybrid")
"""Families with layers of a Mamba 2 or attention, and an MLP. Megatron has words for them as two layers each."""
ONE_NORM = (
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cohere_compass_text",
    "falcon",
    "gptj",
    "phi",
)
"""Families whose attention and MLP read the output of one norm."""
OTHER_NORMS = (
    "bitnet",
    "flex_olmo",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "nanochat",
    "olmo",
    "persimmon",
)
"""Families whose norms have no weights, or follow rope or experts, or have biases on q and k."""
OTHER_POSITIONS = ("biogpt", "bloom", "ctrl", "gpt_neo", "mpt", "openai_gpt", "opt", "xglm")
"""Families with ALiBi, or with learned positions beside windows or after unused rows."""
OF_GRANITE = ("granite_moe", "granite_moe_shared", "granite_moe_swa", "granite_swa")
OTHERS = (
    "afmoe",
    "aria_text",
    "axk1",
    "beam",
    "dbrx",
    "diffllama",
    "flint",
    "gpt_bigcode",
    "gpt_neox_japanese",
    "kolibri1",
    "minicpm3",
    "mistral4",
)
OTHER_LAYERS = (*ONE_NORM, *OTHER_NORMS, *OTHER_POSITIONS, *OF_GRANITE, *OTHERS)
OTHER_MIXERS = (
    "falcon_h1",
    "kimi_linear",
    "gemma4_text",
    "gemma4_unified_text",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mimo_v2_flash",
    "modernbert_decoder",
    "nemotron_nas",
    "olmo_hybrid",
    "step3p5",
)
"""Families with mixers that Megatron core lacks, or that it has only with other norms."""
OTHER_MLPS = ("apertus", "apertus1p5_text")
"""Families with MLPs that Megatron core lacks."""
OF_BART = ("bart", "m2m_100", "marian", "mbart", "pegasus")
OF_T5 = ("mt5", "umt5")
"""Families with an encoder and a decoder, beside T5 itself."""
BETWEEN_FILES = (
    *OF_BART,
    *OF_T5,
    "roberta",
    "bailing_hybrid",
    "ernie4_5_vl_moe_text",
    "deepseek_v4",
    *(
        "kimi_k3",
        "gemma3n_text",
        "minimax_m3_vl_text",
    ),
    *(
        "axk2",
        "mistral_large4_text",
        "hy_v4",
        "hy_v4_vl_text",
        "qwen4_exp_text",
        "glm5_next_text",
        "hrm_text",
        "minimax",
        "jetmoe",
        "longcat_flash",
        "phimoe",
        "mamba",
        "falcon_mamba",
        "jamba",
        "recurrent_gemma",
        "doge",
        "zamba",
        "zamba2",
        "zaya",
        "dory",
        "inkling_text",
        "muse_glimmer_text",
        "muse_spark_text",
    ),
)
"""Families without names in Megatron's formats. They are converted between Hugging Face's files, and not trained."""
BEYOND_MEGATRON = (
    *("baichuan", "granite_moe_hybrid", "molmo2_text"),
    *(*OTHER_MIXERS, *OTHER_MLPS, *OTHER_LAYERS, *BETWEEN_FILES),
)
"""Families whose models Megatron's arguments can't describe, or none of whose models Megatron's tests compute."""


COMPRESSED: dict[str, Any] = {
    "layers.entries": "selected",
    "layers.window": 5,
    "compressed.q_rank": 3,
    "compressed.out_groups": 2,
    "compressed.out_rank": 3,
    "compressed.short": 2,
    "compressed.long": 4,
    "compressed.index_heads": 2,
    "compressed.index_dim": 3,
    "compressed.topk": 1,
    "hyper.streams": 2,
    "hyper.iterations": 3,
    "hyper.epsilon": 1e-6,
}
"""The fields of a DeepSeek V4."""


OF_QWEN_4: dict[str, Any] = {
    "layers.indexed": True,
    "layers.ngram_rows": 7,
    "block_indexer.heads": 2,
    "block_indexer.head_dim": 3,
    "block_indexer.block": 4,
    "block_indexer.topk": 1,
    "block_indexer.pooled": True,
    "hyper.streams": 2,
    "hyper.rank": 3,
    "ngrams.size": 3,
    "ngrams.heads": 2,
    "ngrams.width": 8,
    "ngrams.conv": 4,
    "ngrams.parts": 3,
    "ngrams.stored_hashes": True,
}
"""The fields of a Qwen4-Exp."""


def own_fields(family: str) -> dict[str, Any]:
    """The fields of a family that Megatron's arguments can't describe."""
    inputs = {"layer_inputs.width": 3, "layer_inputs.vocab": 24, "streams.laurel_rank": 2}
    inputs = inputs if has_layer_inputs(family) else {}
    if family == "minimax_m3_vl_text":
        inputs = {
            "layers.indexed": True,
            "block_indexer.heads": 2,
            "block_indexer.head_dim": 3,
            "block_indexer.block": 4,
            "block_indexer.topk": 1,
        }
    if family == "deepseek_v4":
        inputs = COMPRESSED
    if family == "glm5_next_text":
        inputs = {"hyper.streams": 2, "indexer.pool": 2}
    if family in ("hy_v4", "hy_v4_vl_text"):
        inputs = {"hyper.streams": 2, "experts.clamp": 7.0}
    if family == "qwen4_exp_text":
        inputs = OF_QWEN_4
    if family in ("mamba", "falcon_mamba", "jamba"):
        sizes = {"width": 8, "state": 3, "conv": 4, "rank": 2}
        inputs = {f"mamba1.{name}": size for name, size in sizes.items()}
    if family == "recurrent_gemma":
        inputs = {"recurrent.head_dim": 3, "recurrent.conv": 4}
    if family == "zamba2":
        inputs = {"layers.block": True, "blocks.count": 2, "blocks.adapter_rank": 3}
        inputs |= {f"mamba.{name}": 2 for name in ("heads", "head_dim", "groups", "state")}
    if family == "doge":
        inputs = {"attention.kept_keys": 7}
    if family == "zamba":
        sizes = {"width": 8, "state": 3, "conv": 4, "rank": 2, "heads": 2}
        inputs = {f"mamba1.{name}": size for name, size in sizes.items()}
        inputs |= {"layers.block": True, "blocks.count": 1}
    if family == "inkling_text":
        sizes = {"relative.width": 2, "relative.extent": 3, "sublayer_conv": 2}
        inputs = {**sizes, "experts.scored_shared": 2}
    if family == "dory":
        inputs = {"loops.runs": 2, "unit_states.unit": 0.5, "unit_states.rate": 0.1}
    if family == "zaya":
        inputs = {"convolved.channels": 3, "convolved.heads": 2, "experts.router_width": 5}
        inputs |= {"attention.kv_heads": 2}
    if family == "hrm_text":
        inputs = {"recurrence.high": 2, "recurrence.low": 1}
    if family == "muse_spark_text":
        inputs = {"experts.latent": 4, "residual_temperature": 0.3}
    if family == "jetmoe":
        inputs = {"attention.of_experts": True, "experts.output_bias": True}
    if family == "longcat_flash":
        inputs = {"experts.zero": 2, "experts.joins_late": True, "latent.scaled": True}
        inputs["experts.stores_idle"] = True
    if family in ("apertus1p5_text", "molmo2_text"):
        inputs = {"head.unpredicted": 2}
    gates = {"norm.gate_rank": 2} if family == "axk2" else {}
    of_images = {"experts.vision_ffn": 4} if family == "ernie4_5_vl_moe_text" else {}
    own = {**families()[family].fixed, **inputs, **gates, **of_images}
    return own if family in BEYOND_MEGATRON else {}


@st.composite
def mixed_layers(draw: Draw, config: ModelConfig, tp: int, ep: int, etp: int) -> dict[str, Any]:
    """The fields of layers with Mamba 2 or attention, and an MLP or experts. At least one layer has Mamba 2."""
    some = st.sampled_from(("mamba", "attention"))
    mixers = ["mamba", *(draw(some) for _ in range(config.layer_count - 1))]
    groups = tp * draw(st.integers(1, 2))
    mamba = {
        "mamba.heads": 2 * groups,
        "mamba.head_dim": config.hidden,  # config.json has the width as a multiple of the hidden size
        "mamba.groups": groups,
        "mamba.state": 5,
    }
    count = ep * draw(st.integers(1, 3)) if config.family == "granite_moe_hybrid" else 0
    width = tp * etp * 2
    experts = {
        "layers.mlp": "experts",
        "experts.count": count,
        "experts.per_token": 1,
        "experts.ffn": width,
        "experts.shared_ffn": width,
    }
    plain = {"attention.qk_norm": False, "mlp.bias": False, "norm.zero_centered": False}
    layers = {"layers.mixer": one_or_each(tuple(mixers)), "layers.mlp": "dense"}
    if config.family == "bamba":
        layers = in_two_parts(mixers)
    return {**layers, **mamba, **plain, "mlp.gated": True, **(experts if count else {})}


def in_two_parts(mixers: Sequence[str]) -> dict[str, Any]:
    """The fields of a Bamba with these mixers. Each mixer is followed by an MLP as a separate layer."""
    return {
        "layers.count": 2 * len(mixers),
        "layers.mixer": tuple(part for mixer in mixers for part in (mixer, "none")),
        "layers.mlp": ("none", "dense") * len(mixers),
        "norm.epsilon": 1e-5,  # Megatron's, inside a Mamba 2
    }


BIASES_AND_NORMS = ("attention.qkv_bias", "attention.o_bias", "mlp.bias", "attention.qk_norm")


@st.composite
def with_mamba(
    draw: Draw, config: ModelConfig, tp: int = 1, ep: int = 1, etp: int = 1
) -> ModelConfig:
    """The model as a hybrid, of which one layer at least is a Mamba 2 and one is not; or as a pure Mamba 2."""
    if config.family in MIXED_LAYERS:
        return changed(config, draw(mixed_layers(config, tp, ep, etp)))
    if config.family == "mamba2":
        return changed(config, pure_mamba_fields(config, tp * draw(st.integers(1, 2))))
    others = draw(st.text("M*-E", min_size=config.layer_count - 1, max_size=config.layer_count - 1))
    sizes = {
        "groups": tp * draw(st.integers(1, 2)),
        "experts": ep * draw(st.integers(1, 3)),
        "width": tp * etp * 2,
        "latent": draw(st.sampled_from((0, 3))),
    }
    return changed(config, hybrid_fields("M" + (others.strip("M") or "-"), **sizes))


def pure_mamba_fields(config: ModelConfig, groups: int) -> dict[str, Any]:
    """The fields of a pure Mamba 2. The sizes of missing parts follow from the others."""
    heads = 2 * groups
    lacking = {
        "attention.heads": heads, "attention.kv_heads": heads, "attention.head_dim": config.hidden, "mlp.ffn": 4 * config.hidden,
        "positions.theta": 10000.0, "positions.scaling": None,
    }  # fmt: skip
    return {
        **families()["mamba2"].fixed, **lacking, **dict.fromkeys(BIASES_AND_NORMS, False), "mamba.heads": heads,
        "mamba.head_dim": config.hidden, "mamba.groups": groups, "mamba.state": 5,
    }  # fmt: skip


BERT_HEADS = (
    {"head.activation": "gelu"},
    {"head.activation": "gelu", "head.binary": True},
    {"head.classes": 3, "tie_embeddings": False},
    {"head.choices": True, "tie_embeddings": False},
)


@st.composite
def retrieval_fields(draw: Draw) -> dict[str, Any]:
    """The fields of a Retro: its layers, the encoder's, and what its GPT is."""
    flags = {name: draw(st.booleans()) for name in ("mlp.gated", "norm.final")}
    return {
        "layers.count": draw(st.integers(6, 18)),
        "retrieval.layers": draw(st.integers(1, 3)),
        "retrieval.chunk": 4,
        "retrieval.neighbors": 2,
        "retrieval.chunks": 2,
        "positions.kind": draw(st.sampled_from(("rope", "learned"))),
        "norm.kind": draw(st.sampled_from(("RMSNorm", "LayerNorm"))),
        **flags,
    }


@st.composite
def models(draw: Draw, family: str, naming: Naming, tp: int, ep: int, etp: int) -> ModelConfig:
    """A model that a naming can say, for `tp` ranks, `ep` times `etp` of its experts, to share."""
    layers, kv_heads = draw(st.integers(1, 5)), tp * draw(st.integers(1, 3))
    is_multi_head = family in ("gpt2", "bert", "roberta", "t5", *OF_BART, *OF_T5)
    heads = kv_heads * (1 if is_multi_head else draw(st.integers(1, 3)))
    if family == "deepseek_v4":
        heads *= COMPRESSED["compressed.out_groups"]
    if family == "codegen":
        heads, kv_heads = 4 * heads, 4 * kv_heads  # a fused tensor has four parts
    special = (
        has_latent_attention(family) or has_linear_attention(family) or norms_all_heads(family)
    ) or bool(families()[family].fixed.get("attention.output_gate"))
    shares_heads = naming.scheme == "core" and heads > kv_heads and not special
    if shares_heads and draw(st.booleans()):
        kv_heads = draw(
            st.sampled_from([size for size in (1, 2) if size <= tp and heads % size == 0])
        )
    config = from_fields(
        family,
        {
            "layers.count": layers,
            "hidden": (tp if naming == META else 1) * draw(st.integers(1, 9)),
            "attention.heads": heads,
            "attention.kv_heads": kv_heads,
            "attention.head_dim": 2 * draw(st.integers(1, 2)),
            "mlp.ffn": tp * draw(st.integers(1, 4)),
            "vocab": draw(st.integers(1 + own_fields(family).get("head.unpredicted", 0), 40)),
            "max_positions": draw(st.integers(1, 9)),
            "norm.epsilon": 1e-5,
            "positions.theta": 10000.0,
            "tie_embeddings": draw(st.booleans()),
            **{
                field: speaks_of(family, naming, name) and draw(st.booleans())
                for name, field in FEATURES.items()
            },
        },
    )
    if family == "retro":
        return changed(config, draw(retrieval_fields()))
    if family == "biencoder":
        towers = draw(st.sampled_from(("separate", "shared")))
        return changed(config, {"retriever.towers": towers, "retriever.projection": 3})
    if family == "bert":
        old = naming in (HF, LEGACY) and draw(st.booleans())
        return changed(
            config,
            {
                "norm.place": "after_sum" if old else "before",
                "token_types": draw(st.integers(0, 2)),
                **draw(st.sampled_from(BERT_HEADS)),
            },
        )
    if family == "t5":
        kinds = ("rope", "learned", "relative") if naming != LEGACY else ("rope", "learned")
        flags = {name: draw(st.booleans()) for name in ("mlp.gated", "norm.final", "head.bias")}
        sizes = {
            "encoder.layers": draw(st.integers(1, 4)),
            "positions.buckets": draw(st.integers(1, 8)),
        }
        norm = draw(st.sampled_from(("RMSNorm", "LayerNorm")))
        return changed(
            config,
            {"positions.kind": draw(st.sampled_from(kinds)), "norm.kind": norm, **flags, **sizes},
        )
    if family == "roberta":
        own = {"token_types": draw(st.integers(1, 2)), "head.pooler": draw(st.booleans())}
        return changed(config, {**families()[family].fixed, **own})
    if family in OF_BART:
        sizes = {name: draw(st.integers(1, 4)) for name in ("layers", "ffn", "heads")}
        own = {f"encoder.{name}": size for name, size in sizes.items()}
        flags = dict.fromkeys(FEATURES.values(), False)
        return changed(config, {**flags, **own, **families()[family].fixed})
    if family in OF_T5:
        sizes = {
            "encoder.layers": draw(st.integers(1, 4)),
            "positions.buckets": draw(st.integers(1, 8)),
        }
        flags = dict.fromkeys((*FEATURES.values(), "head.bias"), False)
        gated = {"mlp.gated": draw(st.booleans())}
        return changed(config, {**flags, **gated, **sizes, **families()[family].fixed})
    if has_convolutions(family):
        config = draw(with_convolutions(config, tp))
    if has_linear_attention(family):
        config = draw(with_linear_attention(config, tp))
    if has_mamba(family):
        return draw(with_mamba(config, tp, ep, etp))
    config = changed(config, own_fields(family))
    if not has_experts(family):
        return config
    if has_latent_attention(family):
        latent = {
            name: tp * draw(st.integers(1, 2)) for name in ("latent.kv_rank", "latent.rope_dim")
        }
        q_rank = tp * draw(st.integers(0 if family == "deepseek_v2" else 1, 2))
        if has_indexer(family):
            latent["latent.rope_dim"] *= (
                2  # half of an indexer's elements rotate with the other half
            )
            latent |= {"indexer.heads": draw(st.integers(1, 3)), "indexer.topk": 1}
            latent["indexer.head_dim"] = latent["latent.rope_dim"] + draw(st.integers(0, 2))
        head_dim = latent["latent.rope_dim"] + draw(st.integers(1, 3))
        config = changed(
            config,
            {
                "attention.heads": kv_heads,
                "attention.head_dim": head_dim,
                "latent.v_dim": draw(st.integers(1, 3)),
                "latent.q_rank": q_rank,
                **latent,
            },
        )
    if has_mtp(family):
        # Files of these families hold one MTP layer, under a name without a number.
        most = 1 if family in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "mimo") else 2
        config = changed(
            config, {"hidden": tp * config.hidden, "mtp_layers": draw(st.integers(0, most))}
        )
    return changed(
        config,
        {
            "experts.count": ep * draw(st.integers(1, 3)),
            "experts.per_token": 1,
            "experts.ffn": etp * draw(st.integers(1, 4)),
            "layers.mlp": per_layer(
                draw(st.sets(st.integers(0, layers - 1))), layers, "dense", "experts"
            ),
            "experts.shared_ffn": tp * draw(st.integers(0, 3)),
        },
    )


@st.composite
def sharded_models(draw: Draw) -> tuple[ModelConfig, Naming, Layout]:
    """A model, a naming that can say it, and a layout that it can be cut to."""
    family, naming = draw(st.sampled_from(SPELLED))
    tp, ep = (
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((1, 2, 3))) if has_experts(family) else 1,
    )
    etp = (
        draw(st.sampled_from([size for size in (1, 2, 4) if size <= tp]))
        if has_experts(family)
        else 1
    )
    config = draw(models(family, naming, tp, ep, etp))
    if config.encoder.layers and naming.scheme in ("core", "legacy") and draw(st.booleans()):
        return config, naming, draw(layouts_apart(config, tp))
    if config.retrieval.layers:
        return config, naming, Layout(tp, stage_layers=(config.layer_count,))
    return config, naming, draw(layouts(config.layer_count, tp, ep, etp))
