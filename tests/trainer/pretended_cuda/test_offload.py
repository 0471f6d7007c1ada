"""Activations of the first layers wait in pinned main memory: the same results, in the right order, in less memory."""

import gc
from dataclasses import dataclass
from unittest import mock

import pytest

from megatron_lite.models import offload
from tests.trainer.parallel.small import Case, make_engine, own_batches
from tests.trainer.pretended_cuda.collectives import through_gloo
from tests.trainer.pretended_cuda.device import GPU, GpuTensor, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import Steps, take_steps
from tests.trainer.pretended_cuda.streams import STREAMS
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
def test_the_bits_are_those_of_a_run_that_keeps_activations(
    gpu_world: PretendedWorld, case: Case
) -> None:
    """A use before the end of a copy would raise an error, or compute with NaN."""
    for found, plain in gpu_world.run(case.world, _take_steps, case):
        assert found.on_gpu == plain.on_gpu
        assert found.waits == plain.waits
        assert not found.unpinned


@dataclass
class Seen:
    """The tensors on the GPU after the forward pass of a layer."""

    elements: list[int]
    copies: int
    """Copies to pinned memory whose end the host has not seen."""


def _live_elements() -> int:
    gc.collect()
    storages = {
        id(x.memory): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if isinstance(x, GpuTensor)
    }
    return sum(storages.values())


def _memory(_rank: int, layers: int) -> Seen:
    """Return the bytes on the GPU after each layer of a forward pass."""
    case = Case("qwen3", masked=False)
    seen = Seen([], 0)
    with mock.patch.object(offload, "LEAST", LEAST), PretendedGpu(), through_gloo():
        engine = make_engine(offloaded(case, layers), device=GPU)
        for layer in engine.chunks[0].decoder.layers:
            layer.register_forward_hook(lambda *_: seen.elements.append(_live_elements()))
        batch = own_batches(case, 0, engine)[0].to(GPU)
        engine.train_step([batch], lr=1e-3)
        seen.copies = len(STREAMS._copies)
        engine.finish()
    return seen


@pytest.mark.slow
def test_two_layers_activations_are_on_the_gpu_at_a_time(gpu_world: PretendedWorld) -> None:
    (kept,) = gpu_world.run(1, _memory, 0)
    (found,) = gpu_world.run(1, _memory, 3)
    of_layer = kept.elements[1] - kept.elements[0]
    assert found.copies > 0
    assert kept.elements[3] - kept.elements[0] == pytest.approx(3 * of_layer, rel=0.01)
    assert found.elements[3] - found.elements[1] < 1.3 * of_layer
