"""Plans equal what runs do: counted in small runs, and compared with published numbers of large ones."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from megaconv.model.rank_share import RankShare
from megaconv.planning.activations import activations, recomputed_bytes
from megaconv.planning.bubble import bubble, timeline
from megaconv.planning.rank_memory import state_bytes
from megatron_lite.models.lora.whole import EMBEDDING, HEAD
from megatron_lite.optimizer import algorithm
from megatron_lite.planning.gradients import stage_traffic
from megatron_lite.planning.memory import stage_memory
from megatron_lite.settings.options import LoRA, Recompute
from tests.trainer.parallel.worlds import World
from tests.trainer.planning.recorded import (
    MODELS,
    Planned,
    bytes_kept,
    bytes_of_a_pass,
    bytes_of_a_pass_by,
    traffic_of_a_step,
)

FULL = Recompute("full")
ADAPTERS = LoRA(4, 8.0)
DORA = LoRA(4, 8.0, dora=True)
ROWS = LoRA(4, 8.0, rows=((EMBEDDING, (3, 5, 40)), (HEAD, (3, 5, 40))))
WHOLE = LoRA(4, 8.0, whole=(EMBEDDING, HEAD))
STEPS = [
    Planned("qwen3", tp=2, dp=2, sequence=True, distributed=True),
    Planned("gpt2", tp=2, pp=2, recompute=FULL),
    Planned("llama", tp=2, pp=2, vpp=2, sequence=True, dtype="bfloat16"),
    Planned("mixture", ep=2, dp=4, distributed=True),
    Planned("mixture", tp=2, dp=2, ep=2, sequence=True, recompute=FULL),
    Planned("deepseek_v3", tp=2, dp=2, ep=2, sequence=True),
    Planned("mixture", tp=2, dp=2, etp=2, sequence=True),
    Planned(
        "mixture", tp=2, dp=2, ep=2, etp=2, sequence=True, recompute=FULL, dispatcher="allgather"
    ),
    Planned("mixture", tp=2, dp=2, ep=2, etp=2, sequence=True, recompute=FULL, padded_to=1.25),
    Planned("mixture", ep=2, dp=4, distributed=True, dispatcher="allgather", padded_to=1.25),
    Planned("llama", pp=2, dp=2, distributed=True, recompute=Recompute("full", "block", 1)),
    Planned("qwen3", cp=2, recompute=FULL),
    Planned("gpt2", tp=2, cp=2, sequence=True, context="a2a"),
    Planned("mixture", cp=2, ep=2, distributed=True, dtype="bfloat16", context="all_gather"),
    Planned("deepseek_v3", cp=2, context="a2a"),
    Planned("gpt2", cp=4, context="a2a+p2p", near=2),
    Planned("qwen3", dp=2, distributed=True, kind="muon"),
    Planned("qwen3", dp=2, distributed=True, zero=2),
    Planned("qwen3", tp=2, dp=2, sequence=True, distributed=True, zero=3, recompute=FULL),
    Planned("llama", dp=4, distributed=True, zero=3, dtype="bfloat16"),
    Planned("gpt2", pp=2, dp=2, dtype="bfloat16", main_grads="bfloat16"),
    Planned(
        "qwen3",
        tp=2,
        dp=2,
        sequence=True,
        distributed=True,
        zero=2,
        dtype="bfloat16",
        main_grads="bfloat16",
    ),
    Planned("gpt2", pp=2, dp=2, distributed=True, zero=3),
    Planned("mixture", ep=2, dp=4, distributed=True, zero=3),
    Planned("further tokens", dp=2, distributed=True, zero=3),
    Planned("further tokens", pp=2, dp=2, distributed=True, zero=3, recompute=FULL),
    Planned("further tokens, tied", pp=2, dp=2, distributed=True, zero=3),
    Planned("hybrid, further tokens", pp=2, dp=2, distributed=True, zero=3),
    Planned("bert", pp=2, dp=2, distributed=True, zero=3),
    Planned("t5", dp=2, distributed=True, zero=3),
    Planned("gemma4", tp=2, pp=2, sequence=True),
    Planned("apertus", tp=2, pp=2, sequence=True),
    Planned("kimi", tp=2, pp=2, sequence=True),
    Planned("falcon h1", tp=2, pp=2, sequence=True),
    Planned("gemma4, layer inputs", tp=2, pp=2, sequence=True),
    Planned("gemma4, layer inputs", pp=2, vpp=2, dp=2, distributed=True, recompute=FULL),
    Planned("mimo_v2_flash", tp=2, sequence=True),
    Planned("nemotron_nas", tp=2, pp=2, sequence=True),
    Planned("laguna", tp=2, sequence=True),
    Planned("lfm3", tp=2, pp=2, sequence=True),
    Planned("llama, scores", tp=2, pp=2, sequence=True),
    Planned("llama, scores", tp=2, dp=2, recompute=FULL),
    Planned("llama, scores", cp=2, distributed=True),
    Planned("bert", tp=2, pp=2, recompute=FULL),
    Planned("bert", tp=2, dp=2, sequence=True, distributed=True),
    Planned("t5", tp=2, dp=2, distributed=True),
    Planned("t5", tp=2, recompute=FULL),
    Planned("t5", pp=3, encoder_stages=2),
    Planned("t5", tp=2, pp=2, encoder_stages=1, distributed=True),
    Planned("mimo", tp=2, dp=2, recompute=FULL),
    Planned("further tokens", tp=2, pp=2, sequence=True),
    Planned("hybrid, further tokens", tp=2, dp=2, ep=2, sequence=True),
    Planned("hybrid, further tokens", tp=2, dp=2, etp=2, sequence=True, dispatcher="allgather"),
    Planned("deepseek_v32", tp=2, pp=2, sequence=True),
    Planned("deepseek_v32", cp=2, dtype="bfloat16"),
    Planned("olmo2", tp=2, dp=2, recompute=FULL),
    Planned("gemma4", cp=2),
    Planned("mimo_v2_flash", cp=2, context="all_gather"),
    Planned("gemma2", tp=2, cp=2, sequence=True, dtype="bfloat16", recompute=FULL),
    Planned("llama4", cp=2, context="a2a"),
    Planned("mpt", cp=2),
    Planned("mamba", cp=2, dtype="bfloat16"),
    Planned("delta nets", tp=2, cp=2, sequence=True, dtype="bfloat16", recompute=FULL),
    Planned("mamba", tp=2, cp=2, sequence=True),
    Planned("kimi", cp=2),
    Planned("lfm3", cp=2),
    Planned("falcon h1", cp=2, context="a2a"),
    Planned("llama", tp=2, lora=ADAPTERS),
    Planned("llama", tp=2, lora=LoRA(4, 8.0, ("q_proj", "v_proj"))),
    Planned("qwen3", tp=2, pp=2, sequence=True, recompute=FULL, lora=DORA),
    Planned("llama", tp=2, dp=2, distributed=True, lora=DORA),
    Planned("qwen3", tp=2, pp=2, sequence=True, recompute=FULL, lora=ADAPTERS),
    Planned("mixture", tp=2, dp=2, ep=2, sequence=True, distributed=True, lora=ADAPTERS),
    Planned("deepseek_v3", tp=2, dp=2, ep=2, sequence=True, lora=ADAPTERS),
    Planned("falcon h1", tp=2, sequence=True, lora=ADAPTERS),
    Planned("kimi", tp=2, sequence=True, lora=ADAPTERS),
    Planned("gemma4, layer inputs", tp=2, pp=2, sequence=True, lora=ADAPTERS),
    Planned("gpt2", pp=2, dp=2, distributed=True, zero=3, lora=ADAPTERS),
    Planned("llama", dp=4, distributed=True, zero=3, dtype="bfloat16", lora=ADAPTERS),
    Planned("llama, scores", tp=2, dp=2, lora=ADAPTERS),
    Planned("llama", tp=2, pp=2, sequence=True, lora=WHOLE),
    Planned("qwen3", tp=2, dp=2, distributed=True, lora=LoRA(4, 8.0, whole=(EMBEDDING,))),
    Planned("qwen3", dp=2, distributed=True, zero=3, lora=LoRA(4, 8.0, whole=(HEAD,))),
    Planned("gpt2", pp=2, dp=2, distributed=True, lora=WHOLE),
    Planned("gpt2", dp=2, distributed=True, zero=3, lora=WHOLE),
    Planned("llama", tp=2, pp=2, sequence=True, lora=ROWS),
    Planned("qwen3", tp=2, dp=2, distributed=True, lora=ROWS),
    Planned("gpt2", dp=2, distributed=True, zero=3, lora=ROWS),
    Planned("llama", tp=2, pp=2, sequence=True, pairs=True),
    Planned("qwen3", tp=2, dp=2, distributed=True, recompute=FULL, pairs=True),
    Planned("llama", tp=2, dp=2, sequence=True, pairs=True, lora=ADAPTERS),
    Planned("further tokens", tp=2, pp=2, sequence=True, pairs=True),
    Planned("further tokens", pp=2, dp=2, distributed=True, zero=3, recompute=FULL, pairs=True),
    Planned("further tokens, tied", dp=2, distributed=True, zero=3, pairs=True),
    Planned("hybrid, further tokens", tp=2, dp=2, ep=2, sequence=True, pairs=True),
    Planned("llama", tp=2, pp=2, sequence=True, recompute=FULL, teacher="qwen3"),
    Planned("qwen3", tp=2, dp=2, distributed=True, dtype="bfloat16", teacher="gemma2", beta=0.5),
    Planned("llama", pp=2, vpp=2, dp=2, teacher="further tokens, tied", lora=ADAPTERS, beta=1.0),
    Planned("mixture", tp=2, dp=2, ep=2, sequence=True, padded_to=1.25, teacher="gpt_oss"),
    Planned("mixture", dp=2, ep=2, dispatcher="allgather", teacher="mixtral"),
    Planned("qwen3", cp=2, teacher="gemma4, layer inputs"),
    Planned("qwen3", cp=2, context="a2a", teacher="falcon h1"),
    Planned("qwen3", tp=2, sequence=True, teacher="kimi"),
    Planned("qwen3", cp=2, context="all_gather", teacher="deepseek_v32"),
    Planned("llama", tp=2, pp=2, teacher="apertus", beta=0.5),
    Planned("gpt2", cp=4, context="a2a+p2p", near=2, teacher="gpt2"),
]


@pytest.mark.parametrize("planned", STEPS, ids=str)
def test_bytes_of_communication_are_those_that_a_step_hands_over(
    planned: Planned, world: World
) -> None:
    """Over the ranks of a stage, since these may have unequal parts of what they share."""
    recorded: dict[int, Counter[tuple[str, str]]] = {}
    groups: dict[int, dict[str, str]] = {}
    for pp_rank, counted, called in world.run(planned.world, traffic_of_a_step, planned):
        recorded.setdefault(pp_rank, Counter()).update(counted)
        groups[pp_rank] = called
    run, ranks = planned.described(), planned.tp * planned.dp * planned.cp
    for pp_rank, counted in recorded.items():
        expected: Counter[tuple[str, str]] = Counter()
        for item in stage_traffic(run, pp_rank):
            expected[groups[pp_rank].get(item.group, item.group), item.kind] += round(
                item.bytes * ranks
            )
        assert counted == expected


KEPT = [
    Planned("qwen3", dtype="bfloat16", wider=4),
    Planned("llama", tp=2, dp=2, dtype="bfloat16", distributed=True, wider=4),
    Planned("gpt2", pp=2, dtype="float32", wider=4),
    Planned("llama, scores", tp=2, dtype="bfloat16", wider=4),
    Planned("bert", tp=2, pp=2, dtype="bfloat16", wider=4),
    Planned("t5", tp=2, dtype="bfloat16", wider=4),
    Planned("t5", pp=2, encoder_stages=1, dtype="bfloat16", wider=4),
    Planned("mixture", ep=2, dp=4, dtype="bfloat16", distributed=True, wider=4),
    Planned("llama", dp=2, dtype="bfloat16", distributed=True, zero=2, wider=4),
    Planned("llama", dp=4, dtype="bfloat16", distributed=True, zero=3, wider=4),
    Planned("mixture", ep=2, dp=4, dtype="float32", distributed=True, zero=3, wider=4),
    Planned("further tokens, tied", tp=2, pp=2, sequence=True, dtype="bfloat16", wider=4),
    Planned("qwen3", dtype="bfloat16", kind="sgd", wider=4),
    Planned("llama", dp=2, dtype="bfloat16", distributed=True, kind="sgd", wider=4),
    Planned("gpt2", pp=2, dtype="bfloat16", kind="muon", wider=4),
    Planned("qwen3", tp=2, dp=2, dtype="float32", distributed=True, kind="muon", wider=4),
    Planned("mixture", ep=2, dp=4, dtype="bfloat16", distributed=True, kind="muon", wider=4),
    Planned("llama", tp=2, dp=2, dtype="bfloat16", distributed=True, wider=4, lora=ADAPTERS),
    Planned("llama", dp=4, dtype="bfloat16", distributed=True, zero=3, wider=4, lora=ADAPTERS),
    Planned("llama", tp=2, dp=2, dtype="bfloat16", distributed=True, wider=4, lora=DORA),
    Planned("mixture", ep=2, dp=4, dtype="bfloat16", distributed=True, wider=4, lora=ADAPTERS),
    Planned("llama, scores", tp=2, dtype="bfloat16", wider=4, lora=ADAPTERS),
    Planned("llama", tp=2, dtype="bfloat16", distributed=True, wider=4, lora=WHOLE),
    Planned("qwen3", dp=2, dtype="bfloat16", distributed=True, wider=4, lora=ROWS),
    Planned("gpt2", pp=2, dp=2, dtype="bfloat16", distributed=True, wider=4, lora=WHOLE),
    Planned("gpt2", pp=2, dtype="float32", kind="sgd", wider=4, lora=ADAPTERS),
    Planned("further tokens", pp=2, dtype="bfloat16", wider=4, pairs=True),
    Planned("qwen3", dtype="bfloat16", wider=4, main_grads="bfloat16"),
    Planned("llama", tp=2, dp=2, dtype="bfloat16", distributed=True, wider=4, main_grads="bfloat16"),
    Planned("mixture", ep=2, dp=4, dtype="bfloat16", distributed=True, zero=2, wider=4, main_grads="bfloat16"),
    Planned("llama", dp=4, dtype="bfloat16", distributed=True, zero=3, wider=4, main_grads="bfloat16"),
    Planned("llama", tp=2, dtype="bfloat16", wider=4, lora=WHOLE, main_grads="bfloat16"),
    Planned("qwen3", dtype="bfloat16", wider=4, main_grads="bfloat16", block=100_000),
    Planned("qwen3", dtype="bfloat16", wider=4, moments="bfloat16"),
    Planned("llama", dp=2, distributed=True, dtype="bfloat16", wider=4, main_grads="bfloat16", moments="bfloat16", block=50_000),
    Planned("mimo", tp=2, dp=2, distributed=True, dtype="bfloat16", wider=4, pairs=True),
    Planned("mimo", dp=2, distributed=True, zero=3, dtype="bfloat16", wider=4, pairs=True),
    Planned("llama", tp=2, dp=2, distributed=True, dtype="bfloat16", wider=4, vectors=True),
    Planned("further tokens, tied", pp=2, dtype="bfloat16", wider=4, vectors=True),
]  # fmt: skip


@pytest.mark.parametrize("planned", KEPT, ids=str)
def test_memory_of_parameters_gradients_and_optimizer_is_that_of_a_run(
    planned: Planned, world: World
) -> None:
    """A stage counts as its fullest rank. Muon's matrices are dealt out whole, so ranks differ."""
    with mock.patch.object(algorithm, "BLOCK", planned.block):
        stages = [stage.kept + stage.widened for stage in stage_memory(planned.described())]
    most = [0] * planned.pp
    for pp_rank, found in world.run(planned.world, bytes_kept, planned):
        most[pp_rank] = max(most[pp_rank], found)
        assert planned.kind == "muon" or found == pytest.approx(stages[pp_rank], rel=0.05)
    assert most == pytest.approx(stages, rel=0.05)


