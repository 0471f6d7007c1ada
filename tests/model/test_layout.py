"""Layouts: which pipeline stage has which layers, in all of Megatron's ways to say it, and against its real placements."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from formats import torch_zip
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import LayoutError
from megaconv.model.layout import (
    Chunk,
    LayerSplit,
    Layout,
    padded_vocab,
    parse_pattern,
    split_arguments,
    split_layers,
    uneven_splits,
)
from megaconv.options.values import numbers
from tests.conftest import FIXTURES
from tests.strategies import layouts

EVEN = LayerSplit()


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "split", "stages"),
    [
        (4, 1, 1, EVEN, (4,)),
        (8, 4, 1, EVEN, (2, 2, 2, 2)),
        (8, 2, 2, EVEN, (2, 2, 2, 2)),
        (8, 2, 4, EVEN, (1, 1, 1, 1, 1, 1, 1, 1)),
        (4, 2, 1, LayerSplit(first=1), (1, 3)),
        (4, 2, 1, LayerSplit(last=1), (3, 1)),
        (4, 2, 1, LayerSplit(first=1, last=3), (1, 3)),
        (10, 4, 1, LayerSplit(first=1), (1, 3, 3, 3)),
        (11, 4, 1, LayerSplit(first=2, last=1), (2, 4, 4, 1)),
        (16, 4, 2, LayerSplit(first=2, last=2), (1, 3, 3, 1, 1, 3, 3, 1)),
        (14, 3, 2, LayerSplit(last=2), (3, 3, 1, 3, 3, 1)),
        (7, 4, 1, LayerSplit(account_for_embedding=True), (1, 2, 2, 2)),
        (7, 4, 1, LayerSplit(account_for_loss=True), (2, 2, 2, 1)),
        (6, 4, 1, LayerSplit(account_for_embedding=True, account_for_loss=True), (1, 2, 2, 1)),
        (6, 2, 2, LayerSplit(account_for_embedding=True, account_for_loss=True), (1, 2, 2, 1)),
        (2, 4, 1, LayerSplit(account_for_embedding=True, account_for_loss=True), (0, 1, 1, 0)),
        (4, 1, 1, LayerSplit(account_for_embedding=True, account_for_loss=True), (4,)),
        (4, 2, 2, LayerSplit(pattern="Et|t|tt|L"), (1, 1, 2, 0)),
        (10, 4, 1, LayerSplit(pattern="Et*3|(tt|)*2,t*3L"), (3, 2, 2, 3)),
        (16, 4, 1, LayerSplit(layers=(3, 5, 5, 3)), (3, 5, 5, 3)),
        (2, 2, 2, LayerSplit(layers=(0, 2, 0, 0)), (0, 2, 0, 0)),
    ],
)
def test_layers_are_shared_out_as_megatron_does(
    layers: int, pp: int, vpp: int, split: LayerSplit, stages: tuple[int, ...]
) -> None:
    assert split_layers(layers, pp, vpp, split) == stages


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "split", "message"),
    [
        (
            5,
            2,
            1,
            EVEN,
            "layers = 5 can't be divided over pp x vpp = 2; .* --decoder-first-pipeline-num-layers",
        ),
        (6, 2, 2, EVEN, "layers = 6 can't be divided over pp x vpp = 4"),
        (
            2,
            3,
            1,
            EVEN,
            "layers = 2 can't be divided over pp x vpp = 3; choose a size that divides 2$",
        ),
        (4, 1, 2, EVEN, "pipeline parallel size of 2 or more"),
        (4, 0, 1, EVEN, "pipeline parallel size is 0"),
        (4, 2, 0, EVEN, "virtual pipeline parallel size is 0"),
        (8, 4, 1, LayerSplit(first=1), "layers between first and last stage = 7 .* = 3"),
        (4, 2, 1, LayerSplit(first=5), "leave -1 of 4 layers"),
        (4, 2, 1, LayerSplit(first=1, last=1), "leave 2 of 4 layers for 0 other ranks"),
        (4, 1, 1, LayerSplit(first=1, last=3), "for -1 other ranks"),
        (9, 3, 2, LayerSplit(first=3), "layers of pipeline rank 0 = 3 .*vpp = 2"),
        (
            8,
            4,
            1,
            LayerSplit(account_for_embedding=True),
            r"\(with embedding and loss counted, 8 \+\) = 9 .* = 4",
        ),
        (4, 2, 2, LayerSplit(pattern="Ett|ttL"), "has 2 stages, but pp x vpp = 2 x 2 = 4"),
        (5, 2, 1, LayerSplit(pattern="Ett|ttL"), "places 4 layers, but the model has 5"),
        (4, 2, 1, LayerSplit(layers=(1, 2, 1)), "has 3 stages, but pp x vpp = 2 x 1 = 2"),
        (4, 2, 1, LayerSplit(layers=(1, 2)), "1,2 places 3 layers, but the model has 4"),
        (4, 2, 1, LayerSplit(layers=(5, -1)), "the layer split 5,-1"),
        (4, 2, 1, LayerSplit(layers=(2, 2), first=2), "give one layer split"),
        (4, 2, 1, LayerSplit(first=2, account_for_loss=True), "give one layer split"),
        (4, 2, 1, LayerSplit(first=0, account_for_loss=True), "give one layer split"),
        (4, 2, 1, LayerSplit(layers=(2, 2), pattern="Ett|ttL"), "give one layer split"),
    ],
)
def test_layers_that_do_not_add_up_are_refused(
    layers: int, pp: int, vpp: int, split: LayerSplit, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        split_layers(layers, pp, vpp, split)


@pytest.mark.parametrize(
    ("pattern", "stages"),
    [
        ("EttL", (2,)),
        ("Et|t|tt|L", (1, 1, 2, 0)),
        ("E|tt|L", (0, 2, 0)),
        ("Et*3|t*2|L", (3, 2, 0)),
        ("Ett|(tt|)*3,L", (2, 2, 2, 2, 0)),
        ("E,t|(t,t|t|)*2,t,L", (1, 2, 1, 2, 1, 1)),
        ("E(t|)*3tL", (1, 1, 1, 1)),
        ("Et|*3tL", (1, 0, 0, 1)),
        ("E(|t)*2L", (0, 1, 1)),
        ("Et*12|L", (12, 0)),
    ],
)
def test_a_layout_string_says_the_layers_of_each_stage(
    pattern: str, stages: tuple[int, ...]
) -> None:
    assert parse_pattern(pattern) == stages


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "tt",
        "Ett",
        "ttL",
        "EttLt",
        "tEtL",
        "EEtL",
        "EtLL",
        "Etx|L",
        "Et*L",
        "E(t|L",
        "E((t)*2|)*2L",
        "Et*|L",
        "Etm|L",
    ],
)
def test_a_layout_string_that_makes_no_sense_is_refused(pattern: str) -> None:
    with pytest.raises(LayoutError, match="layout string"):
        parse_pattern(pattern)


def test_chunks_come_in_the_order_of_the_model() -> None:
    chunks = list(Layout(pp=2, vpp=2, stage_layers=(1, 1, 2, 0)).chunks())
    assert chunks == [
        Chunk(0, 0, 0, 1, True, False),
        Chunk(1, 0, 1, 1, False, False),
        Chunk(0, 1, 2, 2, False, False),
        Chunk(1, 1, 4, 0, False, True),
    ]


@given(st.integers(1, 9).flatmap(layouts))
@settings(deadline=None)
def test_chunks_hold_every_layer_once_and_one_embedding_and_one_head(layout: Layout) -> None:
    chunks = list(layout.chunks())
    held = [
        layer
        for chunk in chunks
        for layer in range(chunk.first_layer, chunk.first_layer + chunk.layers)
    ]
    assert held == list(range(sum(layout.stage_layers)))
    places = {(chunk.pp_rank, chunk.vpp_rank) for chunk in chunks}
    assert places == {
        (pp_rank, vpp_rank) for pp_rank in range(layout.pp) for vpp_rank in range(layout.vpp)
    }
    assert [chunk.is_first for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert (last.pp_rank, last.vpp_rank) == (layout.pp - 1, layout.vpp - 1)


# The arguments that Megatron finds in a checkpoint have to lead to the same layout again.


def layer_split(arguments: dict[str, Any]) -> LayerSplit:
    """The layer split that Megatron's arguments describe."""
    return LayerSplit(
        first=arguments["decoder_first_pipeline_num_layers"],
        last=arguments["decoder_last_pipeline_num_layers"],
        account_for_embedding=arguments["account_for_embedding_in_pipeline_split"],
        account_for_loss=arguments["account_for_loss_in_pipeline_split"],
        pattern=arguments["pipeline_model_parallel_layout"],
    )


