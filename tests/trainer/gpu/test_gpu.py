"""Tests on a GPU: every small model and option against the CPU's losses, compiled layers, attention kernels, FP8,
grouped products, offloaded activations, equal bits of two runs, saves through pinned memory, generation, preferences,
and two ranks on NCCL."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaconv.model.fields import fields_of, from_fields
from megatron_lite.models import offload
from megatron_lite.models.moe.grouped import grouped_linear
from megatron_lite.models.state_space.kernels import CONVOLUTION, DELTA, KIMI_DELTA, SCAN, installed
from megatron_lite.products.transformer_engine import has_transformer_engine
from megatron_lite.settings.options import FP8
from tests.trainer.loop.launches import LLAMA, MIXTRAL, metrics, train
from tests.trainer.parallel.small import MODELS, Case, batches, make_engine
from tests.trainer.pretended_cuda.test_same_results import BF16, DROPOUT, FURTHER
from tests.trainer.pretended_cuda.test_uses import generated, prefer, require_same_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NEEDS_TE = pytest.mark.skipif(
    not has_transformer_engine(), reason="Transformer Engine is not installed"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STEPS = 5


def losses(case: Case, device: torch.device) -> list[float]:
    engine = make_engine(case, device=device)
    found = []
    for number in range(STEPS):
        own = [batch.to(device) for batch in batches(case, number)]
        found.append(engine.train_step(own, lr=1e-3, weight_decay=0.1).loss)
    engine.finish()
    return found


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_gpu_trains_as_a_cpu_does(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All computation is in fp32, also products."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if model == "deepseek_v32":
        # With few heads, ReLU makes several scores of a query 0, and devices choose different ones of equal scores.
        many = fields_of(MODELS[model]) | {"indexer.heads": 32}
        monkeypatch.setitem(MODELS, model, from_fields(model, many))
    assert losses(Case(model), GPU) == pytest.approx(losses(Case(model), CPU), rel=1e-4)


@pytest.mark.parametrize("model", ["qwen3", "gpt2", "mixtral"])
def test_compiled_layers_train_as_others_do(model: str) -> None:
    compiled = Case(model, options=(("compile", True),))
    assert losses(compiled, GPU) == pytest.approx(losses(Case(model), GPU), rel=1e-4)


DRAWN = ("dropout", "lora")
"""Options with random numbers. A GPU draws others."""


@pytest.mark.parametrize("option", [name for name in FURTHER if name not in DRAWN])
def test_each_option_trains_as_on_a_cpu(option: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case = FURTHER[option].case
    loose = BF16 in case.options or case.kind == "muon"
    assert losses(case, GPU) == pytest.approx(losses(case, CPU), rel=1e-2 if loose else 1e-4)


@pytest.mark.parametrize("option", DRAWN)
def test_random_numbers_are_the_same_in_a_second_run(option: str) -> None:
    case = FURTHER[option].case
    assert losses(case, GPU) == losses(case, GPU)


@pytest.mark.parametrize("model", ["qwen3", "mixtral", "hybrid", "deepseek_v3"])
def test_offloaded_activations_come_back(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of experts' rows have no fixed order, so that only a dense model has the same bits."""
    monkeypatch.setattr(offload, "LEAST", 64)
    case = Case(model, options=(BF16, *(DROPOUT if model == "qwen3" else ())))
    offloaded = replace(case, options=(*case.options, ("offloaded_layers", 3)))
    found, expected = losses(offloaded, GPU), losses(case, GPU)
    assert found == (expected if model == "qwen3" else pytest.approx(expected, rel=2e-3))


