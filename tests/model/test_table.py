"""Tables: every family in every naming, cut for any layout and joined again without a loss."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from formats.tensor import Shape, matrix_shape
from megaconv.errors import LayoutError, NotExpressible, TensorMismatch
from megaconv.families import families
from megaconv.families.parts.row_changes import respelled, with_norm_biases
from megaconv.megatron.states.names import core_order
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, fields_of, from_fields
from megaconv.model.layout import Chunk, Layout, padded_vocab
from megaconv.model.naming import (
    CORE,
    CORE_GROUPED,
    CORE_LEGACY_GROUPED,
    CORE_LOCAL,
    HF,
    LEGACY,
    META,
    NAMINGS,
    Naming,
)
from megaconv.model.natives import NativeTensor, Region, native_tensors
from megaconv.model.patterns import evaluate, expand
from megaconv.model.regions import PLAIN
from megaconv.model.spellings.halves import AsHalves
from megaconv.model.spellings.rotary_pairs import AsPairs
from megaconv.model.table import (
    Copied,
    Fused,
    PerHead,
    RopeLast,
    Row,
    SecondHalfFirst,
    Separate,
    canonical_shapes,
    expressible,
)
from tests.strategies import (
    BETWEEN_FILES,
    FEATURES,
    MIXED_LAYERS,
    OF_BART,
    OF_T5,
    SPELLED,
    has_experts,
    has_indexer,
    has_latent_attention,
    has_linear_attention,
    has_mamba,
    has_mtp,
    hybrid_fields,
    in_two_parts,
    own_fields,
    sharded_models,
    speaks_of,
)

Labels = dict[str, NDArray[np.int64]]
PADDING = -1

EVERYTHING = from_fields(
    "llama",
    {
        "layers.count": 2,
        "hidden": 6,
        "attention.heads": 4,
        "attention.kv_heads": 2,
        "attention.head_dim": 2,
        "mlp.ffn": 4,
        "vocab": 10,
        "max_positions": 8,
        "norm.epsilon": 1e-5,
        "positions.theta": 1e4,
        "attention.qkv_bias": True,
        "attention.o_bias": True,
        "mlp.bias": True,
        "attention.qk_norm": True,
        "attention.qk_norm_bias": True,
    },
)
"""A model that has every row of the dense tables."""


MIXED = {
    "layers.mixer": ("mamba", "attention"),
    "mamba.heads": 4,
    "mamba.head_dim": 3,
    "mamba.groups": 2,
    "mamba.state": 5,
}
"""Fields of layers that have a mixer and an MLP."""
SHARED_EXPERTS = {
    "layers.mlp": "experts",
    "experts.count": 4,
    "experts.per_token": 2,
    "experts.ffn": 2,
    "experts.shared_ffn": 4,
}


def everything(family: str, naming: Naming = CORE) -> ModelConfig:
    """A model that has every row of a family's table that a naming scheme can represent."""
    naming = HF if family in BETWEEN_FILES else naming
    dense = {name: field for name, field in FEATURES.items() if not field.startswith("experts.")}
    config = replace(
        changed(
            EVERYTHING, {field: speaks_of(family, naming, name) for name, field in dense.items()}
        ),
        family=family,
    )
    if family == "bert":
        heads = {"head.activation": "gelu", "head.binary": True}
        return changed(config, {"attention.kv_heads": 4, "token_types": 2, **heads})
    if family == "roberta":
        sizes = {"attention.kv_heads": 4, "token_types": 2, "positions.offset": 2}
        return changed(config, {**own_fields(family), **sizes, "head.pooler": True})
    if family == "retro":
        retrieval = {"layers": 2, "chunk": 4, "neighbors": 2, "chunks": 2}
        sizes = {f"retrieval.{name}": size for name, size in retrieval.items()}
        kinds = {"norm.kind": "LayerNorm", "positions.kind": "learned"}
        return changed(config, {"layers.count": 6, "attention.kv_heads": 4, **sizes, **kinds})
    if family == "biencoder":
        towers = {
            "retriever.towers": "separate",
            "retriever.projection": 6,
            "retriever.pooler": True,
        }
        return changed(config, {"attention.kv_heads": 4, "token_types": 2, **towers})
    if family in OF_BART:
        sizes = {"attention.kv_heads": 4, "encoder.layers": 3, "encoder.ffn": 5}
        return changed(config, {**own_fields(family), **sizes})
    if family in ("t5", *OF_T5):
        sizes = {"attention.kv_heads": 4, "encoder.layers": 3, "positions.buckets": 6}
        own = own_fields(family)
        return changed(config, {"norm.kind": "LayerNorm", "head.bias": True, **sizes, **own})
    if has_linear_attention(family):
        sizes = {
            "linear.key_heads": 2,
            "linear.value_heads": 4,
            "linear.key_dim": 3,
            "linear.value_dim": 2,
            "linear.conv": 4,
        }
        config = changed(config, {"layers.mixer": ("linear", "attention"), **sizes})
    if family == "bamba":
        return changed(config, MIXED | in_two_parts(("mamba", "attention")))
    if family in MIXED_LAYERS:
        return changed(config, MIXED | (SHARED_EXPERTS if has_experts(family) else {}))
    if has_mamba(family):
        return changed(config, hybrid_fields("M*-E", latent=3))
    config = changed(config, own_fields(family))
    if not has_experts(family) and not has_latent_attention(family):
        return config
    if has_latent_attention(family):
        config = changed(
            config,
            {
                "attention.kv_heads": 4,
                "attention.head_dim": 5,
                "latent.kv_rank": 4,
                "latent.q_rank": 2,
                "latent.rope_dim": 2,
                "latent.v_dim": 3,
            },
        )
    if has_indexer(family):
        config = changed(config, {"indexer.heads": 3, "indexer.head_dim": 5, "indexer.topk": 1})
    if not has_experts(family):
        return config
    config = changed(config, {"mtp_layers": int(has_mtp(family))})
    experts = {
        "experts.count": 4,
        "experts.per_token": 2,
        "experts.ffn": 2,
        "experts.shared_ffn": 4,
    }
    config = changed(config, {"layers.mlp": ("dense", "experts"), **experts})
    return changed(config, {"experts.shared_gate": True, "experts.router_bias": True})


