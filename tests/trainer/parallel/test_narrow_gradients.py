"""--main-grads-dtype bf16: gradients are summed in bf16, over microbatches and over ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.engine import Engine
from megatron_lite.optimizer import narrow_update
from tests.trainer.loop.launches import LLAMA, metrics, train
from tests.trainer.loop.test_manners import refused
from tests.trainer.parallel.small import MICROBATCHES, Case, make_engine, own_batches
from tests.trainer.parallel.test_reward_adapters import LORA
from tests.trainer.parallel.worlds import World

BF16 = (("dtype", "bfloat16"),)
FLAGS = "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16"
NARROW = Case("llama", clip=0.0, masked=False, main_grads="bfloat16", options=BF16)


def gradients(engine: Engine) -> dict[str, Tensor]:
    assert engine.optimizer is not None
    return {item.name: item.gradient.clone() for item in engine.optimizer.ranges()}


def masters(engine: Engine) -> dict[str, Tensor]:
    assert engine.optimizer is not None
    return {item.name: item.master.detach().clone() for item in engine.optimizer.ranges()}


def gradients_of_each_microbatch(case: Case, step: int) -> list[dict[str, Tensor]]:
    """Autograd's gradients of the start, as parts of the mean over the step. A power of two divides without rounding."""
    engine = make_engine(replace(case, main_grads="float32", fuses=False))
    found = []
    for microbatch in own_batches(case, step, engine):
        engine.train_step([microbatch], lr=0.0)
        found.append({name: each / MICROBATCHES for name, each in gradients(engine).items()})
    return found


def summed_by_pytorch(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    totals = {name: part.to(torch.bfloat16) for name, part in parts[0].items()}
    for part in parts[1:]:
        for name, total in totals.items():
            total += part[name].to(torch.bfloat16)
    return totals


@pytest.mark.parametrize("block", [1000, 1 << 24])
@pytest.mark.parametrize("fuses", [False, True])
def test_a_step_is_a_plain_loop_that_sums_in_bf16(
    *, fuses: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bit of the sums. A product that is added inside the matrix product is rounded once less."""
    monkeypatch.setattr(narrow_update, "BLOCK", block)
    engine = make_engine(replace(NARROW, fuses=fuses))
    parts = gradients_of_each_microbatch(NARROW, 0)
    expected = summed_by_pytorch(parts)
    theirs = masters(engine)
    engine.train_step(own_batches(NARROW, 0, engine), lr=1e-3)
    found = gradients(engine)
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    in_float32 = {name: sum(part[name] for part in parts) for name in expected}
    assert any((found[name].float() - in_float32[name]).abs().max() > 0 for name in expected)
    for name, total in expected.items():
        if fuses:
            torch.testing.assert_close(found[name], total, rtol=2**-6, atol=2**-7 * float(total.abs().max()))  # fmt: skip
        else:
            assert torch.equal(found[name], total), name
        theirs[name].requires_grad_().grad = found[name].float()
    torch.optim.AdamW(theirs.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    for name, master in masters(engine).items():
        torch.testing.assert_close(master, theirs[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_take_half_of_their_bytes(*, lora: bool) -> None:
    case = replace(NARROW, options=(*BF16, ("lora", LORA))) if lora else NARROW
    narrow, wide = make_engine(case), make_engine(replace(case, main_grads="float32"))
    assert narrow.optimizer is not None
    assert wide.optimizer is not None
    assert wide.optimizer.bytes_per_parameter() - narrow.optimizer.bytes_per_parameter() == 2
    assert narrow.optimizer.bytes_per_parameter() == pytest.approx(16, rel=0.05)


def test_parameters_in_float32_have_gradients_in_float32() -> None:
    """Biases of Mamba and routers with --moe-router-dtype, as in Megatron, whose gradients have their parameters' dtype."""
    engine = make_engine(replace(NARROW, model="mamba"))
    assert engine.optimizer is not None
    assert {item.info.in_float32 for item in engine.optimizer.ranges()} == {False, True}
    for item in engine.optimizer.ranges():
        assert (item.gradient.dtype == torch.float32) == item.info.in_float32, item.name


def steps_of(_rank: int, case: Case) -> list[tuple[float, float]]:
    engine = make_engine(case)
    reports = [engine.train_step(own_batches(case, step, engine), 1e-2, 0.1) for step in range(3)]
    return [(report.loss, report.grad_norm) for report in reports]


LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2},
    {"dp": 2, "distributed": True},
    {"dp": 2, "distributed": True, "zero": 2},
    {"dp": 2, "distributed": True, "zero": 3},
    {"tp": 2, "pp": 2, "sequence_parallel": True},
    {"model": "mixtral", "ep": 2, "dp": 2, "distributed": True},
    {"model": "gpt2", "pp": 2, "dp": 2, "distributed": True},
    {"tp": 2, "dp": 2, "distributed": True, "options": (*BF16, ("lora", LORA))},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_at_a_layout_are_those_of_one_process(layout: dict[str, Any], world: World) -> None:
    """Ranks sum in another order, and each sum in bf16 is rounded."""
    case = replace(NARROW, clip=1.0, masked=True, **layout)
    (expected,) = world.run(1, steps_of, case.alone())
    for found in world.run(case.world, steps_of, case):
        for (loss, norm), (of_one, norm_of_one) in zip(found, expected, strict=True):
            assert loss == pytest.approx(of_one, rel=5e-3)
            assert norm == pytest.approx(norm_of_one, rel=3e-2)


def test_a_run_goes_on_with_the_same_bits_and_at_another_layout(tmp_path: Path) -> None:
    words = f"pretrain {LLAMA} {FLAGS} --use-distributed-optimizer --save ckpt --train-iters 4"
    whole = train(tmp_path / "whole", 1, words).log(0)
    assert "alone changes nothing" not in whole
    assert "16.00 bytes each with gradients and optimizer" in whole
    train(tmp_path / "parts", 1, f"{words} --exit-interval 2")
    train(tmp_path / "parts", 1, f"{words} --resume")
    train(tmp_path / "others", 1, f"{words} --exit-interval 2")
    sharded = "--data-parallel-sharding-strategy optim_grads_params --resume"
    train(tmp_path / "others", 2, f"{words} {sharded}")
    found, others, expected = (
        [line["loss"] for line in metrics(tmp_path / name)] for name in ("parts", "others", "whole")
    )
    assert found == expected
    assert others == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (FLAGS.replace("--use-precision-aware-optimizer ", ""), "--main-grads-dtype bf16 requires --use-precision-aware-optimizer"),
        (FLAGS.replace("--bf16 ", ""), "--main-grads-dtype bf16 requires --bf16"),
        (FLAGS.replace("--bf16 ", "--fp16 "), "--main-grads-dtype bf16 requires --bf16"),
        (f"{FLAGS} --optimizer sgd", "--main-grads-dtype bf16 is for --optimizer adam"),
        (FLAGS.replace("dtype bf16", "dtype fp8"), "--main-grads-dtype"),
        (f"{FLAGS} --main-params-dtype fp16", "--main-params-dtype"),
    ],
)  # fmt: skip
def test_gradients_that_cannot_be_summed_in_bf16_are_refused(
    flags: str, words: str, tmp_path: Path
) -> None:
    assert words in refused(tmp_path, f"pretrain {LLAMA} --train-iters 2 {flags}")
