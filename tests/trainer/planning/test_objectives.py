"""Pairs of answers, completions and a reference model are planned as the trainer works on them."""

from dataclasses import replace

import pytest

from megaconv.model.fields import changed
from megatron_lite.engine import Engine
from megatron_lite.inference.model import EngineModel
from megatron_lite.objectives.catalog import objective_of
from megatron_lite.objectives.pairs import Pairs
from megatron_lite.objectives.policy import Completed
from megatron_lite.objectives.rated_answers import RatedAnswers
from megatron_lite.planning.generation import cache_bytes, rows_at_once
from megatron_lite.planning.memory import stage_memory
from megatron_lite.planning.report import Planned as Report
from megatron_lite.planning.work import Work, work_of
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.config import Settings
from tests.trainer.parallel.worlds import World
from tests.trainer.planning.recorded import Planned, bytes_kept, make_engine

GENERATES = Work(rows=4, completion=8)


def settings_of(words: str) -> Settings:
    settings, _ = parse("finetune", words.split())
    return settings


def cache_of(_rank: int, planned: Planned) -> tuple[int, int]:
    """(pipeline rank, bytes of the cache that the trainer allocates to generate)."""
    engine = make_engine(planned)
    run = replace(planned.described(), work=GENERATES)
    found = EngineModel(engine, rows_at_once(run), run.sizes.seq).cache.bytes()
    rank = engine.grid.pp_rank
    engine.grid.close()
    return rank, found


@pytest.mark.parametrize(
    "planned",
    [
        Planned("qwen3", tp=2),
        Planned("llama", pp=2, dp=2, dtype="bfloat16"),
        Planned("gemma4, layer inputs", pp=2),
        Planned("deepseek_v3", ep=2, dp=2),
        Planned("falcon h1", tp=2),
        Planned("kimi", pp=2, dtype="bfloat16"),
        Planned("lfm3", pp=2),
    ],
    ids=str,
)
def test_the_cache_of_completions_is_the_one_that_the_trainer_allocates(
    planned: Planned, world: World
) -> None:
    run = replace(planned.described(), work=GENERATES)
    for pp_rank, found in world.run(planned.world, cache_of, planned):
        assert found == cache_bytes(run, pp_rank)


def kept_with_reference(_rank: int, planned: Planned) -> tuple[int, int]:
    """(bytes that a run keeps, bytes of the parameters of a reference model)."""
    _, kept = bytes_kept(0, planned)
    engine = make_engine(planned)
    reference = Engine(engine.config, engine.grid, engine.options, None)
    weights = sum(
        parameter.nbytes for chunk in reference.chunks for parameter in chunk.parameters()
    )
    engine.grid.close()
    return kept, weights


def test_a_reference_model_is_one_more_copy_of_the_weights_though_ranks_shard_the_trained_ones(
    world: World,
) -> None:
    planned = Planned("llama", dp=2, distributed=True, zero=3, dtype="bfloat16", wider=4)
    run = replace(planned.described(), work=Work(reference=True))
    (memory,) = stage_memory(run)
    for kept, reference in world.run(2, kept_with_reference, planned):
        assert kept == pytest.approx(memory.kept, rel=0.05)
        assert reference == memory.reference
    assert memory.total == memory.kept + memory.reference + memory.activations + memory.passing


def test_activations_and_the_cache_never_exist_at_one_time() -> None:
    run = replace(Planned("llama").described(), work=GENERATES)
    (memory,) = stage_memory(run)
    assert memory.generation > 0
    assert memory.total == memory.kept + max(memory.activations, memory.generation)


@pytest.mark.parametrize(
    "words",
    [
        "--grpo --reward r.py:one",
        "--grpo --reward r.py:one r.py:two --beta 0.1 --num-generations 4",
        "--grpo --reward r.py:one --num-iterations 2",
    ],
)
def test_the_work_of_completions_is_that_of_the_objective(words: str) -> None:
    settings = settings_of(words)
    objective = Completed(settings.grpo)
    work = work_of(settings)
    figures = objective.criterion(settings).loss_names(Planned().config)
    assert work.rows == objective.rows
    assert work.losses == len(figures)
    assert work.updates == settings.grpo.num_iterations


def test_the_work_of_pairs_is_that_of_the_objective() -> None:
    settings = settings_of("--dpo")
    figures = Pairs().criterion(settings).loss_names(Planned().config)
    work = work_of(settings)
    assert (work.rows, work.losses) == (Pairs.rows, len(figures))


def test_the_work_of_rated_answers_is_that_of_the_objective() -> None:
    settings = settings_of("--kto")
    figures = RatedAnswers().criterion(settings).loss_names(Planned().config)
    work = work_of(settings)
    assert (work.rows, work.losses, work.measured) == (RatedAnswers.rows, len(figures), 1)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--dpo",
        "--kto",
        "--grpo --reward r.py:one",
        "--reward-modeling",
        "--teacher-load t",
        "--teacher-load t --distill-on-policy",
    ],
)
def test_mtp_layers_rest_where_the_objective_does_not_train_them(words: str) -> None:
    settings = settings_of(words)
    criterion = objective_of(settings, "gpt").criterion(settings)
    assert work_of(settings).rests_mtp != criterion.trains_mtp


def test_mtp_layers_that_rest_take_weights_alone_and_no_time() -> None:
    """The activations, compute, gradients and optimizer state of a model without them."""
    planned = Planned("mimo", pairs=True)
    run = planned.described()
    alone = replace(run, config=changed(run.config, {"mtp_layers": 0}))
    trained = replace(run, work=replace(run.work, rests_mtp=False))
    (memory,), (without,), (whole,) = map(stage_memory, (run, alone, trained))
    assert memory.activations == without.activations < whole.activations
    resting = memory.parameters - without.parameters
    assert memory.kept == without.kept + resting * run.run.itemsize < whole.kept
    times = [Report(each).time for each in (run, alone, trained)]
    assert all(times)
    compute, of_alone, of_trained = (each.compute for each in times if each)
    assert compute == of_alone < of_trained


@pytest.mark.parametrize(
    ("words", "measured", "reference", "keeps_base"),
    [
        ("", 0, False, False),
        ("--beta 0.1", 1, True, False),
        ("--beta 0.1 --lora-rank 4", 1, False, True),
        ("--num-iterations 3", 1, False, False),
        ("--beta 0.1 --num-iterations 3", 2, True, False),
    ],
)
def test_passes_without_gradients_are_those_of_the_reference_and_of_the_model_before_updates(
    words: str, measured: int, reference: bool, keeps_base: bool
) -> None:
    work = work_of(settings_of(f"--grpo --reward r.py:one {words}"))
    assert (work.measured, work.reference) == (measured, reference)
    assert work.keeps_base == keeps_base
    assert work.head_again == (measured > 0)
