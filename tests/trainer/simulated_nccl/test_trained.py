"""Every schedule trains on simulated NCCL, without a deadlock or a mismatched call, and with the same result."""

import threading
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lite.checkpoint.copies import Copies
from megatron_lite.checkpoint.rank_state import rank_snapshot
from megatron_lite.checkpoint.saver import Saver, has_checkpoint
from megatron_lite.checkpoint.snapshot import dist_snapshot
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.processes.blame import Beat, blamed
from megatron_lite.processes.calls import Counts, is_member
from megatron_lite.settings.options import Balancing, LoRA
from tests.trainer.parallel import small, small_rewards
from tests.trainer.parallel.small import FULL, Case, Trained, make_engine, step, train
from tests.trainer.parallel.small_rewards import RewardCase
from tests.trainer.parallel.test_mixtures import Mixture, own_batches
from tests.trainer.parallel.test_mixtures import make_engine as make_mixture
from tests.trainer.simulated_nccl.groups import RANK, run_ranks

STEPS = 2
RING, GATHER, HEADS = (("context", how) for how in ("p2p", "all_gather", "a2a"))
PADDED = ("balance", Balancing(capacity_factor=1.0, pads=True))

CASES = [
    Case("qwen3", pp=4),
    Case("qwen3", pp=2, vpp=2),
    Case("qwen3", pp=2, dp=4),
    Case("llama", pp=4, dp=2),
    Case("qwen3", pp=2, cp=2, options=(RING,)),
    Case("mixtral", dp=2, pp=2),
    Case("further tokens, tied", pp=2),
    Case("qwen3", tp=2, sequence_parallel=True, dp=2, distributed=True),
    Case("mixtral", dp=2, ep=2, distributed=True, zero=2),
    Case("llama", pp=2, vpp=2, dp=2, distributed=True, zero=3),
    Case("mixtral", dp=2, ep=2, distributed=True, zero=3, recompute=FULL),
]
"""Cases with at most 8 ranks."""
LARGE = [
    Case("qwen3", tp=2, pp=2, cp=2, dp=2, sequence_parallel=True, distributed=True),
    Case("llama", pp=4, dp=4, distributed=True),
    Case("qwen3", tp=2, pp=2, vpp=2, dp=2, recompute=FULL),
    Case("mixtral", tp=2, pp=2, dp=4, sequence_parallel=True),
    Case("further tokens, tied", pp=2, dp=4, distributed=True),
    Case("gpt_oss", pp=2, cp=2, dp=2, options=(RING,)),
    Case("qwen3", cp=4, dp=4, distributed=True, options=(GATHER,)),
    Case("qwen3", pp=4, cp=2, dp=2, options=(HEADS,)),
    Case("qwen3", pp=2, dp=2, kind="muon", distributed=True),
    Case("qwen3", dp=4, kind="muon", distributed=True, zero=3),
    Case("further tokens, tied", dp=4, ep=2, distributed=True, zero=3),
    Case("gpt_oss", tp=2, dp=4, ep=2, sequence_parallel=True, distributed=True, zero=3),
    Case("delta nets, experts", dp=2, distributed=True, zero=3),
    Case("gpt2", cp=2, dp=2, pp=2, distributed=True, zero=3, recompute=FULL, options=(RING,)),
    Case("hybrid", tp=2, dp=2, sequence_parallel=True, distributed=True, zero=2),
    Case("mixtral", dp=4, ep=4, distributed=True, recompute=FULL, options=(PADDED,)),
]
"""Up to 16 ranks."""


def _counted(rank: int, case: Case) -> tuple[Trained, Counts]:
    return train(rank, case), RANK.calls.counts()


def _check(case: Case, **network: Any) -> None:
    """Train, and compare with one process."""
    case = replace(case, steps=STEPS)
    expected = train(0, case.alone())
    found = run_ranks(case.world, _counted, case, **network)
    for trained, _ in found:
        assert trained.losses == pytest.approx(expected.losses, rel=1e-4)
    _check_counts([counts for _, counts in found])


def _check_counts(all_counts: list[Counts]) -> None:
    """All ranks of a group have made the same calls, so that the heartbeat may compare the counts."""
    for counts in all_counts:
        for key, (begun, _) in counts.items():
            for rank, other in enumerate(all_counts):
                if is_member(rank, key, other):
                    assert other[key][0] == begun, (key, rank)
    beats = [Beat(1, STEPS, 1000.0, "", counts) for counts in all_counts]
    assert blamed(beats, 600.0) is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_schedule_trains(case: Case) -> None:
    _check(case)