@given(st.integers(1, 12).flatmap(layouts))
@settings(max_examples=300, deadline=None)
def test_the_arguments_of_a_layout_lead_back_to_it(layout: Layout) -> None:
    split = layer_split(split_arguments(layout))
    assert (
        split_layers(sum(layout.stage_layers), layout.pp, layout.vpp, split) == layout.stage_layers
    )


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        (Layout(pp=2, stage_layers=(2, 2)), {}),
        (
            Layout(pp=2, vpp=2, stage_layers=(3, 3, 3, 3)),
            {"num_layers_per_virtual_pipeline_stage": 3},
        ),
        (Layout(pp=3, stage_layers=(1, 3, 3)), {"decoder_first_pipeline_num_layers": 1}),
        (Layout(pp=3, stage_layers=(3, 3, 1)), {"decoder_last_pipeline_num_layers": 1}),
        (
            Layout(pp=4, stage_layers=(2, 4, 4, 1)),
            {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 1},
        ),
        (
            Layout(pp=3, stage_layers=(1, 2, 3)),
            {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3},
        ),
        (
            Layout(pp=4, stage_layers=(1, 2, 3, 4)),
            {"pipeline_model_parallel_layout": "Et|tt|ttt|ttttL"},
        ),
        (
            Layout(pp=2, vpp=2, stage_layers=(1, 1, 2, 0)),
            {"pipeline_model_parallel_layout": "Et|t|tt|L"},
        ),
    ],
)
def test_a_layout_is_written_with_the_simplest_arguments(
    layout: Layout, arguments: dict[str, Any]
) -> None:
    assert {name: value for name, value in split_arguments(layout).items() if value} == arguments


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@given(st.integers(1, 8).flatmap(layouts))
@settings(max_examples=200, deadline=None)
def test_megatron_builds_the_same_stages_from_these_arguments(layout: Layout) -> None:
    pytest.importorskip("megatron.core")
    assume(layout.pp > 1)
    assert megatron_stages(layout, split_arguments(layout)) == layout.stage_layers