@pytest.mark.parametrize("distributed", [False, True])
def test_gradients_that_are_sent_in_bf16_take_half_of_the_bytes(distributed: bool) -> None:
    described = Planned("llama", dp=2, dtype="bfloat16", distributed=distributed).described()
    narrow = replace(described, optimizer=replace(described.optimizer, bf16_reduce=True))
    wide, sent = (
        {each.kind: each.bytes for each in stage_traffic(run, 0) if each.group == "replicas"}
        for run in (described, narrow)
    )
    kind = "reduce_scatter" if distributed else "all_reduce"
    assert wide[kind] == 2 * sent[kind] > 0


SHARDED = [{"distributed": False}, *({"distributed": True, "zero": zero} for zero in (1, 2, 3))]
MORE = {
    ("bfloat16", "optim_grads_params"): 18 / 4 - 16 / 4,
    ("float16", "no_shard"): 20 - 18,
    ("float16", "optim"): (4 + 16 / 4) - (6 + 12 / 4),
    ("float16", "optim_grads"): (2 + 18 / 4) - (2 + 16 / 4),
    ("float16", "optim_grads_params"): 20 / 4 - 16 / 4,
}
"""Bytes of a parameter that Megatron-LM keeps on 4 ranks beside those that this trainer keeps."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sharded", SHARDED, ids=str)
def test_both_plans_count_the_same_state_but_for_what_only_megatron_lm_keeps(
    dtype: str, sharded: dict[str, Any]
) -> None:
    described = Planned("llama", dp=4, dtype=dtype, **sharded).described()
    [stage] = stage_memory(described)
    of_megatron = sum(state_bytes(described.run, RankShare(stage.parameters, 0)))
    more = MORE.get((dtype, described.run.sharding), 0)
    assert of_megatron - stage.kept == more * stage.parameters


@pytest.mark.parametrize("distributed", [False, True])
def test_each_optimizer_is_counted_with_its_own_state(distributed: bool) -> None:
    """Four bytes of each parameter less for SGD; for Muon of each matrix of a layer."""
    adam, sgd, muon = (
        stage_memory(Planned(kind=kind, dp=4, distributed=distributed).described())[0]
        for kind in ("adamw", "sgd", "muon")
    )
    assert adam.kept - sgd.kept == adam.parameters * 4 / (4 if distributed else 1)
    config = Planned().config
    layers = config.layer_count * (4 * 32 * 8 * (4 + 2) // 2 + 3 * 32 * config.mlp.ffn)
    if distributed:
        assert 0 < adam.kept - muon.kept <= layers * 4 / 4, (
            "no more than if matrices could be dealt out evenly"
        )
    else:
        assert adam.kept - muon.kept == layers * 4


def _granularities() -> Iterator[Any]:
    """Each model without and with recomputation, in turn. The other one of the two is slow."""
    for number, model in enumerate(MODELS):
        quick, other = ("selective", None) if number % 2 else (None, "selective")
        yield pytest.param(model, quick)
        yield pytest.param(model, other, marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "granularity"), [*_granularities()])
def test_activations_are_those_that_autograd_keeps(model: str, granularity: str | None) -> None:
    for dtype in ("float32", "bfloat16"):
        planned = Planned(
            model, wider=4, recompute=Recompute(granularity), microbatches=1, dtype=dtype
        )
        assert bytes_of_a_pass(planned) == pytest.approx(
            activations(planned.described().run, 0), rel=0.1
        )


@pytest.mark.parametrize("model", ["further tokens", "further tokens, tied", "mimo"])
def test_mtp_layers_that_pairs_do_not_train_keep_no_activations(model: str) -> None:
    planned = Planned(model, wider=4, microbatches=1, pairs=True)
    planned_bytes = activations(planned.described().run, 0)
    assert bytes_of_a_pass(planned) == pytest.approx(planned_bytes, rel=0.1)


@pytest.mark.parametrize("model", ["llama", "further tokens, tied"])
def test_a_head_that_vectors_do_not_train_keeps_no_activations(model: str) -> None:
    planned = Planned(model, wider=4, microbatches=1, vectors=True)
    planned_bytes = activations(planned.described().run, 0)
    assert bytes_of_a_pass(planned) == pytest.approx(planned_bytes, rel=0.1)


CARRIES = ("gemma4, layer inputs",)
"""Models whose layers pass more than one tensor on. Autograd's hooks don't see the tensors that recomputation keeps of them."""


@pytest.mark.parametrize("model", [model for model in MODELS if model not in CARRIES])
def test_full_recomputation_keeps_the_inputs_of_layers_and_of_further_predictions(
    model: str,
) -> None:
    planned = Planned(model, wider=4, recompute=FULL, microbatches=1, dtype="bfloat16")
    run = planned.described().run
    [chunk] = run.chunks(0)
    kept = activations(run, 0) - recomputed_bytes(run, chunk)
    assert bytes_of_a_pass(planned) == pytest.approx(kept, rel=0.1)


def test_activations_of_padded_experts_include_the_padding() -> None:
    plain, padded = (
        Planned("mixture", wider=4, microbatches=1, padded_to=factor) for factor in (None, 1.5)
    )
    described = [activations(planned.described().run, 0) for planned in (plain, padded)]
    assert described[1] > 1.1 * described[0]
    assert bytes_of_a_pass(padded) == pytest.approx(described[1], rel=0.1)


@pytest.mark.parametrize("how", ["p2p", "a2a"])
def test_activations_of_a_context_rank_are_those_of_its_tokens(how: str, world: World) -> None:
    planned = Planned("qwen3", cp=2, context=how, wider=4, microbatches=1)
    for found in world.run(2, bytes_of_a_pass_by, planned):
        assert found == pytest.approx(activations(planned.described().run, 0), rel=0.1)


@pytest.mark.parametrize("model", ["further tokens", "deepseek_v3", "latent, wide values"])
def test_activations_of_tensor_ranks_are_those_of_latent_attention(
    model: str, world: World
) -> None:
    """Values as wide as keys aren't padded. The joined input of a further token's layer keeps the rank's own tokens alone."""
    planned = Planned(model, tp=2, sequence=True, wider=4, microbatches=1, dtype="bfloat16")
    for found in world.run(2, bytes_of_a_pass_by, planned):
        assert found == pytest.approx(activations(planned.described().run, 0), rel=0.06)


