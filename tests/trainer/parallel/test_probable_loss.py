"""--finetune-loss dft: gradients are those of autograd, layouts agree, runs are those of TRL's SFTTrainer and go on to the same bits."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from megaconv.errors import UsageError
from megatron_lite.objectives.probable_loss import ProbableLoss
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.objective_flags import check_objective_flags
from tests.trainer.loop.launches import metrics, train
from tests.trainer.objectives.test_policy_loss import OneLayer
from tests.trainer.parallel.small import Case, Trained, make_engine, own_batches, weights_of
from tests.trainer.parallel.worlds import World

PYTHON = os.environ.get("TRL_PYTHON", "")
ROOT = Path(__file__).parents[3]
BASE = ROOT / "tests" / "fixtures" / "peft-llama-all-linear" / "base"
COUNT, STEPS, LR = 8, 6, "5e-3"
WORDS = (
    f"finetune --load {BASE} --finetune-data prompts.jsonl --finetune-loss dft --seq-length 16 --lr {LR} --lr-decay-style constant "
    f"--weight-decay 0 --clip-grad 0 --adam-beta2 0.95 --metrics-file metrics.jsonl --log-interval 1 --fp32 "
    f"--make-vocab-size-divisible-by 2 --train-iters {STEPS} --save ckpt --distributed-timeout-minutes 1"
)
ALL = f"{WORDS} --global-batch-size 2 --micro-batch-size 1 --eval-iters 0"


def write_prompts(directory: Path) -> None:
    """As many tokens in each example, so that each row has as many of them."""
    directory.mkdir(exist_ok=True)
    records = [{"prompt": f"{n} 2 {n}", "completion": f"3 {n} 4 {n}"} for n in range(7, 7 + COUNT)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))


def test_the_gradient_is_that_of_losses_times_constant_probabilities() -> None:
    hidden = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([[1, 2], [3, 4]])
    counting = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    stage: Any = OneLayer()
    run: Any = SimpleNamespace(labels=labels, share=0.25, label_weights=lambda: counting)
    total, found = ProbableLoss().loss(stage, (hidden,), run)
    total.backward()
    matrix = stage.matrix.detach().clone().requires_grad_()
    log_probs = (hidden @ matrix.t()).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    each = -log_probs.exp().detach() * log_probs * counting
    (each.sum() * 0.25).backward()
    torch.testing.assert_close(stage.matrix.grad, matrix.grad)
    shown = found["dft_loss"]
    torch.testing.assert_close(shown.losses * shown.weights, each.detach())
    plain = found["loss"]
    torch.testing.assert_close(plain.losses * plain.weights, (-log_probs * counting).detach())


def steps_of(_rank: int, case: Case) -> Trained:
    engine = make_engine(case, criterion=ProbableLoss())
    reports = [
        engine.train_step(own_batches(case, number, engine), lr=1e-2)
        for number in range(case.steps)
    ]
    engine.finish()
    with engine.whole_parameters():
        trained = Trained(reports, weights_of(engine))
    engine.grid.close()
    return trained


FURTHER = [
    Case(pp=2, vpp=2, cp=2, steps=3),
    Case("mixtral", tp=2, sequence_parallel=True, ep=2, steps=3),
    Case(dp=2, distributed=True, zero=3, steps=3),
]


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, pp=2, sequence_parallel=True, steps=3),
        *(pytest.param(case, marks=pytest.mark.slow) for case in FURTHER),
    ],
    ids=str,
)
def test_a_layout_trains_as_one_process_does(case: Case, world: World) -> None:
    (expected,) = world.run(1, steps_of, case.alone())
    assert expected.reports[0].others["dft_loss"] > 0
    for found in world.run(case.world, steps_of, case):
        for one, other in zip(found.reports, expected.reports, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-5)
            assert one.others["dft_loss"] == pytest.approx(other.others["dft_loss"], rel=1e-5)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "same"):
        write_prompts(tmp_path / name)
    command = f"{ALL} --split 75,25,0 --eval-interval 2".replace("--eval-iters 0", "--eval-iters 1")
    log = train(tmp_path / "whole", 1, command).log(0)
    assert "| dft loss 0." in log
    assert "validation loss" in log
    assert "perplexity" in log
    train(tmp_path / "same", 1, f"{command} --exit-interval 3")
    train(tmp_path / "same", 1, f"{command} --resume")
    runs = [
        [(line["loss"], line["dft_loss"]) for line in metrics(tmp_path / name) if "loss" in line]
        for name in ("whole", "same")
    ]
    assert runs[0] == runs[1]
    weights = [megaconv.fingerprint(tmp_path / name / "ckpt").weights for name in ("whole", "same")]
    assert weights[0] == weights[1]
    assert megaconv.convert(tmp_path / "whole" / "ckpt", tmp_path / "hf", saver="hf").parameters


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--finetune-loss dft", "--finetune-loss is the loss of --finetune-data, which is missing"),
        ("--finetune-loss dft --finetune-data p.jsonl --dpo", "--dpo has a loss of its own"),
        ("--finetune-loss dft --finetune-data p.jsonl --kto", "--kto has a loss of its own"),
        ("--finetune-loss dft --finetune-data p.jsonl --teacher-load t", "--teacher-load has a loss of its own"),
    ],
)  # fmt: skip
def test_other_objectives_have_their_own_loss(flags: str, words: str) -> None:
    given = f"--load {BASE} --train-iters 1 --save s {flags}"
    settings, _ = parse("finetune", given.split())
    with pytest.raises(UsageError, match=words):
        check_objective_flags(settings)


@pytest.mark.trl
@pytest.mark.skipif(not PYTHON, reason="TRL_PYTHON names no Python with trl")
def test_losses_gradients_and_weights_are_those_of_trl(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    words = (BASE, "prompts.jsonl", "theirs", STEPS, LR)
    command = [PYTHON, "-m", "tests.trl_dft", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    logs = [log for log in json.loads((tmp_path / "theirs/logs.json").read_text()) if "loss" in log]
    train(tmp_path, 1, f"{WORDS} --global-batch-size {COUNT // 2} --eval-iters 0")
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    assert len(lines) == len(logs) == STEPS
    for line, log in zip(lines, logs, strict=True):
        assert line["dft_loss"] == pytest.approx(log["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-4)
    megaconv.convert(tmp_path / "ckpt", tmp_path / "trained", saver="hf")
    found = load_file(tmp_path / "trained" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "theirs" / "model" / "model.safetensors").items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
