"""Tests on a GPU: every small model and option against the CPU's losses, compiled layers, attention kernels, FP8,
grouped products, offloaded activations, equal bits of two runs, saves through pinned memory, generation with and without
drafts, preferences, reward models, further objectives, images, and two, four and eight ranks on NCCL. test_rehearsal.py runs each
test on a CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.model.fields import fields_of, from_fields
from megatron_lite.models import offload
from megatron_lite.models.moe.grouped import grouped_linear
from megatron_lite.models.state_space.kernels import CONVOLUTION, DELTA, KIMI_DELTA, SCAN, installed
from megatron_lite.products.transformer_engine import has_transformer_engine
from megatron_lite.settings.options import FP8
from tests.trainer.inference.illustrated import in_layout
from tests.trainer.loop.launches import LLAMA, MIXTRAL, metrics, train
from tests.trainer.multimodal import create, write_chats
from tests.trainer.parallel.small import MODELS, Case, batches
from tests.trainer.parallel.small_rewards import RewardCase
from tests.trainer.pretended_cuda import test_drafting as drafting
from tests.trainer.pretended_cuda.steps import engine_of, score
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
NCCL = "nccl"
STEPS = 5


def losses(case: Case, device: torch.device) -> list[float]:
    engine = engine_of(case, device=device)
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


DRAWN = ("dropout", "lora", "dora, dropout")
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


@pytest.mark.parametrize("model", ["qwen3", "gpt2", "mixtral"])
def test_a_reward_model_learns_as_on_a_cpu(model: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    on_gpu, on_cpu = (score(RewardCase(model), device) for device in (GPU, CPU))
    for found, expected in zip(on_gpu.losses, on_cpu.losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    for figures, known in zip(on_gpu.figures, on_cpu.figures, strict=True):
        # Scores near 0 are sums of larger numbers.
        assert figures == pytest.approx(known, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("model", ["mimo", "further tokens"])
def test_drafts_and_answers_are_those_of_a_cpu(model: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    weights = drafting.learned_weights(model)
    found, expected = (
        drafting.drafted_by(drafting.engine_of(model, weights, device)) for device in (GPU, CPU)
    )
    assert found == expected


OBJECTIVES = (
    "hidden words", "hidden runs of words", "retrieved neighbours", "pairs", "scores of pairs", "rewards", "a teacher",
    "a teacher of own completions",
)  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_command_learns_what_it_learns_on_a_cpu(objective: str, tmp_path: Path) -> None:
    # Here, as it needs h5py: without that package all tests of this file would be skipped.
    from tests.trainer.pretended_cuda.test_commands import COMMANDS

    command = COMMANDS[objective]
    runs = []
    for name, more in (("gpu", ""), ("cpu", "--distributed-backend gloo")):
        directory = tmp_path / name
        directory.mkdir()
        command.write(directory)
        train(directory, 1, f"{command.words} {more}")
        runs.append([line["loss"] for line in metrics(directory) if "loss" in line])
    found, expected = runs
    assert found
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_a_command_learns_from_images_as_on_a_cpu(kind: str, tmp_path: Path) -> None:
    """transformers computes the encoder on the device too."""
    torch.backends.cuda.matmul.allow_tf32 = False
    create(kind, tmp_path / "hf")
    write_chats(tmp_path)
    found, expected = _learned_from_images(tmp_path, "chats.jsonl --seq-length 96")
    assert len(found) == 5
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_a_command_learns_from_pairs_with_images_as_on_a_cpu(kind: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    # Here, as it needs pillow: without that package all tests of this file would be skipped.
    from tests.trainer.loop.test_image_pair_runs import make

    make(kind, tmp_path)
    found, expected = _learned_from_images(tmp_path, "data/pairs.jsonl --dpo --seq-length 192")
    assert len(found) == 5
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_command_learns_from_rated_answers_with_images_as_on_a_cpu(tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    from tests.trainer.loop.test_image_rated_runs import make

    make("qwen3_vl", tmp_path)
    found, expected = _learned_from_images(tmp_path, "data/rated.jsonl --kto --seq-length 192")
    assert len(found) == 5
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_command_learns_images_from_a_teacher_as_on_a_cpu(tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    from tests.trainer.loop.test_image_distillation_runs import make

    make("qwen3_vl", "qwen2_5_vl", tmp_path)
    teacher = f"--teacher-load {tmp_path}/taught/hf"
    found, expected = _learned_from_images(tmp_path, f"data/chats.jsonl {teacher} --seq-length 96")
    assert len(found) == 5
    assert found == pytest.approx(expected, rel=1e-3)


def _learned_from_images(directory: Path, data: str) -> list[list[float]]:
    """The losses of a run on the GPU and of one on the CPU."""
    words = (
        f"finetune --load {directory}/hf --finetune-data {directory}/{data} --fp32 --micro-batch-size 2 --global-batch-size 4 "
        "--train-iters 5 --lr 1e-3 --log-interval 1 --metrics-file metrics.jsonl"
    )
    runs = []
    for name, more in (("gpu", ""), ("cpu", "--distributed-backend gloo")):
        train(directory / name, 1, f"{words} {more}")
        runs.append([line["loss"] for line in metrics(directory / name) if "loss" in line])
    return runs


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_a_prompt_with_images_has_the_logits_of_a_cpu(kind: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    create(kind, tmp_path / "hf")
    write_chats(tmp_path / "data")
    found, expected = (in_layout(0, tmp_path, 1, 1, 1, device) for device in (GPU, CPU))
    assert found is not None
    assert expected is not None
    for of_gpu, of_cpu in zip(found, expected, strict=True):
        assert (of_gpu - of_cpu).abs().max() <= 1e-3 * of_cpu.abs().max()


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


OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"
GRADIENTS = f"--data-parallel-sharding-strategy optim_grads {OVERLAPPED}"
PARAMETERS = f"--data-parallel-sharding-strategy optim_grads_params {OVERLAPPED}"
ON_NCCL = {
    "pipeline": (2, f"{LLAMA} --pp 2"),
    "tensor": (2, f"{LLAMA} --tp 2 --sequence-parallel"),
    "sharded parameters": (2, f"{LLAMA} {PARAMETERS}"),
    "experts": (2, f"{MIXTRAL} --ep 2"),
    "context, ring": (2, f"{LLAMA} --cp 2 --cp-comm-type p2p"),
    "context, gathered": (2, f"{LLAMA} --cp 2 --cp-comm-type all_gather"),
    "context, heads": (2, f"{LLAMA} --cp 2 --cp-comm-type a2a"),
    "data": (2, f"{LLAMA} --use-distributed-optimizer {OVERLAPPED}"),
    "sharded gradients": (2, f"{LLAMA} {GRADIENTS}"),
    "tensor, interleaved pipeline": (4, f"{LLAMA} --tp 2 --sequence-parallel --pp 2 --num-layers-per-virtual-pipeline-stage 1"),
    "pipeline of four": (4, f"{LLAMA} --pp 4"),
    "experts, sharded parameters": (4, f"{MIXTRAL} --ep 2 {PARAMETERS}"),
    "tensor, pipeline, data": (8, f"{LLAMA} --tp 2 --sequence-parallel --pp 2 --use-distributed-optimizer {OVERLAPPED}"),
    "tensor, context, sharded parameters": (8, f"{LLAMA} --tp 2 --sequence-parallel --cp 2 --cp-comm-type p2p {PARAMETERS}"),
}  # fmt: skip
"""(number of GPUs, command) by the kinds of parallelism."""


def _on_enough_gpus(name: str) -> Any:
    size = ON_NCCL[name][0]
    few = torch.cuda.device_count() < size
    return pytest.param(name, marks=pytest.mark.skipif(few, reason=f"fewer than {size} GPUs"))


@pytest.mark.parametrize("name", [_on_enough_gpus(name) for name in ON_NCCL])
def test_ranks_on_nccl_train_as_on_gloo(name: str, tmp_path: Path) -> None:
    size, command = ON_NCCL[name]
    found = []
    for backend in (NCCL, "gloo"):
        words = f"pretrain {command} --train-iters 5 --distributed-backend {backend}"
        train(tmp_path / f"{backend}-{len(found)}", size, words)
        found.append([line["loss"] for line in metrics(tmp_path / f"{backend}-{len(found)}")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("model", ["mamba", "hybrid", "delta nets", "kimi"])
def test_installed_kernels_of_mixers_with_a_state_train_as_a_cpu_does(model: str) -> None:
    """The test runs in bf16, for which every kernel is made."""
    if not any(installed(package) for package in (SCAN, DELTA, KIMI_DELTA, CONVOLUTION)):
        pytest.skip("mamba_ssm, flash-linear-attention and causal_conv1d are not installed")
    case = Case(model, options=(("dtype", "bfloat16"),))
    assert losses(case, GPU) == pytest.approx(losses(case, CPU), rel=1e-2)
