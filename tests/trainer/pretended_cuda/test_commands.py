"""Whole commands on the pretended GPU: each objective learns from its data what it learns on a CPU."""

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest
import torch

from megatron_lite.cli import main
from megatron_lite.processes import launch
from tests.trainer.loop import (
    test_distillation_runs,
    test_preference_runs,
    test_rated_runs,
    test_reward_runs,
    test_t5_runs,
)
from tests.trainer.loop.launches import BERT, LLAMA, MIXTRAL
from tests.trainer.objectives import test_policy_runs, test_retro
from tests.trainer.parallel import test_probable_loss
from tests.trainer.pretended_cuda.device import PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld
from tests.trainer.retrieval.retro_fixture import megatrons_project

DROPOUTS = "--hidden-dropout 0 --attention-dropout 0"
MEMORY = 80 << 30
FURTHER_FUNCTIONS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_bf16_supported": lambda *_: True,
    "set_device": lambda _: None,
    "get_device_name": lambda _=None: "NVIDIA H100 80GB HBM3",
    "mem_get_info": lambda _=None: (MEMORY, MEMORY),
    "max_memory_allocated": lambda _=None: 0,
}
"""Functions of torch.cuda that only commands call."""


class Command(NamedTuple):
    """A command, and a function that writes its files into a directory."""

    words: str
    write: Callable[[Path], object] = Path.exists
    continued: str = ""
    """Further words of a second run, which continues the first one; empty: there is none."""


def _write_pairs(directory: Path) -> None:
    test_reward_runs.write_pairs(directory, test_reward_runs.MARGINS)


def _write_words(directory: Path) -> None:
    words = (test_t5_runs.MASKED / "vocab.txt").read_text().splitlines()[: test_t5_runs.WORDS]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")


def _write_project(directory: Path) -> None:
    project = megatrons_project(directory / "P")
    config = json.loads((project / "config.json").read_text())
    (project / "config.json").write_text(json.dumps(config | {"retro_gpt_vocab_size": 63}))


SCORES = (
    f"{test_reward_runs.WORDS} --load {test_reward_runs.BASE} --center-rewards-coefficient 0.01 --global-batch-size 4 --split 50,50,0 "
    "--eval-interval 1 --eval-iters 1 --save ckpt --train-iters 3 --exit-interval 2"
)
SAVES = "--save ckpt --save-interval 1 --async-save --ckpt-format torch"
COMMANDS = {
    "rewards": Command(
        f"{test_policy_runs.WORDS} --num-generations 4 --num-iterations 2 --beta 0.1 --train-iters 2",
        test_policy_runs.write_task,
    ),
    "rewards, ratios of completions": Command(
        f"{test_policy_runs.WORDS} {test_policy_runs.GSPO} --mask-truncated-completions --num-generations 4 --num-iterations 2 "
        "--train-iters 2",
        test_policy_runs.write_task,
    ),
    "rewards, limited weights": Command(
        f"{test_policy_runs.WORDS} --num-generations 4 --loss-type cispo --train-iters 2", test_policy_runs.write_task
    ),
    "rewards, a smooth limit": Command(
        f"{test_policy_runs.WORDS} --num-generations 4 --num-iterations 2 --loss-type sapo --train-iters 2",
        test_policy_runs.write_task,
    ),
    "examples by probability": Command(f"{test_probable_loss.ALL} --train-iters 2", test_probable_loss.write_prompts),
    "text": Command(
        f"pretrain {LLAMA.replace('--eval-iters 0', '')} --train-iters 3 --eval-interval 1 --eval-iters 1 {SAVES}"
    ),
    "text, balanced": Command(f"pretrain {MIXTRAL} --train-iters 2 --moe-router-load-balancing-type aux_loss"),
    "pairs": Command(
        f"{test_preference_runs.WORDS} --eval-iters 0 --lora-rank 4 --lora-modules-to-save lm_head --train-iters 2 --save ckpt",
        test_preference_runs.write_pairs,
    ),
    "rated answers": Command(
        f"{test_rated_runs.WORDS} --eval-iters 0 --lora-rank 4 --train-iters 2", test_rated_runs.write_rated
    ),
    "a teacher": Command(
        f"{test_distillation_runs.WORDS} --teacher-load {test_distillation_runs.TEACHER} --distill-alpha 0.5 --eval-iters 0 "
        "--train-iters 2 --save ckpt",
        test_distillation_runs.write_prompts,
    ),
    "a teacher of own completions": Command(
        f"{test_distillation_runs.ON_POLICY} --eval-iters 0 --train-iters 2 --save ckpt",
        test_distillation_runs.write_prompts,
    ),
    "scores of pairs": Command(SCORES, _write_pairs, "--resume"),
    "scores of pairs, adapters": Command(f"{SCORES} --lora-rank 4", _write_pairs, "--resume"),
    "hidden words": Command(f"pretrain {BERT} {DROPOUTS} --train-iters 2 --save ckpt"),
    "retrieved neighbours": Command(
        f"pretrain {test_retro.MODEL} {test_retro.TRAINING} --retro-add-retriever --metrics-file metrics.jsonl",
        _write_project,
    ),
    "hidden runs of words": Command(
        f"pretrain {test_t5_runs.T5} {test_t5_runs.PLAIN} --train-iters 2 --save ckpt", _write_words
    ),
}  # fmt: skip
QUICK = ("hidden words",)


@contextmanager
def _gpu() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(PretendedGpu())
        for name, made in FURTHER_FUNCTIONS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, made))
        yield


def _failed(status: int) -> NoReturn:
    raise RuntimeError(f"the command ended with status {status}")


def _run(_rank: int, command: Command, directory: Path, on_gpu: bool) -> list[dict[str, float]]:
    """Return the lines of --metrics-file."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        with ExitStack() as stack:
            # Commands set variables that all ranks of a later test need to have, or none.
            stack.enter_context(mock.patch.dict(os.environ))
            stack.enter_context(mock.patch.object(launch, "leave", _failed))
            stack.enter_context(redirect_stdout(io.StringIO()))
            if on_gpu:
                stack.enter_context(_gpu())
            main(command.words.split())
            if command.continued:
                main([*command.words.split(), *command.continued.split()])
        lines = Path("metrics.jsonl").read_text().splitlines()
    finally:
        os.chdir(before)
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, command in COMMANDS.items()
    ],
)
def test_a_command_learns_what_it_learns_on_a_cpu(
    gpu_world: PretendedWorld, tmp_path: Path, command: Command
) -> None:
    runs = []
    for on_gpu in (False, True):
        directory = tmp_path / ("gpu" if on_gpu else "cpu")
        directory.mkdir()
        command.write(directory)
        runs += gpu_world.run(1, _run, command, directory, on_gpu)
    on_cpu, found = runs
    assert found
    if command.continued:
        assert found[-1]["iteration"] == 3
    names = {
        *("loss", "grad_norm", "reward", "kl", "reward_margin", "validation_loss", "sop_loss"),
        *(
            "chosen_score",
            "rejected_score",
            "score_margin",
            "cross_entropy",
            "divergence",
            "dft_loss",
        ),
    }
    for line, expected in zip(found, on_cpu, strict=True):
        for name in names & set(expected):
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
