"""Adam's moments in bf16: each update is PyTorch's in float32, and the moments are rounded between two steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaconv.model.training import ADAM
from megatron_lite.engine import Engine
from megatron_lite.optimizer import narrow_update
from tests.trainer.loop.launches import LLAMA, metrics, train
from tests.trainer.loop.test_manners import refused
from tests.trainer.parallel.small import Case, make_engine, own_batches
from tests.trainer.parallel.worlds import World

BOTH = ("bfloat16", "bfloat16")
FLAGS = (
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
)
ALONE = "--use-precision-aware-optimizer alone changes nothing"


@pytest.mark.parametrize("dtypes", [BOTH, ("bfloat16", "float32")], ids=["both", "first"])
@pytest.mark.parametrize("block", [1000, 1 << 24])
def test_a_step_is_pytorchs_own_with_rounded_moments(
    dtypes: tuple[str, str], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow_update, "BLOCK", block)
    case = Case("gpt2", clip=0.0, moments=dtypes)
    engine = make_engine(case)
    assert engine.optimizer is not None
    copies = {name: tensor.clone().requires_grad_() for _, name, tensor in engine.parameters()}
    groups = [
        {"params": [p for p in copies.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in copies.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), foreach=False)
    for number in range(5):
        engine.train_step(own_batches(case, number, engine), lr=1e-3, weight_decay=0.1)
        for item in engine.optimizer.ranges():
            copies[item.name].grad = item.gradient.view(item.shape).clone()
        theirs.step()
        for state in theirs.state.values():
            for slot, dtype in zip(ADAM, dtypes, strict=True):
                state[slot].copy_(state[slot].to(getattr(torch, dtype)))
        for _, name, tensor in engine.parameters():
            torch.testing.assert_close(tensor, copies[name].detach(), rtol=1e-5, atol=1e-7)


def moments(engine: Engine) -> list[Tensor]:
    assert engine.optimizer is not None
    return [
        tensor
        for item in engine.optimizer.ranges()
        for slot, tensor in item.tensors.items()
        if slot != "master"
    ]


def test_moments_take_half_of_their_bytes() -> None:
    case = Case("llama", options=(("dtype", "bfloat16"),))
    narrow, wide = make_engine(replace(case, moments=BOTH)), make_engine(case)
    assert {tensor.dtype for tensor in moments(narrow)} == {torch.bfloat16}
    assert narrow.optimizer is not None
    assert wide.optimizer is not None
    assert wide.optimizer.bytes_per_parameter() - narrow.optimizer.bytes_per_parameter() == 4
    assert narrow.optimizer.bytes_per_parameter() == pytest.approx(14, rel=0.01)


def losses_of(_rank: int, case: Case) -> list[float]:
    engine = make_engine(case)
    return [engine.train_step(own_batches(case, step, engine), 1e-2, 0.1).loss for step in range(4)]


LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "distributed": True},
    {"dp": 2, "distributed": True, "zero": 3},
    {"tp": 2, "pp": 2, "sequence_parallel": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_at_a_layout_are_those_of_one_process(layout: dict[str, Any], world: World) -> None:
    case = Case("qwen3", moments=BOTH)
    ((expected,), others) = world.run(1, losses_of, case), replace(case, **layout)
    for losses in world.run(others.world, losses_of, others):
        assert losses == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_run_goes_on_with_the_same_bits(form: str, tmp_path: Path) -> None:
    """Checkpoints hold the moments in float32, which rounds nothing."""
    words = f"pretrain {LLAMA} {FLAGS} --bf16 --ckpt-format {form} --save ckpt --train-iters 4"
    whole = train(tmp_path / "whole", 1, words).log(0)
    assert ALONE not in whole
    assert "14.00 bytes each with gradients and optimizer" in whole
    train(tmp_path / "parts", 1, f"{words} --exit-interval 2")
    train(tmp_path / "parts", 1, f"{words} --resume")
    found, expected = (
        [line["loss"] for line in metrics(tmp_path / name)] for name in ("parts", "whole")
    )
    assert found == expected


def test_a_line_says_that_the_flag_alone_changes_nothing(tmp_path: Path) -> None:
    words = f"pretrain {LLAMA} --bf16 --train-iters 2 --use-precision-aware-optimizer"
    log = train(tmp_path, 1, words).log(0)
    assert f"note: {ALONE}; add --main-grads-dtype, --exp-avg-dtype or --exp-avg-sq-dtype\n" in log
    assert "18.00 bytes each with gradients and optimizer" in log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (FLAGS.replace("--use-precision-aware-optimizer ", ""), "--exp-avg-dtype bf16 requires --use-precision-aware-optimizer"),
        (FLAGS.replace("0.95", "0.999"), "--exp-avg-sq-dtype bf16 with --adam-beta2 0.999: its 8 bits would round away each decay"),
        (f"{FLAGS} --optimizer sgd", "--exp-avg-dtype bf16 is for --optimizer adam"),
        (FLAGS.replace("dtype bf16", "dtype fp8"), "--exp-avg-dtype"),
    ],
)  # fmt: skip
def test_moments_that_cannot_be_kept_are_refused(flags: str, words: str, tmp_path: Path) -> None:
    assert words in refused(tmp_path, f"pretrain {LLAMA} --train-iters 2 {flags}")
