"""DPO: ten steps of plain torch and transformers, at any layout, on all weights and on adapters."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.weights import hugging_face_tensors
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.pair_loss import REFERENCE, PairLoss, Preference
from megatron_lite.parallel.grid import make_grid
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.options import LoRA, ModelOptions, OptimizerOptions, Recompute
from tests.trainer.parallel.compared_steps import require_as_alone, require_figures
from tests.trainer.parallel.worlds import World

FIXTURES = Path(__file__).parents[2] / "fixtures"
PAIRS, LENGTH, STEPS = 4, 16, 10
LR, DECAY, BETAS = 5e-3, 0.1, (0.9, 0.95)
SIGMOID = Preference(beta=0.5)


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    distributed: bool = False
    recompute: Recompute = Recompute()  # noqa: RUF009  # frozen
    preference: Preference = SIGMOID
    lora: LoRA | None = None
    model: str = "llama-all-linear"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def base(self) -> Path:
        return FIXTURES / f"peft-{self.model}" / "base"

    def __str__(self) -> str:
        words = [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "dp", "cp")
            if getattr(self, name) > 1
        ]
        flags = [
            word
            for word, said in (("sp", self.sequence_parallel), ("zero", self.distributed))
            if said
        ]
        lora = ["lora"] if self.lora is not None else []
        return " ".join(
            [
                self.model,
                self.preference.loss,
                *lora,
                *words,
                *flags,
                self.recompute.granularity or "",
            ]
        ).strip()


def pairs(step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(tokens, labels, labels that count) of each pair, [2, LENGTH]: the same beginning, answers of different length, padding."""
    generator = torch.Generator().manual_seed(step % 2)
    found = []
    for _ in range(PAIRS):
        rows = torch.randint(7, 99, (2, LENGTH + 1), generator=generator)
        rows[1, :5] = rows[0, :5]
        counting = torch.zeros(2, LENGTH)
        for row in range(2):
            counting[row, 4 : int(torch.randint(6, LENGTH, (1,), generator=generator))] = 1
        found.append((rows[:, :-1], rows[:, 1:], counting))
    return found


CPU = torch.device("cpu")


def make(case: Case, device: torch.device = CPU) -> Engine:
    source = open_checkpoint(case.base)
    layout = Layout(
        case.tp,
        case.pp,
        1,
        stage_layers=split_layers(source.config.layer_count, case.pp, 1, LayerSplit()),
    )
    grid = make_grid(layout, case.dp, device, cp=case.cp, experts=source.config.experts.count > 0)
    options = ModelOptions(
        "float32", sequence_parallel=case.sequence_parallel, recompute=case.recompute, vocab_divisor=1 if case.tp == 1 else 2,
        lora=case.lora,
    )  # fmt: skip
    optimizer = OptimizerOptions(
        betas=BETAS, clip_grad=0, distributed=case.distributed, bucket_elements=500
    )
    engine = Engine(source.config, grid, options, optimizer, PairLoss(case.preference))
    load_weights(engine, source.tensors)
    return engine


def own(engine: Engine, step: int, reference: Tensor | None) -> list[Microbatch]:
    """The microbatches of this data-parallel rank, with two pairs each. reference: [pairs, 2]."""
    every = []
    for index, first in enumerate(range(0, PAIRS, 2)):
        rows = [torch.cat(parts) for parts in zip(*pairs(step)[first : first + 2], strict=True)]
        extras = {} if reference is None else {REFERENCE: reference[first : first + 2].flatten()}
        whole = Microbatch(rows[0], rows[1], rows[2], extras=extras, index=index)
        every.append(whole.to(engine.grid.device))
    return every[engine.grid.dp_rank :: engine.grid.dp]


def references(engine: Engine, step: int) -> Tensor:
    """[pairs, 2]"""
    return engine.log_probs(own(engine, step, None)).transpose(0, 1).reshape(-1, 2)


def train(_rank: int, case: Case) -> tuple[list[StepReport], dict[str, Tensor]]:
    engine = make(case)
    known = [references(engine, step) for step in range(STEPS)]
    if case.lora is not None:
        init_adapters(engine, seed=7)
    reports = [
        engine.train_step(own(engine, step, known[step]), LR, DECAY) for step in range(STEPS)
    ]
    weights = {name: tensor.clone() for name, tensor in hugging_face_tensors(engine)}
    engine.grid.close()
    return reports, weights


def log_probs(
    model: Any, tokens: Tensor, labels: Tensor, counting: Tensor
) -> tuple[Tensor, Tensor]:
    """(summed over an answer, its length), of each row."""
    each = model(tokens).logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    return (each * counting).sum(1), counting.sum(1)


