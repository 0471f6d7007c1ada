"""Activations of the first layers wait in pinned main memory: the same results, in the right order, in less memory."""

import gc
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_lite.models import offload
from megatron_lite.models.layer import Layer
from tests.trainer.parallel.small import Case, make_engine, own_batches
from tests.trainer.pretended_cuda.collectives import through_gloo
from tests.trainer.pretended_cuda.device import GPU, GpuTensor, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import Steps, take_steps
from tests.trainer.pretended_cuda.test_same_results import BF16, LORA

LEAST = 64
"""Elements of the smallest tensor that these small models offload."""


def offloaded(case: Case, layers: int) -> Case:
    return Case(**{**vars(case), "options": (*case.options, ("offloaded_layers", layers))})


def _take_steps(rank: int, case: Case) -> tuple[Steps, Steps]:
    """Return the steps with offloaded activations, and without."""
    with mock.patch.object(offload, "LEAST", LEAST):
        found = take_steps(rank, offloaded(case, 3))
    return found, take_steps(rank, case)


CASES = [
    Case("qwen3", options=(BF16,)),
    Case("mixtral", dp=2, ep=2, distributed=True, options=(BF16,)),
    Case("llama", dp=2, distributed=True, zero=3),
    Case("qwen3", options=(("hidden_dropout", 0.1),)),
    Case("llama", options=(("lora", LORA),)),
    Case("gemma3", options=(BF16,)),
    Case("hybrid"),
    Case("deepseek_v3"),
    Case("qwen3", tp=2, sequence_parallel=True),
]
QUICK = 1


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if number < QUICK else [pytest.mark.slow])
        for number, case in enumerate(CASES)
    ],
    ids=str,
)
def test_the_results_are_those_of_a_run_that_keeps_activations(
    gpu_world: PretendedWorld, case: Case
) -> None:
    """A use before the end of a copy would raise an error, or compute with NaN.

    A view comes back without the gaps of its storage, so that a CPU may sum it in another order.
    """
    for found, plain in gpu_world.run(case.world, _take_steps, case):
        for one, other in zip(found.on_gpu, plain.on_gpu, strict=True):
            assert one == pytest.approx(other, rel=1e-6)
        assert found.waits == plain.waits
        assert not found.unpinned


def _live_bytes() -> int:
    """Return the bytes of all tensors on the GPU."""
    gc.collect()
    storages = {
        id(x.memory): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if isinstance(x, GpuTensor)
    }
    return sum(storages.values())


def _memory(_rank: int, layers: int) -> tuple[list[int], list[int]]:
    """Return the bytes on the GPU after each layer's forward pass, and at the start of each layer's backward pass."""
    case = Case("qwen3", masked=False)
    ahead: list[int] = []
    back: list[int] = []

    def record(_layer: object, _inputs: object, made: Any) -> None:
        ahead.append(_live_bytes())
        made.register_hook(lambda _: back.append(_live_bytes()))

    with mock.patch.object(offload, "LEAST", LEAST), PretendedGpu(), through_gloo():
        engine = make_engine(offloaded(case, layers), device=GPU)
        for layer in engine.chunks[0].units():
            if isinstance(layer, Layer):
                layer.register_forward_hook(record)
        batch = own_batches(case, 0, engine)[0].to(GPU)
        engine.train_step([batch], lr=1e-3)
        engine.finish()
    return ahead, back


@pytest.mark.slow
def test_two_layers_activations_are_on_the_gpu_at_a_time(gpu_world: PretendedWorld) -> None:
    ((kept, _),) = gpu_world.run(1, _memory, 0)
    ((found, back),) = gpu_world.run(1, _memory, 3)
    of_layer = kept[1] - kept[0]
    assert kept[3] - kept[0] == pytest.approx(3 * of_layer, rel=0.01)
    assert found[1] - found[0] == pytest.approx(of_layer, rel=0.1)
    assert max(found) - found[1] < 0.1 * of_layer
    assert len(back) == 4
    # The following layer's activations and its own: as many as at the end of the forward pass.
    assert max(back) - found[1] < 0.6 * of_layer


def _kept_shapes(_rank: int, case: Case, overlaps: bool) -> list[torch.Size]:
    """Return the shapes of the tensors that go to main memory."""
    found: list[torch.Size] = []
    keep = offload.OfLayer.keep

    def recorded(own: offload.OfLayer, saved: torch.Tensor) -> int:
        found.append(saved.shape)
        return keep(own, saved)

    with (
        mock.patch.object(offload, "LEAST", LEAST),
        mock.patch.object(offload.OfLayer, "keep", recorded),
        PretendedGpu(),
        through_gloo(),
    ):
        engine = make_engine(offloaded(case, 3), device=GPU, overlap=overlaps)
        batch = own_batches(case, 0, engine)[0].to(GPU)
        engine.train_step([batch], lr=1e-3)
        engine.finish()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [False, True])
def test_sharded_parameters_are_no_activations(gpu_world: PretendedWorld, overlaps: bool) -> None:
    """They have memory only while their layer runs."""
    case = Case("llama", dp=2, distributed=True, zero=3)
    for shapes in gpu_world.run(2, _kept_shapes, case, overlaps):
        assert shapes
        weights = {(64, 32), (32, 32), (96, 32), (32, 48)}
        assert not weights.intersection(map(tuple, shapes))
