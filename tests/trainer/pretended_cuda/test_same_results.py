"""Training on a pretended GPU gives the losses of a CPU, mixes no devices, and waits no more often than it may."""

from dataclasses import replace
from typing import NamedTuple

import pytest

from megaconv.model.predicting import predicting_kinds
from megatron_lite.models.lora.whole import EMBEDDING, HEAD
from megatron_lite.settings.options import FP8, Balancing, LoRA, QkClip
from tests.trainer.parallel.small import FULL, MODELS, SELECTIVE, Case
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.pretended_cuda.steps import MICROBATCHES, Steps, take_steps

BF16 = ("dtype", "bfloat16")
BALANCED = ("balance", Balancing(losses=(("aux_loss", 0.01), ("seq_aux_loss", 0.01)), z_loss=1e-3))
PADDED = (
    "balance",
    Balancing(
        losses=(("aux_loss", 0.01), ("seq_aux_loss", 0.01), ("global_aux_loss", 0.01)),
        z_loss=1e-3,
        capacity_factor=1.0,
        pads=True,
    ),
)
DROPOUT = (("hidden_dropout", 0.1), ("attention_dropout", 0.1))
LORA = LoRA(rank=2, alpha=4.0, dropout=0.2)
PLAIN_LORA = LoRA(rank=2, alpha=4.0)
DORA = LoRA(rank=2, alpha=4.0, dora=True)
LAYERS = 4


def run(world: PretendedWorld, case: Case) -> list[Steps]:
    found: list[Steps] = world.run(case.world, take_steps, case)
    return found


def require_same(steps: Steps, *, of_loss: float, of_norm: float) -> None:
    """Require the results of a CPU, and a step that copies nothing from pageable memory."""
    assert not steps.unpinned
    losses, norms = zip(*steps.on_cpu, strict=True)
    found, found_norms = zip(*steps.on_gpu, strict=True)
    assert found == pytest.approx(losses, rel=of_loss)
    assert found_norms == pytest.approx(norms, rel=of_norm)


QUICK = ("deepseek_v3", "gpt2", "gpt_oss", "mpt")


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
    config = MODELS[model]
    kinds = [*config.layers, *predicting_kinds(config) * config.mtp_layers]
    of_experts = sum(kind.mlp == "experts" for kind in kinds)
    assert sum(steps.waits.values()) <= 1 + of_experts * MICROBATCHES, steps.waits


class Option(NamedTuple):
    """A case, and how often its step may wait for the device."""

    case: Case
    waits: int = 1


OF_EXPERTS = 1 + LAYERS * MICROBATCHES
"""Each layer and microbatch adds one wait: ranks have to know the numbers of rows."""

FURTHER = {
    "full recomputation": Option(Case("qwen3", recompute=FULL)),
    "selective recomputation": Option(Case("qwen3", recompute=SELECTIVE)),
    "blocks of logits in bf16": Option(Case("qwen3", options=(BF16, ("loss_rows", 8)))),
    "muon": Option(Case("qwen3", kind="muon")),
    "experts in bf16": Option(Case("mixtral", options=(BF16,)), OF_EXPERTS),
    "experts, recomputed and balanced": Option(
        Case("mixtral", recompute=FULL, options=(BF16, BALANCED)), OF_EXPERTS
    ),
    "experts, gathered": Option(
        Case("mixtral", options=(BF16, BALANCED, ("dispatcher", "allgather"))), OF_EXPERTS
    ),
    "experts, padded and recomputed": Option(
        Case("deepseek_v3", recompute=FULL, options=(BF16, PADDED))
    ),
    "experts, padded and gathered": Option(
        Case("mixtral", options=(BF16, PADDED, ("dispatcher", "allgather")))
    ),
    "experts, padded, with adapters": Option(
        Case("mixtral", options=(PADDED, ("lora", PLAIN_LORA)))
    ),
    "fp8": Option(Case("llama", options=(BF16, ("fp8", FP8(recipe="tensorwise"))))),
    "delayed fp8": Option(Case("llama", options=(BF16, ("fp8", FP8(recipe="delayed"))))),
    "dropout": Option(Case("qwen3", recompute=FULL, options=DROPOUT)),
    "moments in bf16": Option(Case("llama", moments=("bfloat16", "bfloat16"), options=(BF16,))),
    "gradients in bf16": Option(Case("llama", main_grads="bfloat16", options=(BF16,))),
    "gradients of experts in bf16": Option(
        Case("mixtral", main_grads="bfloat16", options=(BF16,)), OF_EXPERTS
    ),
    "lora": Option(Case("llama", options=(("lora", LORA),))),
    "dora": Option(Case("qwen3", options=(("lora", DORA),))),
    "dora in bf16": Option(Case("gpt2", recompute=FULL, options=(BF16, ("lora", DORA)))),
    "dora, dropout": Option(Case("llama", options=(("lora", replace(DORA, dropout=0.2)),))),
    "lora, rows of tokens": Option(
        Case(
            "qwen3",
            options=(
                BF16,
                ("lora", replace(PLAIN_LORA, rows=((EMBEDDING, (3, 9)), (HEAD, (3, 9))))),
            ),
        )
    ),
    "lora, embedding and head whole": Option(
        Case("qwen3", options=(BF16, ("lora", replace(PLAIN_LORA, whole=(EMBEDDING, HEAD)))))
    ),
    "clipped scores": Option(
        Case("qwen3", kind="muon", masked=False, qk_clip=QkClip(threshold=0.5)), waits=2
    ),
}


@pytest.mark.parametrize("option", FURTHER.values(), ids=FURTHER)
def test_each_option_trains_as_on_a_cpu(gpu_world: PretendedWorld, option: Option) -> None:
    (steps,) = run(gpu_world, option.case)
    if BF16 in option.case.options:
        require_same(steps, of_loss=1e-2, of_norm=5e-2)
    else:
        require_same(steps, of_loss=1e-5, of_norm=1e-4 if option.case.kind == "adamw" else 5e-2)
    assert sum(steps.waits.values()) == option.waits, steps.waits
