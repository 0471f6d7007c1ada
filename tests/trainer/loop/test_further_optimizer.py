"""A further optimizer is one class, its name, and a value of --optimizer: it trains, is planned, saved and resumed."""

import ast
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.model import training
from megaconv.model.ir import Key
from megatron_lite.optimizer.algorithm import Algorithm, Rates, TensorGroups, Update
from megatron_lite.optimizer.algorithms import ALGORITHMS
from megatron_lite.optimizer.ranges import FlatRange
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.planning.command import describe
from megatron_lite.planning.memory import stage_memory
from megatron_lite.settings.optimizers import OPTIMIZERS, Choice
from megatron_lite.settings.options import OptimizerOptions
from tests.package.test_architecture import fail_at, modules
from tests.runs import run as megaconv_command
from tests.trainer.loop.launches import LLAMA, launch


class SignUpdate:
    """Moves each weight by the learning rate against the sign of its momentum."""

    def __init__(self, ranges: Sequence[FlatRange], beta: float) -> None:
        self.ranges, self.beta = ranges, beta

    @torch.no_grad()
    def step(self, rates: Rates, factor: float) -> None:
        for item in self.ranges:
            momentum = item.tensors[training.MOMENTUM]
            momentum.mul_(self.beta).add_(item.gradient, alpha=factor)
            item.master.sub_(momentum.sign(), alpha=rates.lr_of(decoupled=item.info.decoupled))

    def continue_after(self, steps: int) -> None:
        assert steps >= 0


class Signum(Algorithm):
    """Signs of the momentum for matrices, AdamW for the rest."""

    state = training.SGD
    rest = ALGORITHMS["adamw"]

    def takes(self, info: ParameterInfo) -> bool:
        return info.decays and not info.decoupled

    def recorded(self, options: OptimizerOptions) -> Mapping[str, Any]:
        return {"momentum": options.momentum, "betas": options.betas}

    def update_of(
        self, ranges: Sequence[FlatRange], options: OptimizerOptions, groups: TensorGroups
    ) -> Update:
        return SignUpdate(ranges, options.momentum)


def register(_rank: int) -> None:
    ALGORITHMS["signum"] = Signum()
    OPTIMIZERS["signum"] = Choice("signum")


def train(directory: Path, size: int, flags: str) -> None:
    words = f"pretrain {LLAMA} --optimizer signum --bf16 --train-iters 4 --save ckpt {flags}"
    running = launch(directory, size, words, register)
    assert running.wait() == [0] * size, running.logs()


@pytest.mark.parametrize(
    ("size", "flags"), [(2, "--use-distributed-optimizer"), (1, "--ckpt-format torch")]
)
@pytest.mark.slow
def test_a_further_optimizer_trains_saves_and_goes_on_to_the_same_bits(
    size: int, flags: str, tmp_path: Path
) -> None:
    train(tmp_path / "straight", size, flags)
    for part in ("--exit-interval 2", "--resume"):
        train(tmp_path / "stopped", size, f"{flags} {part}")
    outcome = megaconv_command(
        "diff", tmp_path / "straight" / "ckpt", tmp_path / "stopped" / "ckpt"
    )
    assert outcome.status == 0, outcome
    slots = megaconv.open(tmp_path / "stopped" / "ckpt").slots
    assert state_of("layers.0.attn.q.weight", slots) == {training.MASTER, *training.SGD}
    assert state_of("embed.weight", slots) == {training.MASTER, *training.ADAM}


def state_of(name: str, slots: Mapping[Key, object]) -> set[str]:
    return {key.slot for key in slots if key.name == name}


def test_a_further_optimizer_is_planned_with_the_state_that_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ALGORITHMS, "signum", Signum())
    monkeypatch.setitem(OPTIMIZERS, "signum", Choice("signum"))
    adam, signum = (
        describe(None, f"{LLAMA} --optimizer {name}".split()) for name in ("adam", "signum")
    )
    (chunk,) = signum.run.chunks(0)
    taken = [info for info in signum.parameters(0, chunk) if Signum().takes(info)]
    elements = sum(prod(info.native.shape) for info in taken)
    assert stage_memory(adam)[0].kept - stage_memory(signum)[0].kept == 4 * elements > 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_state_of_every_optimizer_is_one_that_the_converter_reads(name: str) -> None:
    for each in ALGORITHMS[name].chain():
        assert each.state in (training.ADAM, training.SGD)


def test_every_value_of_the_flag_names_an_optimizer() -> None:
    assert {choice.kind for choice in OPTIMIZERS.values()} == set(ALGORITHMS)


def test_no_module_compares_the_name_of_an_optimizer() -> None:
    names = {*ALGORITHMS, *OPTIMIZERS}
    fail_at(
        [
            f"{path}:{node.lineno}: compares the name of an optimizer; ask the algorithm instead"
            for _, path in modules("megatron_lite")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Compare)
            and any(
                isinstance(side, ast.Constant) and side.value in names
                for side in (node.left, *node.comparators)
            )
        ]
    )