def every_kind(family: str) -> list[ModelConfig]:
    """Models that together have every row of a family's table, where one can't have all."""
    config = everything(family)
    if family == "granite_moe_hybrid":
        return [config, changed(config, {"layers.mixer": "attention", "layers.mlp": "dense"})]
    if family == "laguna":
        return [
            config,
            changed(config, {"attention.head_gate": True, "attention.output_gate": True}),
        ]
    if "gemma3n" in family or "gemma4" in family:
        others = {"layers.shares_kv": (False, True)}, {"layers.keys_as_values": True}
        return [config, *(changed(config, other) for other in others)]
    if family == "mimo_v2_flash":
        return [changed(config, {"layers.window": 5})]
    if family == "molmo2_text":
        after = {"norm.place": "after", "attention.qk_norm_width": "all"}
        return [config, changed(config, after)]
    if family == "nemotron_nas":
        return [config, changed(config, {"layers.mixer": ("attention", "none")})]
    if family == "hyperclovax":
        return [config, changed(config, {"norm.place": "both"})]
    if family == "deepseek_v4":
        kinds = {"layers.entries": ("selected", "all"), "layers.hashed": (True, False)}
        kinds |= {"layers.mlp": "experts", "attention.kv_heads": 1}
        return [changed(config, kinds)]
    if family == "mistral_large4_text":
        return [config, changed(config, {"layers.rotates": (True, False)})]
    if family == "falcon_h1":
        biases = dict.fromkeys(("attention.qkv_bias", "attention.o_bias", "mlp.bias"), True)
        layers = {"layers.mixer": "side_by_side", "layers.mlp": "dense"}
        return [changed(config, layers | biases)]
    if family == "minimax":
        return [changed(config, {"layers.mixer": ("lightning", "attention")})]
    if family == "zaya":
        return [changed(config, {"head.bias": True, "layers.mlp": "experts"})]
    if family in ("phimoe", "modernbert_decoder"):
        return [changed(config, {"head.bias": True})]
    if family in ("mamba", "falcon_mamba"):
        return [changed(config, {"layers.mixer": "mamba1", "mamba1.bias": True})]
    if family == "recurrent_gemma":
        return [changed(config, {"layers.mixer": ("recurrent", "attention")})]
    if family == "zamba2":
        blocks = {"layers.block": (True, False) * 2, "blocks.count": 1, "blocks.adapter_rank": 3}
        blocks |= {"layers.mixer": "mamba", "blocks.attention_adapters": True}
        return [changed(config, blocks)]
    if family == "zamba":
        blocks = {"layers.block": (True, False), "blocks.count": 1, "mamba1.bias": True}
        blocks |= {"tie_embeddings": False}
        return [changed(config, blocks)]
    if family == "jamba":
        return [changed(config, {"layers.mixer": ("mamba1", "attention"), "mamba1.bias": True})]
    if family in ("bailing_hybrid", "glm5_next_text", "kimi_linear"):
        sizes = {"key_heads": 2, "value_heads": 2, "key_dim": 3, "value_dim": 3, "conv": 4}
        linear = {f"linear.{name}": size for name, size in sizes.items()}
        gates = {"attention.head_gate": family == "bailing_hybrid"}
        return [config, changed(config, {"layers.mixer": ("kda", "attention"), **linear, **gates})]
    if family == "kimi_k3":
        return kinds_of_kimi_k3(config)
    if family in ("lfm2", "lfm2_moe", "lfm3"):
        mixers = {"layers.mixer": ("convolution", "attention"), "convolution.width": 3}
        if family == "lfm3":
            mixers |= {"attention.head_gate": True, "norm.place": "both"}
        return [config, changed(config, mixers)]
    if family == "falcon":
        shared = {"parallel_residual": True, "norm.shared": True}
        orders = shared, {**shared, "norm.shared": False}
        return [config, *(changed(config, order) for order in orders)]
    if family == "bert":
        of_task = changed(
            config, {"head.activation": "", "head.binary": False, "tie_embeddings": False}
        )
        kinds = {"head.classes": 3}, {"head.choices": True}
        return [
            config,
            changed(config, {"norm.place": "after_sum"}),
            *(changed(of_task, kind) for kind in kinds),
        ]
    if family == "biencoder":
        shared = changed(config, {"retriever.towers": "shared"})
        kinds = config, shared
        return [*kinds, *(changed(kind, {"norm.place": "after_sum"}) for kind in kinds)]
    if family == "retro":
        return [
            replace(made, layers=made.layers[:1] * layers)
            for layers in (6, 16)
            for made in (config, changed(config, {"mlp.gated": False}))
        ]
    if family in OF_BART:
        every = {"norm.embedding": True, "norm.final": True, "head.bias": True}
        sines = {"positions.kind": "sinusoidal", "positions.stored": True}
        kinds = {"positions.kind": "learned"}, sines
        return [changed(config, {**every, **kind}) for kind in kinds]
    if family in ("t5", *OF_T5):
        return [
            config,
            changed(config, {"mlp.gated": False, "positions.kind": "learned"}),
            changed(config, {"positions.kind": "relative"}),
        ]
    return [config]


