"""Some steps of a small model on the CPU, and the same on the pretended GPU: what each process of a test runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from tests.trainer.parallel import small_pictures, small_rewards, small_taught, small_vectors
from tests.trainer.parallel.small import Case, make_engine, own_batches
from tests.trainer.pretended_cuda.collectives import through_gloo
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.record import Record

STEPS, MICROBATCHES = 2, 2
CPU = torch.device("cpu")
Figures = dict[str, float]


@dataclass(frozen=True)
class Steps:
    """The steps of one rank on both devices."""

    on_cpu: list[tuple[float, float]]
    """(loss, norm of the gradient) of each step."""
    on_gpu: list[tuple[float, float]]
    launches: dict[str, int]
    waits: dict[str, int]
    unpinned: dict[str, int]
    """launches, waits, unpinned: of the second step on the GPU."""


@dataclass(frozen=True)
class Scored:
    """The steps of a reward model, and an evaluation after them."""

    steps: Steps
    figures_on_cpu: list[Figures]
    """The further figures of each step, and the sums of the evaluation."""
    figures_on_gpu: list[Figures]
    waits: dict[str, int]
    unpinned: dict[str, int]
    """waits, unpinned: of the evaluation on the GPU."""


class _Setup(NamedTuple):
    """How a kind of case gets its engine and its microbatches."""

    make: Callable[..., Engine]
    batches: Callable[..., list[Microbatch]]


def engine_of(case: Case, *, device: torch.device) -> Engine:
    """Make a rank's engine, with fresh adapters if the case has some."""
    engine = make_engine(case, device=device)
    if engine.options.lora is not None:
        init_adapters(engine, seed=7)
    return engine


_LANGUAGE_MODEL = _Setup(engine_of, own_batches)
_ON_IMAGES = _Setup(engine_of, small_pictures.own_batches)
_STUDENT = _Setup(small_taught.make_engine, small_taught.own_batches)
_REWARD_MODEL = _Setup(small_rewards.make_engine, small_rewards.own_batches)
_EMBEDDING_MODEL = _Setup(small_vectors.make_engine, small_vectors.own_batches)


class Trainer:
    """Trains on one device, and keeps the records of the second step and of an evaluation."""

    def __init__(
        self, case: Any, setup: _Setup, device: torch.device, now: Record | None = None
    ) -> None:
        """now: the record of the device; None on the CPU."""
        self._case, self._batches, self._device = case, setup.batches, device
        self._now = Record() if now is None else now
        self._engine = setup.make(case, device=device)
        self.losses: list[tuple[float, float]] = []
        self.figures: list[Figures] = []
        self.second, self.evaluation = Record(), Record()

    def train(self) -> None:
        for number in range(STEPS):
            self._now.clear()
            report = self._engine.train_step(self._own(number), lr=1e-3, weight_decay=0.1)
            self.losses.append((report.loss, report.grad_norm))
            self.figures.append(dict(report.others))
        self.second = self._now.copy()

    def evaluate(self) -> None:
        own = self._own(STEPS)
        self._now.clear()
        found = self._engine.evaluate(own)
        self.evaluation = self._now.copy()
        self.figures.append({name: total for name, (total, _) in found.items()})

    def close(self) -> None:
        self._engine.finish()
        self._engine.grid.close()

    def _own(self, number: int) -> list[Microbatch]:
        own = self._batches(self._case, number, self._engine)[:MICROBATCHES]
        return [batch.to(self._device) for batch in own]


def take_steps(_rank: int, case: Case, *, images: bool = False, taught: bool = False) -> Steps:
    """Train on both devices. images: whether sequences have images. taught: whether the model learns from a teacher."""
    setup = _ON_IMAGES if images else _STUDENT if taught else _LANGUAGE_MODEL

    def run(device: torch.device, now: Record | None = None) -> Trainer:
        trainer = Trainer(case, setup, device, now)
        trainer.train()
        trainer.close()
        return trainer

    return _steps(*_on_both(run))


def score(
    case: small_rewards.RewardCase, device: torch.device, now: Record | None = None
) -> Trainer:
    """Train a reward model and evaluate it on one device."""
    return _trained(case, _REWARD_MODEL, device, now)


def _trained(case: Any, setup: _Setup, device: torch.device, now: Record | None = None) -> Trainer:
    """Train a model and evaluate it on one device."""
    trainer = Trainer(case, setup, device, now)
    trainer.train()
    trainer.evaluate()
    trainer.close()
    return trainer


def take_scored_steps(_rank: int, case: small_rewards.RewardCase) -> Scored:
    """Train a reward model and evaluate it on both devices."""
    return _scored(case, _REWARD_MODEL)


def take_vector_steps(_rank: int, case: small_vectors.VectorCase) -> Scored:
    """Train an embedding model and evaluate it on both devices."""
    return _scored(case, _EMBEDDING_MODEL)


def _scored(case: Any, setup: _Setup) -> Scored:
    on_cpu, on_gpu = _on_both(partial(_trained, case, setup))
    record = on_gpu.evaluation
    steps = _steps(on_cpu, on_gpu)
    return Scored(steps, on_cpu.figures, on_gpu.figures, dict(record.waits), dict(record.unpinned))


def _on_both(run: Callable[..., Trainer]) -> tuple[Trainer, Trainer]:
    on_cpu = run(CPU)
    with PretendedGpu() as now, through_gloo():
        return on_cpu, run(GPU, now)


def _steps(on_cpu: Trainer, on_gpu: Trainer) -> Steps:
    record = on_gpu.second
    return Steps(
        on_cpu.losses,
        on_gpu.losses,
        dict(record.launches),
        dict(record.waits),
        dict(record.unpinned),
    )
