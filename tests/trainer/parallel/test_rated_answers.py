"""KTO: ten steps of plain torch and transformers, at any layout, on all weights and on adapters."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.weights import hugging_face_tensors
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.rated_answers import RatedAnswers, RatedFeeder
from megatron_lite.objectives.rated_loss import RatedLoss, Rating
from megatron_lite.parallel.grid import make_grid
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.config import make_settings
from megatron_lite.settings.options import LoRA, ModelOptions, OptimizerOptions, Recompute
from tests.trainer.parallel.compared_steps import require_as_alone, require_figures
from tests.trainer.parallel.worlds import World

FIXTURES = Path(__file__).parents[2] / "fixtures"
ANSWERS, LENGTH, STEPS = 4, 16, 10
LR, DECAY, BETAS = 5e-3, 0.1, (0.9, 0.95)
RATING = Rating(beta=0.5, desirable_weight=1.5, undesirable_weight=0.75)
GOOD = [(1, 0, 1, 1), (0, 0, 0, 0)]
"""The ratings of the answers of even and of odd steps."""


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    """1: the optimizer's state is sharded; 3: gradients and parameters too."""
    recompute: Recompute = Recompute()  # noqa: RUF009  # frozen
    lora: LoRA | None = None
    model: str = "llama-all-linear"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def base(self) -> Path:
        return FIXTURES / f"peft-{self.model}" / "base"

    def __str__(self) -> str:
        sizes = [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "dp", "cp", "zero")
            if getattr(self, name) > (name != "zero")
        ]
        words = [self.model, *sizes, self.recompute.granularity or ""]
        words += ["sp"] * self.sequence_parallel + ["lora"] * (self.lora is not None)
        return " ".join(filter(None, words))


def arrays(step: int) -> dict[str, Tensor]:
    """The arrays of a step's batch, [ANSWERS, ...]: each question with its answer and with another one."""
    generator = torch.Generator().manual_seed(step % 2)
    rows = torch.randint(7, 99, (ANSWERS, 2, LENGTH + 1), generator=generator)
    rows[:, 1, :5] = rows[:, 0, :5]
    ends = torch.randint(6, LENGTH, (ANSWERS, 2, 1), generator=generator)
    places = torch.arange(LENGTH)
    return {
        "tokens": rows[..., :-1],
        "labels": rows[..., 1:],
        "loss_mask": ((places >= 4) & (places < ends)).float(),
        "good": torch.tensor(GOOD[step % 2], dtype=torch.float64).unsqueeze(1),
    }


def own_batch(step: int, case: Case, dp_rank: int, reference: Tensor | None) -> dict[str, Tensor]:
    """This rank's arrays, [microbatches, micro_batch_size, ...]. reference: [ANSWERS, 2]."""
    known = torch.zeros(ANSWERS, 0, dtype=torch.float64) if reference is None else reference
    whole = {**arrays(step), "reference": known}
    size = 1 if case.dp > 1 else 2
    return {
        name: array.unflatten(0, (-1, size))[dp_rank :: case.dp] for name, array in whole.items()
    }


CPU = torch.device("cpu")


def make(case: Case, device: torch.device = CPU) -> Engine:
    source = open_checkpoint(case.base)
    stages = split_layers(source.config.layer_count, case.pp, 1, LayerSplit())
    layout = Layout(case.tp, case.pp, 1, stage_layers=stages)
    grid = make_grid(layout, case.dp, device, cp=case.cp, experts=source.config.experts.count > 0)
    options = ModelOptions(
        "float32", sequence_parallel=case.sequence_parallel, recompute=case.recompute, vocab_divisor=1 if case.tp == 1 else 2,
        lora=case.lora,
    )  # fmt: skip
    optimizer = OptimizerOptions(
        betas=BETAS, clip_grad=0, distributed=case.zero > 0, shards_gradients=case.zero > 1, shards_parameters=case.zero > 2,
        bucket_elements=500,
    )  # fmt: skip
    engine = Engine(source.config, grid, options, optimizer, RatedLoss(RATING))
    load_weights(engine, source.tensors)
    return engine


def feeder_of(engine: Engine) -> RatedFeeder:
    grid = engine.grid
    convert = RatedAnswers().microbatch
    plain = Feeder(convert, make_settings({}), grid.device, grid.dp, grid.dp_rank)
    return RatedFeeder(**vars(plain), engine=engine, completing=plain)


def references(feeder: RatedFeeder, case: Case, step: int) -> Tensor:
    """float64 [ANSWERS, 2]"""
    batch = own_batch(step, case, feeder.dp_rank, None)
    sums = feeder.engine.log_probs(feeder.microbatches(batch))
    return sums.transpose(0, 1).reshape(-1, 2).cpu()