def kinds_of_kimi_k3(config: ModelConfig) -> list[ModelConfig]:
    """Models with gates of both kinds."""
    sizes = {
        "key_heads": 2,
        "value_heads": 2,
        "key_dim": 3,
        "value_dim": 3,
        "conv": 4,
        "stored_decays": 5,
    }
    fields = {f"linear.{name}": size for name, size in sizes.items()}
    fields |= {"layers.mixer": ("kda", "attention"), "residual_block": 1}
    fields |= {"attention.output_gate": True, "experts.latent": 3, "experts.latent_norm": True}
    return [
        changed(config, {**fields, "linear.full_rank_out_gate": is_full_rank})
        for is_full_rank in (True, False)
    ]


def every_rank(
    config: ModelConfig, naming: Naming, layout: Layout, divisor: int = 8
) -> Iterator[tuple[Chunk, int, int, NativeTensor]]:
    """(chunk, tensor and expert parallel rank, tensor): all but second copies of tied embeddings."""
    rows = families()[config.family].rows
    if naming.scheme == "hf":
        layout, vocab_rows = Layout(stage_layers=(config.layer_count,)), config.vocab
    else:
        vocab_rows = padded_vocab(config.vocab, divisor, layout.tp)
    for chunk in layout.chunks():
        for tp_rank, ep_rank in product(range(layout.tp), range(layout.ep)):
            for native in native_tensors(
                rows, config, naming, layout, tp_rank, chunk, vocab_rows, ep_rank
            ):
                if not native.copy:
                    yield chunk, tp_rank, ep_rank, native


def rank_tensors(
    config: ModelConfig, naming: Naming, layout: Layout
) -> Iterator[tuple[Chunk, int, NativeTensor]]:
    """(chunk, tensor parallel rank, tensor), once where ranks hold the same because of the other kind of parallelism."""
    for chunk, tp_rank, ep_rank, native in every_rank(config, naming, layout):
        if tp_rank < layout.etp if native.of_experts else ep_rank == 0:
            yield chunk, tp_rank, native


def labelled(config: ModelConfig) -> Labels:
    """Every canonical tensor as a matrix whose elements are all different, in the whole model."""
    shapes = canonical_shapes(families()[config.family].rows, config)
    labels, start = {}, 0
    for name, shape in shapes.items():
        labels[name] = np.arange(start, start + prod(shape)).reshape(matrix_shape(shape))
        start += prod(shape)
    return labels