def plain(case: Case) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same ten steps as one would write them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.base, dtype=torch.float32)
    before, options = copy.deepcopy(model), case.preference
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    found = []
    for step in range(STEPS):
        losses, chosen, rejected = [], [], []
        for pair in pairs(step):
            policy, lengths = log_probs(model, *pair)
            with torch.no_grad():
                reference, _ = log_probs(before, *pair)
            gains = policy - reference
            rewards = options.beta * gains.detach()
            if not options.has_reference:
                gains = policy / lengths
                rewards = options.beta * gains.detach()
            if options.loss == "ipo":
                gains = gains / lengths
            margin, beta, smoothing = gains[0] - gains[1], options.beta, options.label_smoothing
            losses.append({
                "sigmoid": -(1 - smoothing) * F.logsigmoid(beta * margin) - smoothing * F.logsigmoid(-beta * margin),
                "hinge": torch.relu(1 - beta * margin),
                "ipo": (margin - 1 / (2 * beta)) ** 2,
                "simpo": -F.logsigmoid(beta * margin - options.gamma),
                "orpo": -gains[0] - beta * F.logsigmoid(margin - ((1 - gains[0].exp()) / (1 - gains[1].exp())).log()),
            }[options.loss])  # fmt: skip
            chosen.append(rewards[0].item())
            rejected.append(rewards[1].item())
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        right = [one > other for one, other in zip(chosen, rejected, strict=True)]
        found.append({
            "loss": loss.item(), "grad_norm": norm.item(), "chosen_reward": sum(chosen) / PAIRS, "rejected_reward": sum(rejected) / PAIRS,
            "reward_margin": (sum(chosen) - sum(rejected)) / PAIRS, "reward_accuracy": sum(right) / PAIRS,
        })  # fmt: skip
    return found, {name: parameter.detach() for name, parameter in model.named_parameters()}


LOSSES = [
    SIGMOID,
    Preference(beta=0.5, label_smoothing=0.2),
    Preference(beta=0.5, loss="hinge"),
    Preference(beta=0.1, loss="ipo"),
    Preference(beta=0.5, loss="simpo", gamma=0.2),
    Preference(beta=0.3, loss="orpo"),
]


@pytest.mark.parametrize("preference", LOSSES, ids=str)
def test_ten_steps_are_those_of_plain_torch(preference: Preference) -> None:
    case = Case(preference=preference)
    reports, weights = train(0, case)
    expected, trained = plain(case)
    assert expected[-1]["loss"] < 0.9 * expected[0]["loss"], "something is learned"
    assert [report.tokens for report in reports] == [PAIRS] * STEPS
    require_figures(reports, expected)
    for name, tensor in trained.items():
        assert (weights[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


QUICK = [
    Case(tp=2, sequence_parallel=True, distributed=True, dp=2),
    Case(pp=2, lora=LoRA(4, 8)),
]
FURTHER = [
    Case(tp=2),
    Case(pp=2, dp=2, recompute=Recompute("full")),
    Case(cp=2, preference=Preference(beta=0.1, loss="ipo")),
    Case(cp=2, preference=Preference(beta=0.5, loss="simpo")),
    Case(tp=2, pp=2, preference=Preference(beta=0.3, loss="orpo"), lora=LoRA(4, 8)),
    Case(tp=2, cp=2, sequence_parallel=True, distributed=True),
    Case(tp=2, sequence_parallel=True, dp=2, distributed=True, lora=LoRA(4, 8)),
    Case(model="gpt2-conv1d", pp=2),
    Case(model="mixtral-experts", tp=2, sequence_parallel=True),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_ten_steps_at_a_layout_are_those_of_one_process(case: Case, world: World) -> None:
    assert_as_alone(case, world)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER, ids=str)
def test_ten_steps_at_every_layout_are_those_of_one_process(case: Case, world: World) -> None:
    assert_as_alone(case, world)


def assert_as_alone(case: Case, world: World) -> None:
    expected, weights = train(
        0,
        replace(
            case,
            tp=1,
            pp=1,
            dp=1,
            cp=1,
            sequence_parallel=False,
            distributed=False,
            recompute=Recompute(),
        ),
    )
    assert expected[-1].loss < 0.9 * expected[0].loss
    require_as_alone(world.run(case.world, train, case), (expected, weights))


def test_the_reference_of_adapters_is_their_base_and_at_first_nothing_is_preferred() -> None:
    case = Case(lora=LoRA(4, 8))
    engine = make(case)
    known = references(engine, 0)
    init_adapters(engine, seed=7)
    assert torch.equal(known, references(engine, 0))
    report = engine.train_step(own(engine, 0, known), LR)
    assert report.loss == pytest.approx(0.6931471805599453, rel=1e-12)
    assert report.others == {
        "chosen_reward": 0,
        "rejected_reward": 0,
        "reward_margin": 0,
        "reward_accuracy": 0,
    }
    assert report.grad_norm > 0
    assert not torch.equal(known, references(engine, 0))
