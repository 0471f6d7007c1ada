"""QK-clip: the scores are those of the whole matrix, the factors Megatron core's, and what is clipped is the same at every layout."""

from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.models import scores
from megatron_lite.models.attention import attend
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.passes import Passes
from megatron_lite.optimizer.qk_clip import rows_of_latent_keys, rows_of_latent_queries, rows_of_qkv
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions, OptimizerOptions, QkClip
from tests.trainer.parallel.small import (
    FULL,
    MODELS,
    Case,
    batches,
    make_engine,
    own_batches,
    train,
    weights_of,
)
from tests.trainer.parallel.worlds import World

CPU = torch.device("cpu")
CLIP = QkClip(alpha=0.3, threshold=0.5)
"""Below what the small models have in all layers, above what they have in all heads."""


def scores_met(
    rank: int, size: int, how: str, *, packed: bool, window: int | None, value: int = 8
) -> tuple[torch.Tensor, ...]:
    """(largest scores that attention leaves, those of the whole masked matrix)"""
    grid = make_grid(Layout(), 1, CPU, cp=size)
    group = grid.group("cp")
    context = None if group is None else ContextGroup(group, rank, size, how)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(16, 2, heads, width, generator=generator)
        for heads, width in ((4, 8), (2, 8), (2, value))
    )
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    documents = ((5, 11), (16,)) if packed else None
    run = Passes(MODELS["gpt2"], CPU, torch.float32, context).make(
        Microbatch(tokens, tokens, documents=documents)
    )
    largest = torch.full((4,), -torch.inf)
    own = [x if context is None else context.own_part(x, 0) for x in (q, k, v)]
    attend(*own, run, window=window, scale=0.7, largest=largest)
    comm.largest(largest, group)
    grid.close()
    expected = torch.full((4,), -torch.inf)
    for row, lengths in enumerate(documents or ((16,), (16,))):
        number = [at for at, length in enumerate(lengths) for _ in range(length)]
        for query in range(16):
            for key in range(query + 1):
                if number[query] == number[key] and (window is None or query - key < window):
                    score = (
                        0.7
                        * (q[query, row].view(2, 2, 8) * k[key, row].unsqueeze(1)).sum(-1).flatten()
                    )
                    expected = torch.maximum(expected, score)
    return largest, expected


@pytest.mark.parametrize("block", [3, 512])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_scores_met_block_by_block_are_the_largest_of_the_whole_matrix(
    block: int, packed: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "BLOCK", block)
    torch.testing.assert_close(*scores_met(0, 1, "p2p", packed=packed, window=window))


def scores_met_by(rank: int, how: str) -> list[tuple[torch.Tensor, ...]]:
    return [
        scores_met(rank, 2, how, packed=packed, window=window, value=6)
        for packed in (False, True)
        for window in (None, 5)
    ]


@pytest.mark.parametrize("how", ["p2p", "all_gather", "a2a"])
def test_context_ranks_together_meet_all_scores(how: str, world: World) -> None:
    for found in world.run(2, scores_met_by, how):
        for own, expected in found:
            torch.testing.assert_close(own, expected)


def core_attention(kind: Any, largest: torch.Tensor, **sizes: Any) -> Any:
    """The attributes that clip_qk of Megatron core uses of a module, without the module."""
    fake = SimpleNamespace(
        core_attention=SimpleNamespace(current_max_attn_logits=largest.clone()),
        num_attention_heads_per_partition=len(largest),
        cache_mla_latents=False,
        **sizes,
    )
    for name in ("_clip_linear_qkv", "_clip_q_proj_weight", "_clip_kv_proj_weight"):
        if hasattr(kind, name):
            setattr(fake, name, MethodType(getattr(kind, name), fake))
    kind.clip_qk(fake)
    return fake


LARGEST = torch.tensor([130.0, 90.0, 250.0, 101.0, 3.0, 100.0])


def config_of_core(alpha: float, **sizes: Any) -> SimpleNamespace:
    return SimpleNamespace(qk_clip=True, qk_clip_alpha=alpha, qk_clip_threshold=100.0, **sizes)


def matrix(rows: int) -> torch.Tensor:
    return torch.randn(rows, 10, generator=torch.Generator().manual_seed(1))


def linear(weight: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.nn.Parameter(weight.clone()))