def target(region: Region, joined: NDArray[np.int64]) -> NDArray[np.int64]:
    """The elements of a native tensor that hold a region, in the order of the canonical tensor."""
    box, row, col = region.box, region.row, region.col
    if region.transposed:
        found = joined[row : row + box.cols, col : col + box.rows].T
    elif isinstance(region.order, AsPairs):  # a view: head, half, pair, column
        heads = joined[row : row + box.rows].reshape(-1, region.order.head_dim // 2, 2, box.cols)
        return heads.transpose(0, 2, 1, 3)
    elif isinstance(region.order, AsHalves):  # a view: pair, half, column
        return joined[row : row + box.rows].reshape(2, -1, box.cols).swapaxes(0, 1)
    else:
        assert region.order == PLAIN
        found = joined[row : row + box.rows]
    assert found.shape == (box.rows, box.cols)
    return found


def join(native: NativeTensor, labels: Labels) -> NDArray[np.int64]:
    """A native tensor as a matrix, from its regions."""
    joined = np.full(native.view or matrix_shape(native.shape), PADDING)
    assert joined.size == prod(native.shape), native.name
    for name, regions in native.parts.items():
        for region in regions:
            box, place = region.box, target(region, joined)
            assert (place == PADDING).all(), f"{native.name}: two regions overlap"
            place[:] = labels[name][box.row0 : box.row1, box.col0 : box.col1].reshape(place.shape)
    return joined


def split(native: NativeTensor, joined: NDArray[np.int64], into: Labels) -> None:
    for name, regions in native.parts.items():
        for region in regions:
            box = region.box
            into[name][box.row0 : box.row1, box.col0 : box.col1] = target(region, joined).reshape(
                box.rows, box.cols
            )


@pytest.mark.parametrize(("family", "naming"), SPELLED)
def test_native_names_are_unique_and_shapes_evaluate(family: str, naming: Naming) -> None:
    config = everything(family, naming)
    natives = [
        native
        for _, _, native in rank_tensors(config, naming, Layout(stage_layers=(config.layer_count,)))
    ]
    names, shapes = [native.name for native in natives], [native.shape for native in natives]
    assert len(names) == len(set(names)) > 10
    assert all("{" not in name for name in names)
    assert all(size > 0 for shape in shapes for size in shape)


@pytest.mark.parametrize("family", sorted(families()))
def test_canonical_names_are_unique_in_every_layer(family: str) -> None:
    config = everything(family)
    for layer in range(config.layer_count):
        rows = [row for row in families()[family].rows if row.exists(config, layer)]
        patterns = list(chain.from_iterable(expand(row.canonical) for row in rows))
        assert len(patterns) == len(set(patterns))


@pytest.mark.parametrize("family", sorted(families()))
def test_a_model_with_everything_has_every_row(family: str) -> None:
    configs = every_kind(family)
    # Queries come from the hidden state or from a latent vector. An indexer needs the latent vector.
    either = [
        *configs,
        *(changed(config, {"latent.q_rank": 0}) for config in configs if not has_indexer(family)),
    ]
    scores = {"head.labels": 3, "head.labels_bias": True}
    either = [*either, *(changed(config, scores) for config in configs)]
    for row in families()[family].rows:
        assert any(
            row.exists(config, layer) for config in either for layer in range(config.layer_count)
        ), row.canonical


def test_every_family_can_be_said_in_hugging_faces_words_and_in_cores() -> None:
    namings = (HF, CORE, CORE_LOCAL)
    without_class = {(name, HF) for name, table in families().items() if table.no_class}
    assert without_class == {("retro", HF)}
    without_class |= set(product(BETWEEN_FILES, (CORE, CORE_LOCAL)))
    spelled = {pair for pair in SPELLED if pair[1] in namings}
    assert spelled == set(product(families(), namings)) - without_class
    assert ("llama", META) in SPELLED
    assert {("llama", LEGACY), ("gpt2", LEGACY)} <= set(SPELLED)


@pytest.mark.parametrize("family", sorted(families()))
def test_a_row_has_as_many_shapes_and_names_as_canonical_tensors(family: str) -> None:
    for row in families()[family].rows:
        count = len(expand(row.canonical))
        assert len(row.shapes) == count, row.canonical
        for naming in NAMINGS:
            for spelling, members in row.with_members(row.spelling(naming)):
                assert len(expand(spelling.name)) == (1 if spelling.joins else len(members)), (
                    row.canonical,
                    naming,
                )


@given(sharded_models())
@settings(max_examples=150, deadline=None)
def test_joining_for_all_ranks_and_splitting_gives_the_same_model(
    model: tuple[ModelConfig, Naming, Layout],
) -> None:
    config, naming, layout = model
    labels = labelled(config)
    found = {name: np.full_like(label, PADDING) for name, label in labels.items()}
    for _, _, native in rank_tensors(config, naming, layout):
        split(native, join(native, labels), found)
    assert found.keys() == labels.keys()
    for name, label in labels.items():
        assert np.array_equal(found[name], label), name


@given(sharded_models())
@settings(max_examples=150, deadline=None)
def test_every_element_lies_on_exactly_one_rank_or_on_every_tensor_parallel_rank(
    model: tuple[ModelConfig, Naming, Layout],
) -> None:
    config, naming, layout = model
    labels = labelled(config)
    times: Counter[int] = Counter()
    for _, _, native in rank_tensors(config, naming, layout):
        joined = join(native, labels)
        filled = len(joined) - native.padding_rows
        assert (joined[:filled] != PADDING).all(), f"{native.name}: an element belongs to nothing"
        assert (joined[filled:] == PADDING).all(), f"{native.name}: a padding row holds something"
        ranks = layout.etp if native.of_experts else layout.tp
        copies = ranks if native.replicated and naming.scheme != "hf" else 1
        times.update({int(label): 1.0 / copies for label in joined[:filled].reshape(-1)})
    assert set(times) == set(
        chain.from_iterable(label.reshape(-1).tolist() for label in labels.values())
    )
    assert set(times.values()) == {1}


@given(sharded_models())
@settings(max_examples=50, deadline=None)
def test_names_are_unique_within_a_chunk_and_ranks_differ_only_in_values(
    model: tuple[ModelConfig, Naming, Layout],
) -> None:
    config, naming, layout = model
    names: dict[tuple[int, int, int, int], list[tuple[str, Shape]]] = {}
    for chunk, tp_rank, ep_rank, native in every_rank(config, naming, layout):
        names.setdefault((chunk.pp_rank, chunk.vpp_rank, tp_rank, ep_rank), []).append(
            (native.name, native.shape)
        )
    for (pp_rank, vpp_rank, _, _), tensors in names.items():
        assert len({name for name, _ in tensors}) == len(tensors)
        assert tensors == names[pp_rank, vpp_rank, 0, 0]


@pytest.mark.parametrize("naming", [CORE, CORE_LOCAL])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_embedding_has_a_second_copy_with_the_last_chunk(naming: Naming, pp: int) -> None:
    config, layout = (
        changed(EVERYTHING, {"tie_embeddings": True}),
        Layout(pp=pp, stage_layers=(1, 1) if pp > 1 else (2,)),
    )
    *_, last = layout.chunks()
    natives = native_tensors(
        families()["llama"].rows, config, naming, layout, 0, last, config.vocab
    )
    (copy,) = [native for native in natives if native.copy]
    assert (copy.name, copy.shape, list(copy.parts)) == (
        "output_layer.weight",
        (10, 6),
        ["embed.weight"],
    )


# Golden literals: what Megatron has in its files.


def only(config: ModelConfig, naming: Naming, layout: Layout, name: str) -> list[NativeTensor]:
    return [native for _, _, native in rank_tensors(config, naming, layout) if native.name == name]


def rows_of(native: NativeTensor) -> str:
    """`q0` for row 0 of the canonical tensor `...q.weight`, in native order; the tensor has one column."""
    found = [""] * native.shape[0]
    for name, regions in native.parts.items():
        for region in regions:
            for row in range(region.box.rows):
                found[region.row + row] = f"{name.split('.')[-2]}{region.box.row0 + row}"
    return " ".join(found)


def test_q_k_and_v_interleave_by_key_value_group() -> None:
    config = changed(EVERYTHING, {"layers.count": 1, "hidden": 1})
    (fused,) = only(
        config, CORE, Layout(stage_layers=(1,)), "decoder.layers.0.self_attention.linear_qkv.weight"
    )
    assert rows_of(fused) == "q0 q1 q2 q3 k0 k1 v0 v1 q4 q5 q6 q7 k2 k3 v2 v3"


def test_a_rank_has_the_q_k_and_v_of_its_own_groups() -> None:
    config = changed(EVERYTHING, {"layers.count": 1, "hidden": 1})
    first, second = only(
        config,
        CORE,
        Layout(tp=2, stage_layers=(1,)),
        "decoder.layers.0.self_attention.linear_qkv.bias",
    )
    assert rows_of(first) == "q0 q1 q2 q3 k0 k1 v0 v1"
    assert rows_of(second) == "q4 q5 q6 q7 k2 k3 v2 v3"


def test_with_more_ranks_than_key_value_groups_each_has_an_even_share_of_the_rows() -> None:
    """Attention of megatron-core 0.16 gathers the rows in this way, whatever their group."""
    config = changed(EVERYTHING, {"layers.count": 1, "hidden": 1})
    for kind in ("weight", "bias"):
        name = f"decoder.layers.0.self_attention.linear_qkv.{kind}"
        ranks = only(config, CORE, Layout(tp=4, stage_layers=(1,)), name)
        assert [rows_of(native) for native in ranks] == [
            "q0 q1 q2 q3",
            "k0 k1 v0 v1",
            "q4 q5 q6 q7",
            "k2 k3 v2 v3",
        ]
        assert [native.groups for native in ranks] == [2] * 4


@pytest.mark.parametrize("naming", [LEGACY, META])
def test_other_naming_schemes_have_no_shared_key_value_heads(naming: Naming) -> None:
    with pytest.raises(
        LayoutError, match=r"kv_heads = 2 .*\(tp\) = 4.*only Megatron core from 0\.16"
    ):
        list(rank_tensors(everything("llama", naming), naming, Layout(tp=4, stage_layers=(2,))))


def test_a_share_of_rows_that_is_no_whole_number_is_refused() -> None:
    config = changed(
        EVERYTHING, {"attention.heads": 8, "attention.head_dim": 1, "attention.kv_heads": 2}
    )
    with pytest.raises(
        LayoutError,
        match=r"rows of decoder\.layers\.\{l\}\.self_attention\.linear_qkv\.weight = 12 .* = 8",
    ):
        list(rank_tensors(changed(config, {"mlp.ffn": 8}), CORE, Layout(tp=8, stage_layers=(2,))))


def test_without_groups_every_head_has_its_q_k_and_v_together() -> None:
    config = changed(
        EVERYTHING,
        {
            "layers.count": 1,
            "hidden": 1,
            "attention.heads": 2,
            "attention.kv_heads": 2,
            "attention.head_dim": 1,
        },
    )
    (fused,) = only(
        config,
        CORE_LOCAL,
        Layout(stage_layers=(1,)),
        "decoder.layers.0.self_attention.linear_qkv.weight",
    )
    assert rows_of(fused) == "q0 k0 v0 q1 k1 v1"


def test_gate_and_up_are_joined_rank_by_rank() -> None:
    config = changed(EVERYTHING, {"layers.count": 1, "hidden": 1})
    (whole,) = only(
        config, CORE, Layout(stage_layers=(1,)), "decoder.layers.0.mlp.linear_fc1.weight"
    )
    assert rows_of(whole) == "gate0 gate1 gate2 gate3 up0 up1 up2 up3"
    first, second = only(
        config, CORE, Layout(tp=2, stage_layers=(1,)), "decoder.layers.0.mlp.linear_fc1.weight"
    )
    assert rows_of(first) == "gate0 gate1 up0 up1"
    assert rows_of(second) == "gate2 gate3 up2 up3"


def test_row_parallel_weights_are_cut_by_columns_and_their_biases_are_copied() -> None:
    weights = only(
        EVERYTHING, CORE, Layout(tp=2, stage_layers=(2,)), "decoder.layers.1.mlp.linear_fc2.weight"
    )
    assert [native.shape for native in weights] == [(6, 2), (6, 2)]
    assert [native.parts["layers.1.mlp.down.weight"][0].box[2:] for native in weights] == [
        (0, 2),
        (2, 4),
    ]
    biases = only(
        EVERYTHING, CORE, Layout(tp=2, stage_layers=(2,)), "decoder.layers.1.mlp.linear_fc2.bias"
    )
    assert [(native.shape, native.replicated) for native in biases] == [((6,), True)] * 2


def test_layers_count_from_zero_in_every_chunk() -> None:
    config, layout = (
        changed(EVERYTHING, {"layers.count": 4}),
        Layout(pp=2, vpp=2, stage_layers=(1, 1, 2, 0)),
    )
    norms = [
        (chunk.pp_rank, chunk.vpp_rank, native.name, next(iter(native.parts)))
        for chunk, _, native in rank_tensors(config, CORE_LOCAL, layout)
        if native.name.endswith(".input_layernorm.weight")
    ]
    assert norms == [
        (0, 0, "decoder.layers.0.input_layernorm.weight", "layers.0.input_norm.weight"),
        (1, 0, "decoder.layers.0.input_layernorm.weight", "layers.1.input_norm.weight"),
        (0, 1, "decoder.layers.0.input_layernorm.weight", "layers.2.input_norm.weight"),
        (0, 1, "decoder.layers.1.input_layernorm.weight", "layers.3.input_norm.weight"),
    ]


@pytest.mark.parametrize(
    ("vocab", "padding"), [(10, [0, 6]), (8, [0, 8]), (3, [5, 8]), (16, [0, 0])]
)
def test_padding_rows_are_the_last_ones_of_the_last_ranks(vocab: int, padding: list[int]) -> None:
    config = changed(EVERYTHING, {"vocab": vocab})
    layout = Layout(tp=2, stage_layers=(2,))
    natives = only(config, CORE, layout, "embedding.word_embeddings.weight")
    assert [native.padding_rows for native in natives] == padding


def test_a_naming_with_experts_in_a_grouped_layer_has_one_tensor_per_expert_of_the_rank() -> None:
    layout = Layout(ep=2, stage_layers=(2,))
    natives = [native for _, _, native in rank_tensors(everything("mixtral"), CORE_GROUPED, layout)]
    fc1 = [
        native
        for native in natives
        if "experts.linear_fc1" in native.name and "shared" not in native.name
    ]
    assert [(native.name, next(iter(native.parts))) for native in fc1] == [
        (
            f"decoder.layers.1.mlp.experts.linear_fc1.weight{local}",
            f"layers.1.mlp.experts.{expert}.gate.weight",
        )
        for local, expert in [(0, 0), (1, 1), (0, 2), (1, 3)]
    ]


def test_stacked_experts_are_transposed_one_under_the_other() -> None:
    config = changed(everything("mixtral"), {"experts.count": 2, "hidden": 1})
    layout = Layout(tp=2, etp=2, stage_layers=(2,))
    stacks = only(config, CORE_LEGACY_GROUPED, layout, "decoder.layers.1.mlp.experts.weight1")
    labels = labelled(config)
    gates, ups = (
        [labels[f"layers.1.mlp.experts.{expert}.{name}.weight"] for expert in (0, 1)]
        for name in ("gate", "up")
    )
    for rank, stack in enumerate(stacks):
        assert (stack.shape, stack.view) == ((1, 4), (2, 2))
        assert join(stack, labels).tolist() == [
            [gates[e][rank, 0], ups[e][rank, 0]] for e in (0, 1)
        ]


@pytest.mark.parametrize("naming", [CORE, CORE_LOCAL, CORE_GROUPED])
def test_a_gpt_oss_has_its_alternating_gate_and_up_rows_as_two_halves(naming: Naming) -> None:
    config = changed(
        everything("gpt_oss"), {"experts.count": 1, "experts.per_token": 1, "hidden": 1}
    )
    expert = "experts" if naming == CORE_GROUPED else "experts.local_experts.0"
    for kind in ("weight", "bias"):
        name = f"decoder.layers.1.mlp.{expert}.linear_fc1.{kind}{'0' if naming == CORE_GROUPED else ''}"
        (native,) = only(config, naming, Layout(stage_layers=(2,)), name)
        labels = labelled(config)
        gate_up = labels[f"layers.1.mlp.experts.0.gate_up.{kind}"]
        assert join(native, labels).tolist() == gate_up[[0, 2, 1, 3]].tolist()


def test_a_gpt2_keeps_its_weights_transposed_and_q_k_and_v_side_by_side() -> None:
    config = changed(everything("gpt2"), {"layers.count": 1})
    labels = labelled(config)
    (fused,) = only(config, HF, Layout(), "transformer.h.0.attn.c_attn.weight")
    pieces = [labels[f"layers.0.attn.{name}.weight"].T for name in "qkv"]
    assert np.array_equal(join(fused, labels), np.concatenate(pieces, axis=1))


def test_meta_keeps_the_halves_of_each_head_in_pairs() -> None:
    config = changed(
        everything("llama", META),
        {
            "layers.count": 1,
            "hidden": 1,
            "attention.heads": 2,
            "attention.kv_heads": 1,
            "attention.head_dim": 4,
        },
    )
    (query,) = only(config, META, Layout(stage_layers=(1,)), "layers.0.attention.wq.weight")
    start = labelled(config)["layers.0.attn.q.weight"][0, 0]
    assert (join(query, labelled(config)) - start).reshape(-1).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_meta_cuts_the_embedding_by_columns() -> None:
    halves = only(
        everything("llama", META), META, Layout(tp=2, stage_layers=(2,)), "tok_embeddings.weight"
    )
    assert [native.parts["embed.weight"][0].box for native in halves] == [
        (0, 10, 0, 3),
        (0, 10, 3, 6),
    ]


GATED = (
    Row(
        "layers.{l}.attn.{q|gate|k|v}.weight",
        (*("heads*head_dim hidden",) * 2, *("kv_heads*head_dim hidden",) * 2),
        tp=0,
        hf=(Fused("h.{l}.q_proj", groups="heads", members=(0, 1)), "h.{l}.{k|v}_proj"),
        core=Fused("decoder.layers.{l}.linear_qkv", groups="kv_heads"),
    ),
    Row(
        "layers.{l}.mixer.conv",
        ("heads*head_dim 1 3",),
        tp=0,
        hf="h.{l}.conv",
        core="decoder.layers.{l}.conv",
    ),
)
"""Rows of Qwen3-Next's kind: a query and its output gate joined head by head, and a convolution [channels, 1, kernel]."""


def of_rows(
    rows: tuple[Row, ...], config: ModelConfig, naming: Naming, tp: int
) -> Iterator[NativeTensor]:
    for rank in range(tp):
        layout = Layout(tp, stage_layers=(config.layer_count,))
        yield from native_tensors(
            rows, config, naming, layout, rank, next(layout.chunks()), config.vocab * tp
        )


def test_one_row_may_be_several_native_tensors_that_each_join_several() -> None:
    config = changed(EVERYTHING, {"layers.count": 1, "hidden": 1})
    whole = {native.name: native for native in of_rows(GATED, config, HF, 1)}
    assert list(whole) == ["h.0.q_proj", "h.0.k_proj", "h.0.v_proj", "h.0.conv"]
    assert (
        rows_of(whole["h.0.q_proj"])
        == "q0 q1 gate0 gate1 q2 q3 gate2 gate3 q4 q5 gate4 gate5 q6 q7 gate6 gate7"
    )
    assert rows_of(whole["h.0.v_proj"]) == "v0 v1 v2 v3"
    first, _, second, _ = of_rows(GATED, config, CORE, 2)
    assert rows_of(first) == "q0 q1 q2 q3 gate0 gate1 gate2 gate3 k0 k1 v0 v1"
    assert rows_of(second) == "q4 q5 q6 q7 gate4 gate5 gate6 gate7 k2 k3 v2 v3"
    assert [rows_of(n) for n in of_rows(GATED[:1], config, CORE, 4)] == [
        *("q0 q1 q2 q3 gate0 gate1", "gate2 gate3 k0 k1 v0 v1"),
        *("q4 q5 q6 q7 gate4 gate5", "gate6 gate7 k2 k3 v2 v3"),
    ]


@pytest.mark.parametrize(("naming", "tp"), [(HF, 1), (CORE, 1), (CORE, 2), (CORE, 4)])
def test_rows_of_several_tensors_and_of_inner_axes_split_into_the_same_model(
    naming: Naming, tp: int
) -> None:
    shapes = canonical_shapes(GATED, EVERYTHING)
    assert shapes["layers.1.mixer.conv"] == (8, 1, 3)
    numbers = np.arange(sum(map(prod, shapes.values())))
    ends = np.cumsum([prod(shape) for shape in shapes.values()])[:-1]
    parts = zip(shapes.items(), np.split(numbers, ends), strict=True)
    labels = {name: part.reshape(matrix_shape(shape)) for (name, shape), part in parts}
    found = {name: np.full_like(label, PADDING) for name, label in labels.items()}
    for native in of_rows(GATED, EVERYTHING, naming, tp):
        assert native.shape[1:] == (
            (1, 3) if native.name.endswith("conv") else (EVERYTHING.hidden,)
        )
        split(native, join(native, labels), found)
    assert all(np.array_equal(found[name], labels[name]) for name in labels)


# Tables made of others.


def test_layer_norms_have_biases_and_norms_of_heads_have_not() -> None:
    named = {row.canonical for row in with_norm_biases(families()["llama"].rows)}
    assert {
        "layers.{l}.input_norm.{weight|bias}",
        "final_norm.{weight|bias}",
        "layers.{l}.attn.{q|k}_norm.weight",
    } <= named


def test_without_a_gate_the_first_matrix_is_up_alone() -> None:
    config = from_fields("arcee", dict(fields_of(EVERYTHING)))
    labels = labelled(config)
    (fc1,) = only(config, CORE, Layout(stage_layers=(2,)), "decoder.layers.1.mlp.linear_fc1.weight")
    assert np.array_equal(join(fc1, labels), labels["layers.1.mlp.up.weight"])


def test_another_name_for_a_row_that_there_is_not_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"no row of the table is layers\.\{l\}\.other"):
        respelled(families()["llama"].rows, {"layers.{l}.other": {"hf": "other"}})