def test_recomputed_activations_are_not_counted_as_kept() -> None:
    plain, selective, full = (
        activations(Planned(recompute=Recompute(granularity), microbatches=1).described().run, 0)
        for granularity in (None, "selective", "full")
    )
    assert full < selective < plain


def test_the_first_stage_keeps_the_passes_of_all_stages_behind_it() -> None:
    run = Planned("gpt2, untied", pp=4, microbatches=8).described().run
    head = activations(run, 3) - activations(
        Planned("gpt2, untied", pp=4, microbatches=1).described().run, 2
    )
    assert [activations(run, rank) // activations(run, 2) for rank in (0, 1, 2)] == [2, 1, 1]
    assert activations(run, 0) == 2 * activations(run, 2)
    assert head > 0


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(1, 1, 4), (4, 1, 4), (4, 1, 32), (4, 2, 8), (8, 4, 16)]
)
def test_the_bubble_of_equal_stages_is_the_published_one(
    pp: int, vpp: int, microbatches: int
) -> None:
    """arXiv:2104.04473, 2.2.2: (p - 1) / (v m) of the ideal time."""
    found = bubble(pp, vpp, microbatches, [2] * pp * vpp)
    assert found == pytest.approx((pp - 1) / (vpp * microbatches + pp - 1))


def test_a_long_stage_makes_the_others_wait() -> None:
    assert bubble(4, 1, 8, [3, 2, 2, 2]) > 0
    assert bubble(2, 1, 4, [1, 3]) < bubble(2, 1, 4, [2, 2]), (
        "of the busiest rank's time less is lost"
    )


def test_a_step_of_very_many_microbatches_is_planned_at_once() -> None:
    """All rounds after the first ones are alike, so they aren't gone through one by one."""
    for pp, vpp, layers in ((1, 1, [4]), (4, 1, [3, 2, 2, 1]), (4, 2, [1, 2, 1, 1, 1, 1, 1, 0])):
        few, many = (bubble(pp, vpp, pp * rounds, layers) for rounds in (400, 10**9))
        passes = timeline(pp, vpp, pp * 400, lambda stage, layers=layers: float(layers[stage]))
        busy = max(sum(layers[rank::pp]) for rank in range(pp)) * pp * 400 * 3
        assert few == pytest.approx(1 - busy / max(each.end for each in passes))
        assert 0 <= many <= few
    run, more = (
        Planned("gpt2, untied", pp=4, microbatches=count).described().run for count in (40, 10**9)
    )
    assert [activations(run, rank) for rank in range(4)] == [
        activations(more, rank) for rank in range(4)
    ]