@pytest.mark.oracle
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_rows_of_q_k_and_v_shrink_as_those_of_megatron_core(alpha: float, kv_heads: int) -> None:
    from megatron.core.transformer.attention import SelfAttention

    width, weight = 4, matrix((6 + 2 * kv_heads) * 4)
    theirs = core_attention(
        SelfAttention, LARGEST, config=config_of_core(alpha), linear_qkv=linear(weight),
        num_query_groups_per_partition=kv_heads, query_projection_size=6 * width, kv_projection_size=kv_heads * width,
    )  # fmt: skip
    widths = {"q": 6 // kv_heads * width, "k": width, "v": width}
    rows = rows_of_qkv(LARGEST, kv_heads, widths, QkClip(alpha))
    torch.testing.assert_close(weight * rows[:, None], theirs.linear_qkv.weight.data)
    assert (rows < 1).any()


@pytest.mark.oracle
@pytest.mark.parametrize("q_rank", [None, 10])
def test_rows_of_latent_attention_shrink_as_those_of_megatron_core(q_rank: int | None) -> None:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    nope, rope, v_dim, alpha = 4, 2, 3, 0.3
    queries, keys = matrix(6 * (nope + rope)), matrix(6 * (nope + v_dim))
    theirs = core_attention(
        MLASelfAttention, LARGEST,
        config=config_of_core(
            alpha, q_lora_rank=q_rank, qk_head_dim=nope, qk_pos_emb_head_dim=rope, v_head_dim=v_dim
        ),
        linear_q_proj=linear(queries), linear_q_up_proj=linear(queries), linear_kv_up_proj=linear(keys),
    )  # fmt: skip
    of_queries = rows_of_latent_queries(LARGEST, nope, rope, QkClip(alpha))
    of_keys = rows_of_latent_keys(LARGEST, nope, v_dim, QkClip(alpha))
    moved = theirs.linear_q_up_proj if q_rank else theirs.linear_q_proj
    torch.testing.assert_close(queries * of_queries[:, None], moved.weight.data)
    torch.testing.assert_close(keys * of_keys[:, None], theirs.linear_kv_up_proj.weight.data)


def test_heads_without_a_score_above_0_are_left_alone() -> None:
    """Megatron core divides the threshold by such a score, and the weights become NaN."""
    found = rows_of_qkv(torch.tensor([-3.0, 0.0, 200.0]), 3, {"q": 1, "k": 1, "v": 1}, QkClip())
    assert found[:6].tolist() == [1.0] * 6
    assert found[6:].tolist() == pytest.approx([0.5**0.5, 0.5**0.5, 1.0])


def largest_score(_rank: int, stage_layers: tuple[int, ...]) -> float | None:
    layout = Layout(1, len(stage_layers), stage_layers=stage_layers)
    grid = make_grid(layout, 1, CPU)
    options = ModelOptions("float32", vocab_divisor=4)
    engine = Engine(MODELS["llama"], grid, options, OptimizerOptions(log_scores=True))
    init_weights(engine, std=0.1, seed=5)
    found = engine.train_step(list(batches(Case("llama"), 0)), lr=0.0).largest_score
    engine.finish()
    grid.close()
    return found


def test_a_stage_without_layers_takes_part(world: World) -> None:
    (expected,) = world.run(1, largest_score, (4,))
    for found in world.run(3, largest_score, (2, 0, 2)):
        assert found == pytest.approx(expected)


def clipped(model: str, **more: Any) -> Case:
    return Case(model, clip=0.0, qk_clip=CLIP, **more)


@pytest.mark.parametrize("model", ["gpt2", "llama", "further tokens"])
def test_steps_bring_the_largest_score_of_their_batch_down_to_the_threshold(model: str) -> None:
    """With a learning rate of 0, nothing else moves. A layer's scores depend on earlier layers, so it takes as many
    steps as layers."""
    engine = make_engine(clipped(model))
    before = weights_of(engine)
    found = [
        engine.train_step(own_batches(clipped(model), 0, engine), lr=0.0).largest_score
        for _ in range(8)
    ]
    assert found[0] is not None
    assert found[0] > CLIP.threshold
    assert found[-1] == pytest.approx(CLIP.threshold, rel=1e-5)
    moved = {
        name for name, tensor in weights_of(engine).items() if not torch.equal(tensor, before[name])
    }
    assert {name.rsplit(".", 2)[1] for name in moved} <= {
        "linear_qkv",
        "linear_q_up_proj",
        "linear_kv_up_proj",
    }
    assert any(name.startswith("mtp") for name in moved) == (model == "further tokens")


LAYOUTS = [
    clipped("llama", dp=2, distributed=True, steps=4),
    clipped("deepseek_v3", tp=2, sequence_parallel=True, steps=4, recompute=FULL),
    clipped("gpt2", cp=2, steps=4, options=(("context", "a2a"),)),
    clipped("gpt2", pp=2, steps=4),
    clipped("laguna", dp=2, steps=4),  # its layers have different numbers of heads
]
MANY = [
    replace(each, model=model, **layout)
    for model in ("gpt2", "llama", "deepseek_v3", "further tokens", "gpt_oss")
    for each, layout in (
        (clipped("gpt2", steps=8), {"tp": 2, "pp": 2, "sequence_parallel": True}),
        (clipped("gpt2", steps=8), {"pp": 2, "vpp": 2, "dp": 2, "distributed": True}),
        (clipped("gpt2", steps=8), {"tp": 2, "cp": 2, "sequence_parallel": True}),
        (clipped("gpt2", steps=8), {"cp": 4, "options": (("context", "all_gather"),)}),
        (clipped("gpt2", steps=8), {"cp": 4, "options": (("context", "a2a+p2p"), ("near", 2))}),
        (
            clipped("gpt2", steps=8, kind="sgd"),
            {"dp": 2, "cp": 2, "options": (("context", "a2a"),)},
        ),
    )
]


@pytest.mark.parametrize(
    "case", [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.slow) for case in MANY)], ids=str
)
def test_every_layout_clips_as_one_process_does(case: Case, world: World) -> None:
    (expected,) = world.run(1, train, case.alone())
    for found in world.run(case.world, train, case):
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert [report.largest_score for report in found.reports] == pytest.approx(
            [report.largest_score for report in expected.reports], rel=1e-3
        )
    assert expected.reports[0].largest_score > CLIP.threshold