def microbatches(feeder: RatedFeeder, case: Case, step: int, reference: Tensor) -> list[Microbatch]:
    return next(feeder.updates(0, own_batch(step, case, feeder.dp_rank, reference)))


def train(_rank: int, case: Case) -> tuple[list[StepReport], dict[str, Tensor]]:
    engine = make(case)
    feeder = feeder_of(engine)
    known = [references(feeder, case, step) for step in range(2)]
    if case.lora is not None:
        init_adapters(engine, seed=7)
    reports = [
        engine.train_step(microbatches(feeder, case, step, known[step % 2]), LR, DECAY)
        for step in range(STEPS)
    ]
    with engine.whole_parameters():
        weights = {name: tensor.clone() for name, tensor in hugging_face_tensors(engine)}
    engine.grid.close()
    return reports, weights


def log_probs(model: Any, batch: dict[str, Tensor], row: int) -> Tensor:
    """[ANSWERS]"""
    logits = model(batch["tokens"][:, row]).logits.log_softmax(-1)
    each = logits.gather(2, batch["labels"][:, row].unsqueeze(2)).squeeze(2)
    return (each * batch["loss_mask"][:, row]).sum(1)


def plain(case: Case) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same ten steps as one would write them, after KTOTrainer of TRL."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.base, dtype=torch.float32)
    before = copy.deepcopy(model)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    found = []
    for step in range(STEPS):
        batch = arrays(step)
        with torch.no_grad():
            divergence = (log_probs(model, batch, 1) - log_probs(before, batch, 1)).mean()
            divergence = divergence.clamp(min=0)
            reference = log_probs(before, batch, 0)
        gains = log_probs(model, batch, 0) - reference
        is_good = batch["good"][:, 0] == 1
        good, bad = gains[is_good], gains[~is_good]
        of_good = 1 - torch.sigmoid(RATING.beta * (good - divergence))
        of_bad = 1 - torch.sigmoid(RATING.beta * (divergence - bad))
        weighted = RATING.desirable_weight * of_good, RATING.undesirable_weight * of_bad
        loss = torch.cat(weighted).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        figures = {"loss": loss.item(), "grad_norm": norm.item(), "kl": divergence.item()}
        figures["rejected_reward"] = RATING.beta * bad.mean().item()
        if len(good):
            figures["chosen_reward"] = RATING.beta * good.mean().item()
        found.append(figures)
    return found, {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_ten_steps_are_those_of_plain_torch() -> None:
    case = Case()
    reports, weights = train(0, case)
    expected, trained = plain(case)
    assert expected[-1]["loss"] < 0.9 * expected[1]["loss"], "something is learned"
    assert max(each["kl"] for each in expected) > 0.01
    assert [report.tokens for report in reports] == [ANSWERS] * STEPS
    require_figures(reports, expected)
    for name, tensor in trained.items():
        assert (weights[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


QUICK = [
    Case(tp=2, sequence_parallel=True, zero=1, dp=2),
    Case(pp=2, lora=LoRA(4, 8)),
]
FURTHER = [
    Case(tp=2),
    Case(dp=4),
    Case(pp=2, dp=2, recompute=Recompute("full")),
    Case(cp=2),
    Case(dp=2, zero=3),
    Case(tp=2, cp=2, sequence_parallel=True, zero=1),
    Case(tp=2, sequence_parallel=True, dp=2, zero=1, lora=LoRA(4, 8)),
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
    alone = replace(Case(), lora=case.lora, model=case.model)
    expected, weights = train(0, alone)
    assert expected[-1].loss < 0.9 * expected[1].loss
    require_as_alone(world.run(case.world, train, case), (expected, weights))


def test_without_training_the_divergence_and_the_rewards_are_zero() -> None:
    case = Case(lora=LoRA(4, 8))
    engine = make(case)
    feeder = feeder_of(engine)
    known = references(feeder, case, 0)
    init_adapters(engine, seed=7)
    report = engine.train_step(microbatches(feeder, case, 0, known), LR)
    assert report.others == {"chosen_reward": 0, "rejected_reward": 0, "kl": 0}
    # Half of the mean of the weights.
    assert report.loss == pytest.approx((3 * 1.5 + 0.75) / 4 / 2, rel=1e-12)
    assert report.grad_norm > 0


def test_a_step_without_good_answers_has_no_reward_of_them() -> None:
    case = Case()
    engine = make(case)
    feeder = feeder_of(engine)
    report = engine.train_step(microbatches(feeder, case, 1, references(feeder, case, 1)), LR)
    assert set(report.others) == {"rejected_reward", "kl"}
