"""Some steps of a small model on the CPU, and the same on the pretended GPU: what each process of a test runs."""

from dataclasses import dataclass

import torch

from megatron_lite.checkpoint.adapters import init_adapters
from tests.trainer.parallel.small import Case, make_engine, own_batches
from tests.trainer.pretended_cuda.collectives import through_gloo
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.record import Record

STEPS, MICROBATCHES = 2, 2
CPU = torch.device("cpu")


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


def take_steps(_rank: int, case: Case) -> Steps:
    """Train on both devices."""
    on_cpu = _train(case, CPU, Record())
    record = Record()
    with PretendedGpu() as now, through_gloo():
        on_gpu = _train(case, GPU, record, now)
    return Steps(on_cpu, on_gpu, dict(record.launches), dict(record.waits), dict(record.unpinned))


def _train(
    case: Case, device: torch.device, second: Record, now: Record | None = None
) -> list[tuple[float, float]]:
    """Return (loss, norm) of each step. second: receives the record of the second step."""
    engine, found = make_engine(case, device=device), []
    if engine.options.lora is not None:
        init_adapters(engine, seed=7)
    for number in range(STEPS):
        if now is not None:
            now.clear()
        own = [batch.to(device) for batch in own_batches(case, number, engine)[:MICROBATCHES]]
        report = engine.train_step(own, lr=1e-3, weight_decay=0.1)
        found.append((report.loss, report.grad_norm))
        if now is not None and number == 1:
            for name in ("launches", "waits", "unpinned"):
                getattr(second, name).update(getattr(now, name))
    engine.finish()
    engine.grid.close()
    return found