def test_stages_of_unequal_length_train(monkeypatch: pytest.MonkeyPatch) -> None:
    unequal = {1: (4,), 2: (1, 3)}
    monkeypatch.setattr(small, "split_layers", lambda _, pp, *__: unequal[pp])
    _check(Case("llama", pp=2, dp=2))


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
def test_a_schedule_trains_with_one_hardware_queue(case: Case) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1 means one queue."""
    _check(case, one_queue=True)


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_a_schedule_trains_with_one_communicator_for_all_messages_of_a_kind(case: Case) -> None:
    """torch 2.15 has groups with a communicator for each pair of ranks too, which the trainer takes. It could do without."""
    _check(case, one_communicator=True)


EXPERTS = Mixture("mixtral", pp=2, dp=2, ep=2)


def _same_tokens(case: Mixture, engine: Engine, step: int) -> list[Microbatch]:
    """All tokens are equal, so their router chooses the same experts, and other ranks get no rows."""
    batches = own_batches(case, engine, step)
    return [
        replace(batch, tokens=torch.zeros_like(batch.tokens), labels=torch.zeros_like(batch.labels))
        for batch in batches
    ]


def _train_experts(_rank: int, case: Mixture, *, empty: bool) -> list[float]:
    engine, draw = make_mixture(case), _same_tokens if empty else own_batches
    reports = [engine.train_step(draw(case, engine, number), 1e-3) for number in range(STEPS)]
    engine.finish()
    return [report.loss for report in reports]


@pytest.mark.parametrize("empty", [False, True])
def test_experts_on_several_ranks_train(empty: bool) -> None:
    alone = replace(EXPERTS, pp=1, dp=1, ep=1)
    expected = _train_experts(0, alone, empty=empty)
    for losses in run_ranks(4, partial(_train_experts, case=EXPERTS, empty=empty)):
        assert losses == pytest.approx(expected, rel=1e-4)


def _train_scores(_rank: int, case: RewardCase) -> list[dict[str, float]]:
    """Return loss and further figures of each step, and the sums of an evaluation."""
    engine = small_rewards.make_engine(case)
    found = []
    for number in range(STEPS):
        own = small_rewards.own_batches(case, number, engine)
        report = engine.train_step(own, 1e-3)
        found.append({"loss": report.loss, **report.others})
    evaluated = engine.evaluate(small_rewards.own_batches(case, STEPS, engine))
    found.append({name: total for name, (total, _) in evaluated.items()})
    engine.finish()
    return found


ADAPTERS = ("lora", LoRA(rank=2, alpha=4.0))
SCORED = [
    RewardCase("qwen3", tp=2, pp=2, dp=2, sequence_parallel=True, distributed=True),
    RewardCase("qwen3", pp=2, vpp=2, options=(ADAPTERS,)),
    RewardCase("qwen3", pp=2, cp=2, options=(RING,)),
    RewardCase("llama", pp=4, dp=2),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            RewardCase("qwen3", pp=4, dp=4, distributed=True, options=(ADAPTERS,)),
            RewardCase("qwen3", tp=2, pp=2, vpp=2, dp=2, options=(ADAPTERS,)),
            RewardCase("llama", tp=2, pp=2, dp=4),
            RewardCase("mixtral", tp=2, pp=2, dp=2, ep=2, sequence_parallel=True),
            RewardCase("qwen3", pp=2, dp=2, distributed=True, zero=3, recompute=FULL),
        )
    ),
]


@pytest.mark.parametrize("case", SCORED, ids=str)
def test_a_schedule_trains_and_evaluates_a_reward_model(case: RewardCase) -> None:
    """Only the last stage has the head. In some microbatches all answers end on the first context or tensor rank."""
    expected = _train_scores(0, case.alone())
    for found in run_ranks(case.world, _train_scores, case):
        for figures, alone in zip(found, expected, strict=True):
            assert figures == pytest.approx(alone, rel=1e-4, abs=1e-4)


TAKES = {"torch": rank_snapshot, "torch_dist": dist_snapshot}


def _train_and_save(rank: int, case: Case, root: Path, kind: str) -> list[float]:
    """Save after the first step, in a thread, while the second one runs."""
    engine, group, world = make_engine(case), dist.new_group(), RANK.world
    losses = [step(engine, case, 0).loss]
    common = {"iteration": 1, "args": Namespace()}
    snapshot = TAKES[kind](engine, common, with_optimizer=False, impl="local")
    snapshot = snapshot.copied(Copies())
    saver = Saver(root, kind, rank, group, {})

    def save() -> None:
        RANK.begin(world)
        failure: BaseException | None = None
        try:
            saver.save(snapshot)
        except BaseException as error:
            failure = error
        world.network.end(failure)

    world.network.start()
    saving = threading.Thread(target=save)
    saving.start()
    losses += [step(engine, case, number).loss for number in range(1, case.steps)]
    saving.join()
    return losses


@pytest.mark.parametrize("kind", TAKES)
def test_a_save_at_the_same_time_disturbs_nothing(kind: str, tmp_path: Path) -> None:
    case = Case("qwen3", pp=2, dp=2, distributed=True, steps=3)
    expected = train(0, case.alone())
    for losses in run_ranks(case.world, _train_and_save, case, tmp_path, kind):
        assert losses == pytest.approx(expected.losses, rel=1e-4)
    assert has_checkpoint(tmp_path)
    files = [path.suffix for path in (tmp_path / "iter_0000001").rglob("*")]
    assert files.count(".distcp") == (case.world if kind == "torch_dist" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_a_schedule_of_many_ranks_trains(case: Case) -> None:
    _check(case)
