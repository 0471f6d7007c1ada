"""Training on a pretended GPU gives the losses of a CPU, and mixes no devices."""

import pytest

from megatron_lite.settings.options import FP8, Balancing
from tests.trainer.parallel.small import FULL, MODELS, SELECTIVE, Case
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import Steps, take_steps

BF16 = ("dtype", "bfloat16")
BALANCED = ("balance", Balancing(losses=(("aux_loss", 0.01), ("seq_aux_loss", 0.01)), z_loss=1e-3))


def run(world: PretendedWorld, case: Case) -> list[Steps]:
    found: list[Steps] = world.run(case.world, take_steps, case)
    return found


def require_same(steps: Steps, *, of_loss: float, of_norm: float) -> None:
    losses, norms = zip(*steps.on_cpu, strict=True)
    found, found_norms = zip(*steps.on_gpu, strict=True)
    assert found == pytest.approx(losses, rel=of_loss)
    assert found_norms == pytest.approx(norms, rel=of_norm)


QUICK = ("deepseek_v3", "gpt2", "gpt_oss")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[] if model in QUICK else [pytest.mark.slow])
        for model in sorted(MODELS)
    ],
)
def test_each_model_trains_as_on_a_cpu(gpu_world: PretendedWorld, model: str) -> None:
    (steps,) = run(gpu_world, Case(model))
    require_same(steps, of_loss=1e-5, of_norm=1e-4)


FURTHER = {
    "full recomputation": Case("qwen3", recompute=FULL),
    "selective recomputation": Case("qwen3", recompute=SELECTIVE),
    "muon": Case("qwen3", kind="muon"),
    "experts in bf16": Case("mixtral", options=(BF16,)),
    "experts, recomputed and balanced": Case("mixtral", recompute=FULL, options=(BF16, BALANCED)),
    "fp8": Case("llama", options=(BF16, ("fp8", FP8(recipe="tensorwise")))),
    "delayed fp8": Case("llama", options=(BF16, ("fp8", FP8(recipe="delayed")))),
}


@pytest.mark.parametrize("case", FURTHER.values(), ids=FURTHER)
def test_each_option_trains_as_on_a_cpu(gpu_world: PretendedWorld, case: Case) -> None:
    (steps,) = run(gpu_world, case)
    require_same(steps, of_loss=1e-2, of_norm=5e-2)