def megatron_stages(layout: Layout, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Layers per stage, as megatron-core's own configuration works them out."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=sum(layout.stage_layers),
        hidden_size=8,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=arguments["decoder_first_pipeline_num_layers"],
        num_layers_in_last_pipeline_stage=arguments["decoder_last_pipeline_num_layers"],
        account_for_embedding_in_pipeline_split=arguments[
            "account_for_embedding_in_pipeline_split"
        ],
        account_for_loss_in_pipeline_split=arguments["account_for_loss_in_pipeline_split"],
        pipeline_model_parallel_layout=arguments["pipeline_model_parallel_layout"],
    )
    placed = config.pipeline_model_parallel_layout
    return tuple(
        placed.layout[chunk.pp_rank][chunk.vpp_rank].count(LayerType.decoder)
        if placed is not None
        else get_num_layers_to_build(config, chunk.vpp_rank, chunk.pp_rank)
        for chunk in layout.chunks()
    )


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "split",
    [
        EVEN,
        LayerSplit(first=2),
        LayerSplit(last=4),
        LayerSplit(first=4, last=4),
        LayerSplit(pattern="Ett|tt|tt|ttt|ttt|L"),
        LayerSplit(account_for_embedding=True, account_for_loss=True),
    ],
)
@pytest.mark.parametrize("vpp", [1, 2])
def test_megatron_shares_layers_out_as_we_do(split: LayerSplit, vpp: int) -> None:
    pytest.importorskip("megatron.core")
    layers = 12 - 2 * split.account_for_embedding
    pp = 3 if split.pattern is None or vpp == 2 else 6
    arguments = {
        "decoder_first_pipeline_num_layers": split.first,
        "decoder_last_pipeline_num_layers": split.last,
        "account_for_embedding_in_pipeline_split": split.account_for_embedding,
        "account_for_loss_in_pipeline_split": split.account_for_loss,
        "pipeline_model_parallel_layout": split.pattern,
    }
    try:
        stages = split_layers(layers, pp, vpp, split)
    except LayoutError:
        with pytest.raises((AssertionError, ValueError)):
            megatron_stages(
                Layout(pp=pp, vpp=vpp, stage_layers=(layers,) + (0,) * (pp * vpp - 1)), arguments
            )
        return
    assert megatron_stages(Layout(pp=pp, vpp=vpp, stage_layers=stages), arguments) == stages


# Real placements: (pipeline rank, virtual stage): layers, as Megatron was told when these files were made.