@pytest.mark.parametrize("model", ["deepseek_v3", "gemma3", "gpt2", "gpt_oss", "llama", "mixtral"])
def test_generated_tokens_are_those_of_a_cpu(model: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu, on_gpu = (generated(0, model, device) for device in (CPU, GPU))
    assert on_cpu is not None
    assert on_gpu is not None
    require_same_tokens(on_cpu, on_gpu)


def test_preferences_are_learned_as_on_a_cpu() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    (known, expected), (found, found_losses) = (prefer(device) for device in (CPU, GPU))
    for row, wanted in zip(found, known, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4)
    assert found_losses == pytest.approx(expected, rel=1e-4)


def test_muon_on_a_gpu_trains_as_on_a_cpu() -> None:
    case = Case("qwen3", kind="muon")
    assert losses(case, GPU) == pytest.approx(losses(case, CPU), rel=1e-2)


@pytest.mark.parametrize("backend", ["auto", "flash", "fused"])
@pytest.mark.parametrize("model", ["qwen3", "gpt_oss"])
def test_each_kernel_of_attention_agrees_with_plain_products(model: str, backend: str) -> None:
    """`flash` is FlashAttention if it is installed, else PyTorch's."""
    found, plain = (
        losses(Case(model, options=(("dtype", "bfloat16"), ("attention", name))), GPU)
        for name in (backend, "unfused")
    )
    assert found == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize(
    "engine", [False, pytest.param(True, marks=NEEDS_TE)], ids=["torch", "transformer engine"]
)
def test_products_in_fp8_learn_almost_as_those_in_bf16(recipe: str, engine: bool) -> None:
    of_bf16 = Case("llama", options=(("dtype", "bfloat16"),))
    of_fp8 = replace(
        of_bf16, options=(*of_bf16.options, ("fp8", FP8(recipe=recipe, transformer_engine=engine)))
    )
    assert losses(of_fp8, GPU) == pytest.approx(losses(of_bf16, GPU), rel=2e-2)


def test_the_grouped_product_of_experts_is_that_of_one_after_the_other() -> None:
    torch.manual_seed(1)
    counts = [16, 0, 48, 32]
    x = torch.randn(sum(counts), 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weights = [
        torch.randn(32, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in counts
    ]
    parts = zip(x.split(counts), weights, strict=True)
    found, expected = (
        grouped_linear(x, weights, counts),
        torch.cat([rows @ weight.t() for rows, weight in parts]),
    )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-1)
    ours, theirs = (
        torch.autograd.grad(made.square().sum(), [x, *weights]) for made in (found, expected)
    )
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=5e-2, atol=2.0)


def test_deterministic_runs_give_the_same_bits_and_one_that_saves_meanwhile_saves_those_of_its_step(
    tmp_path: Path,
) -> None:
    words = "--bf16 --train-iters 4 --save ckpt --save-interval 2 --ckpt-format torch --deterministic-mode"
    for name, more in (("once", ""), ("again", ""), ("meanwhile", "--async-save")):
        train(tmp_path / name, 1, f"pretrain {LLAMA} {words} {more}")
    for iteration in (2, 4):
        once, *others = (
            saved_weights(tmp_path / name / "ckpt", iteration)
            for name in ("once", "again", "meanwhile")
        )
        for other in others:
            assert all(torch.equal(other[name], tensor) for name, tensor in once.items())


def saved_weights(checkpoint: Path, iteration: int) -> dict[str, torch.Tensor]:
    file = checkpoint / f"iter_{iteration:07}" / "mp_rank_00" / "model_optim_rng.pt"
    model = torch.load(file, weights_only=False)["model"]
    return {name: tensor for name, tensor in model.items() if tensor is not None}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices")
@pytest.mark.parametrize(
    "command",
    [
        f"{LLAMA} --tp 2 --sequence-parallel",
        f"{LLAMA} --pp 2",
        f"{LLAMA} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        f"{LLAMA} --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce --overlap-param-gather",
        f"{LLAMA} --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather",
        f"{MIXTRAL} --ep 2",
    ],
    ids=["tensor", "pipeline", "data", "sharded gradients", "sharded parameters", "experts"],
)
def test_two_ranks_on_nccl_train_as_two_on_gloo(command: str, tmp_path: Path) -> None:
    found = []
    for backend in ("nccl", "gloo"):
        train(
            tmp_path / backend,
            2,
            f"pretrain {command} --train-iters 5 --distributed-backend {backend}",
        )
        found.append([line["loss"] for line in metrics(tmp_path / backend)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("model", ["mamba", "hybrid", "delta nets", "kimi"])
def test_installed_kernels_of_mixers_with_a_state_train_as_a_cpu_does(model: str) -> None:
    """The test runs in bf16, for which every kernel is made."""
    if not any(installed(package) for package in (SCAN, DELTA, KIMI_DELTA, CONVOLUTION)):
        pytest.skip("mamba_ssm, flash-linear-attention and causal_conv1d are not installed")
    case = Case(model, options=(("dtype", "bfloat16"),))
    assert losses(case, GPU) == pytest.approx(losses(case, CPU), rel=1e-2)