# The small language of the tables.


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.b", ("a.b",)),
        ("a.{q|k|v}.b", ("a.q.b", "a.k.b", "a.v.b")),
        ("layers.{l}.{gate|up}", ("layers.{l}.gate", "layers.{l}.up")),
        ("layers.{l}.norm", ("layers.{l}.norm",)),
    ],
)
def test_a_pattern_expands_to_its_alternatives(pattern: str, names: tuple[str, ...]) -> None:
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("hidden", (6,)),
        ("heads*head_dim hidden", (8, 6)),
        ("2*ffn hidden", (8, 6)),
        ("3 1", (3, 1)),
    ],
)
def test_a_shape_evaluates_to_numbers(shape: str, sizes: Shape) -> None:
    assert evaluate(shape, EVERYTHING.sizes()) == sizes


def test_a_row_without_a_name_in_the_naming_scheme_is_not_expressible() -> None:
    rows = (Row("extra.weight", ("hidden",), hf="extra.weight"),)
    with pytest.raises(
        NotExpressible,
        match=r"extra\.weight: this tensor can't be represented in the naming scheme core",
    ):
        list(native_tensors(rows, EVERYTHING, CORE, Layout(), 0, Chunk(0, 0, 0, 2, True, True), 16))


def test_a_naming_without_words_for_a_feature_is_expressible_but_not_for_that_model() -> None:
    rows = families()["llama"].rows
    assert expressible(rows, META)
    with pytest.raises(
        NotExpressible, match="qkv_bias can't be represented in the naming scheme meta"
    ):
        list(native_tensors(rows, EVERYTHING, META, Layout(), 0, Chunk(0, 0, 0, 2, True, True), 16))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"core_locale": "a"}, "'core_locale' is not a naming scheme's key"),
        ({"hf": Fused("a", members=(0,))}, "hf has to hold each of its tensors once"),
        (
            {"hf": (Fused("a", members=(0, 1)), Fused("b", members=(1,)))},
            "hf has to hold each of its tensors once",
        ),
        ({"stage": "middle"}, "'middle' is not a stage"),
        ({"copies": (Copied("head"),)}, "only a row of one tensor can have copies"),
    ],
)
def test_a_table_that_cannot_be_meant_is_an_error_when_it_is_made(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Row("layers.{l}.{a|b}", ("hidden", "hidden"), **wrong)


@pytest.mark.parametrize("scheme", ["core", "core_local", "legacy", "meta"])
@pytest.mark.parametrize(
    ("spelling", "right", "wrong", "message"),
    [
        (SecondHalfFirst("b"), (None, 0), (1,), "halves of each rank's columns"),
        (Fused("b", groups="kv_heads"), (0,), (None, 1), "share of kv_heads"),
        (PerHead("b"), (0,), (None, 1), "share of the heads"),
        (RopeLast("b", halves=False), (None, 1), (0,), "every rank has all"),
    ],
)
def test_an_order_that_each_rank_would_have_of_its_own_shard_is_refused(
    scheme: str,
    spelling: Separate,
    right: tuple[int | None, ...],
    wrong: tuple[int | None, ...],
    message: str,
) -> None:
    """A round trip doesn't show it: what is written so is read so."""
    for tp in right:
        Row("a", ("hidden hidden",), tp=tp, **{scheme: spelling})
    for tp in wrong:
        with pytest.raises(ValueError, match=message):
            Row("a", ("hidden hidden",), tp=tp, **{scheme: spelling})
        # GGUF has no ranks, so a spelling without shards is allowed.
        Row("a", ("hidden hidden",), tp=tp, hf=spelling, gguf=spelling)
    row = Row("a", ("hidden hidden",), tp=wrong[0], hf="a")
    with pytest.raises(ValueError, match=message):
        row.renamed(**{scheme: spelling})


def test_pieces_in_a_fixed_number_of_groups_may_be_on_every_rank() -> None:
    Row("{a|b}", ("hidden hidden", "hidden hidden"), core=Fused("c"), legacy=Fused("c", groups="2"))


def test_a_copy_in_no_known_place_and_an_unknown_naming_scheme_are_errors() -> None:
    with pytest.raises(ValueError, match="'elsewhere' is not a place of a copy"):
        Copied("elsewhere")
    with pytest.raises(ValueError, match="'core_locale' is not a key"):
        Naming("core", ("locale",))


def test_the_more_specific_name_of_a_naming_scheme_holds() -> None:
    row = Row("a", ("hidden",), core="usual", core_local="own", core_legacy_grouped="stacked")
    found = {
        str(naming): row.spelling(naming)[0].name for naming in NAMINGS if naming.scheme == "core"
    }
    assert found == {
        "core rope_last": "usual",
        "core": "usual",
        "core local": "own",
        "core grouped": "usual",
        "core legacy_grouped": "stacked",
        "core legacy_grouped local": "stacked",
    }


def test_a_name_that_no_row_has_is_an_error_that_names_it() -> None:
    order = core_order(families()["llama"].rows, CORE)
    names = [
        "decoder.layers.10.mlp.linear_fc1.weight",
        "decoder.layers.2.self_attention.linear_proj._extra_state",
    ]
    assert sorted(names, key=order) == names[::-1]
    with pytest.raises(
        TensorMismatch, match=r"decoder\.layers\.0\.mixer\.weight: no row .* the module mixer"
    ):
        order("decoder.layers.0.mixer.weight")
    with pytest.raises(TensorMismatch, match="no row of the table names scale"):
        order("decoder.layers.0.mlp.linear_fc1.scale")


# What can't be sharded.


@pytest.mark.parametrize(
    ("sizes", "dimension"),
    [
        ({"attention.heads": 6, "attention.kv_heads": 4}, "heads = 6"),
        ({"attention.heads": 12, "attention.kv_heads": 6}, "kv_heads = 6"),
        ({"attention.heads": 12, "attention.kv_heads": 3}, "kv_heads = 3"),
        ({"attention.heads": 6, "attention.kv_heads": 2}, "heads = 6"),
        ({"attention.heads": 8, "attention.kv_heads": 4, "mlp.ffn": 6}, "ffn = 6"),
    ],
)
def test_a_size_that_the_ranks_do_not_divide_is_named_with_value_and_rank_count(
    sizes: dict[str, Any], dimension: str
) -> None:
    config = changed(EVERYTHING, sizes)
    with pytest.raises(LayoutError, match=rf"{dimension} .*\(tp\) = 4"):
        list(rank_tensors(config, CORE, Layout(tp=4, stage_layers=(2,))))


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        (Layout(ep=3, stage_layers=(2,)), {}, r"experts = 4 .*\(ep\) = 3"),
        (
            Layout(tp=4, etp=4, stage_layers=(2,)),
            {"attention.kv_heads": 4, "experts.ffn": 6},
            r"moe_ffn = 6 .*\(etp\) = 4",
        ),
        (
            Layout(tp=2, stage_layers=(2,)),
            {"experts.shared_ffn": 5},
            r"shared_ffn = 5 .*\(tp\) = 2",
        ),
    ],
)
def test_experts_that_the_ranks_do_not_divide_are_named(
    layout: Layout, sizes: dict[str, Any], message: str
) -> None:
    config = changed(everything("qwen2_moe"), sizes)
    with pytest.raises(LayoutError, match=message):
        list(rank_tensors(config, CORE, layout))


def test_vocabulary_rows_that_the_ranks_do_not_divide_are_refused() -> None:
    natives = native_tensors(
        families()["llama"].rows,
        EVERYTHING,
        CORE,
        Layout(tp=2),
        0,
        Chunk(0, 0, 0, 0, True, True),
        11,
    )
    with pytest.raises(LayoutError, match=r"vocabulary = 11 .*\(tp\) = 2"):
        list(natives)