WHOLE_2, WHOLE_4 = {(0, 0): [0, 1]}, {(0, 0): [0, 1, 2, 3]}
HALVES_2 = {(0, 0): [0], (1, 0): [1]}
PLACEMENTS: dict[str, tuple[int, dict[tuple[int, int], list[int]]]] = {
    "core-bert-tp2pp2": (2, HALVES_2),
    "core-gpt2-tp1pp1": (1, WHOLE_2),
    "core-gpt2-tp2pp2": (2, HALVES_2),
    "core-llama-distopt-tp1pp2dp2": (1, HALVES_2),
    "core-llama-optim-fp32-tp1pp1": (1, WHOLE_2),
    "core-llama-optim-tp2pp2": (2, HALVES_2),
    "core-llama-tp1pp1": (1, WHOLE_4),
    "core-llama-tp1pp2-first1": (1, {(0, 0): [0], (1, 0): [1, 2, 3]}),
    "core-llama-tp1pp2-layout": (1, {(0, 0): [0], (1, 0): [1], (0, 1): [2, 3], (1, 1): []}),
    "core-llama-tp2pp2": (2, {(0, 0): [0, 1], (1, 0): [2, 3]}),
    "core-llama-tp2pp2vpp2": (2, {(0, 0): [0], (1, 0): [1], (0, 1): [2], (1, 1): [3]}),
    "core-llama-tp4pp1": (4, WHOLE_4),
    "core-mixtral-legacygg-tp2ep2": (2, WHOLE_2),
    "core-mixtral-seq-tp1ep1": (1, WHOLE_2),
    "core-mixtral-seq-tp2ep2": (2, WHOLE_2),
    "core-mixtral-seq-tp2pp2ep2": (2, HALVES_2),
    "core-moe-shared-tp2ep2": (2, WHOLE_2),
    "core-qwenlike-tp2pp1": (2, WHOLE_2),
    "core-t5-tp2pp1": (2, {(0, 0): [0]}),
    "core-te-gpt2-tp2pp2": (2, HALVES_2),
    "core-te-llama-distopt-tp2dp2": (2, WHOLE_2),
    "core-te-llama-optim-tp2pp1": (2, WHOLE_2),
    "core-te-llama-tp2pp2": (2, {(0, 0): [0, 1], (1, 0): [2, 3]}),
    "core-te-mixtral-grouped-tp2ep2": (2, WHOLE_2),
    "core-te-mixtral-optim-ep2": (1, {(0, 0): [0]}),
    "core-te-mixtral-seq-tp1ep2": (1, WHOLE_2),
}


def test_every_real_checkpoint_has_a_placement_here() -> None:
    assert {path.name for path in FIXTURES.glob("core-*")} == set(PLACEMENTS)


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_the_loader_finds_the_placement_that_megatron_chose(name: str) -> None:
    layout = open_checkpoint(FIXTURES / name / "checkpoint").layout
    assert layout is not None
    found = {
        (chunk.pp_rank, chunk.vpp_rank): list(
            range(chunk.first_layer, chunk.first_layer + chunk.layers)
        )
        for chunk in layout.chunks()
    }
    assert (layout.tp, found) == PLACEMENTS[name]


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_megatrons_own_arguments_lead_to_the_placement_that_it_chose(name: str) -> None:
    root = FIXTURES / name / "checkpoint"
    layout = open_checkpoint(root).layout
    args = torch_zip.read(next(iter(root.glob("*/mp_rank_00*/model_optim_rng.pt"))))["args"]  # type: ignore[index]
    assert layout is not None
    assert (
        split_layers(args.num_layers, layout.pp, layout.vpp, layer_split(vars(args)))
        == layout.stage_layers
    )


@pytest.mark.parametrize(
    ("vocab", "divisor", "tp", "rows"),
    [
        (100, 8, 1, 104),
        (100, 8, 2, 112),
        (100, 8, 4, 128),
        (128, 8, 4, 128),
        (32000, 128, 8, 32768),
        (1, 1, 1, 1),
        (129, 1, 2, 130),
    ],
)
def test_the_vocabulary_is_padded_for_the_tensor_parallel_size(
    vocab: int, divisor: int, tp: int, rows: int
) -> None:
    assert padded_vocab(vocab, divisor, tp) == rows


@given(layers=st.integers(1, 130), pp=st.integers(2, 20), vpp=st.integers(1, 4))
def test_every_uneven_split_that_is_proposed_works_and_is_nearly_even(
    layers: int, pp: int, vpp: int
) -> None:
    ways = uneven_splits(layers, pp, vpp)
    assert bool(ways) == (layers >= pp * vpp)
    for way in ways:
        option, value = way.split()
        split = (
            LayerSplit(layers=numbers(value))
            if option == "--layer-split"
            else LayerSplit(last=int(value))
        )
        stages = split_layers(layers, pp, vpp, split)
        assert sum(stages) == layers
        assert min(stages) > 0
        assert stages[-1] == min(stages)
        if option == "--layer-split":
            assert max(stages) - min(stages) <= 1


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "ways"),
    [
        (61, 16, 1, ["--decoder-last-pipeline-num-layers 1", f"--layer-split {'4,' * 13}3,3,3"]),
        (126, 16, 1, ["--decoder-last-pipeline-num-layers 6", f"--layer-split {'8,' * 14}7,7"]),
        (10, 4, 1, ["--decoder-last-pipeline-num-layers 1", "--layer-split 3,3,2,2"]),
        (7, 2, 2, ["--layer-split 2,2,2,1"]),
        (3, 4, 1, []),
    ],
)
def test_splits_that_are_proposed(layers: int, pp: int, vpp: int, ways: list[str]) -> None:
    assert uneven_splits(layers, pp, vpp) == ways
