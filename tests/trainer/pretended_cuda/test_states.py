"""Kernels of mixers with a state on the pretended GPU: a step calls them no more often than it has to."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_lite.models.mixers import gated_delta_net, kimi_delta_attention, mamba_mixer
from megatron_lite.models.state_space import gated_delta, kimi_delta, mamba2
from megatron_lite.models.state_space.kernels import DELTA, KIMI_DELTA, SCAN, Package
from tests.trainer.parallel.small import FULL, Case, make_engine, own_batches
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.state_space.test_kernels import BODIES, with_defaults

MICROBATCHES = 2
LAYERS = {"mamba": 4, "delta nets": 3, "kimi": 3}
"""The layers with a state of each model."""
DIFFERENTIABLE = {
    SCAN: ("x", "dt", "A", "B", "C", "D"),
    DELTA: ("q", "k", "v", "g", "beta"),
    KIMI_DELTA: ("q", "k", "v", "g", "beta"),
}
CHOSEN_BY = (
    (mamba2, mamba_mixer, "scan_kernel", SCAN),
    (gated_delta, gated_delta_net, "delta_kernel", DELTA),
    (kimi_delta, kimi_delta_attention, "kimi_delta_kernel", KIMI_DELTA),
)
"""For each kernel: the module of the scan, the module of the mixer, and the function of both that chooses the kernel."""


class _Kernel(torch.autograd.Function):
    """A kernel that keeps its inputs for the backward pass, as those of mamba_ssm and flash-linear-attention do."""

    @staticmethod
    def forward(ctx: Any, body: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.body = body
        ctx.save_for_backward(*inputs)
        found: tuple[Tensor, Tensor] = body(*inputs)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            made = ctx.body(*inputs)
        return None, *torch.autograd.grad(made, inputs, grads)


@dataclass
class Step:
    """What happens in the second of two steps."""

    loss: float = 0.0
    norm: float = 0.0
    calls: int = 0
    launches: int = 0
    waits: int = 0
    limits: list[Tensor] = field(default_factory=list)
    """The ends of documents that a kernel has read on the host. It keeps what it found."""


@contextmanager
def _installed(step: Step, *, recomputed: bool) -> Iterator[None]:
    """Install stubs of the kernels. recomputed: mixers take the kernel for a scan in torch."""

    def run(package: Package, **given: Any) -> Any:
        step.calls += 1
        limits = given.get("cu_seqlens")
        if limits is not None and all(limits is not known for known in step.limits):
            step.limits.append(limits)
            limits.tolist()
        names = DIFFERENTIABLE[package]
        inputs = [given.pop(name) for name in names]
        return _Kernel.apply(partial(_by_torch, package, names, given), *inputs)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for scan, mixer, name, package in CHOSEN_BY:
            kernel = with_defaults(partial(run, package), package)
            seen_by_mixer = None if recomputed else kernel
            # A default binds the value of this turn of the loop.
            for module, found in ((scan, kernel), (mixer, seen_by_mixer)):
                chosen = mock.patch.object(module, name, lambda *_, found=found: found)
                stack.enter_context(chosen)
        yield


def _by_torch(package: Package, names: tuple[str, ...], others: Any, *inputs: Tensor) -> Any:
    """Compute what a package's kernel computes. Documents are read without a wait."""
    no_kernel = [mock.patch.object(scan, name, return_value=None) for scan, _, name, _ in CHOSEN_BY]
    with ExitStack() as stack:
        for patch in no_kernel:
            stack.enter_context(patch)
        limits = others.get("cu_seqlens")
        known = others if limits is None else {**others, "cu_seqlens": limits.held}
        return BODIES[package.module](**known, **dict(zip(names, inputs, strict=True)))


def _second_step(_rank: int, case: Case, recomputed: bool) -> Step:
    step = Step()
    with PretendedGpu() as record, _installed(step, recomputed=recomputed):
        engine = make_engine(case, device=GPU)
        for number in range(2):
            step.calls, step.limits = 0, []
            batches = [x.to(GPU) for x in own_batches(case, number, engine)[:MICROBATCHES]]
            record.clear()
            report = engine.train_step(batches, lr=1e-3, weight_decay=0.1)
        step.launches, step.waits = record.launches.total(), record.waits.total()
        engine.finish()
    step.loss, step.norm, step.limits = report.loss, report.grad_norm, []
    return step


@pytest.mark.parametrize(
    "model", ["mamba", "delta nets", pytest.param("kimi", marks=pytest.mark.slow)]
)
def test_a_kernel_is_not_called_again_for_the_backward_pass(
    gpu_world: PretendedWorld, model: str
) -> None:
    """It keeps its inputs alone, so that nothing is saved by a second forward pass."""
    case = Case(model)
    (once,), (twice,) = (
        gpu_world.run(1, _second_step, case, recomputed) for recomputed in (False, True)
    )
    assert once.calls == LAYERS[model] * MICROBATCHES
    assert twice.calls == 2 * once.calls
    assert once.launches < twice.launches
    assert (once.loss, once.norm) == (twice.loss, twice.norm)


@pytest.mark.slow
@pytest.mark.parametrize("model", LAYERS)
def test_full_recomputation_calls_a_kernel_twice(gpu_world: PretendedWorld, model: str) -> None:
    kept = Case(model)
    (once,), (twice,) = (
        gpu_world.run(1, _second_step, case, False)
        for case in (kept, replace(kept, recompute=FULL))
    )
    assert twice.calls == 2 * once.calls
    assert (once.loss, once.norm) == pytest.approx((twice.loss, twice.norm), rel=1e-6)


def test_the_ends_of_packed_documents_are_read_once_for_all_layers(
    gpu_world: PretendedWorld,
) -> None:
    """One wait is for the gradient norm, one for the documents of the microbatch that has some."""
    (step,) = gpu_world.run(1, _second_step, Case("delta nets"), False)
    assert step.waits == 2
