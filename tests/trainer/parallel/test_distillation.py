"""Distillation: ten steps of plain torch and transformers, with teachers of other shapes, at any layout."""

from dataclasses import dataclass
from pathlib import Path

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
from megatron_lite.objectives.taught import TeacherLoss
from megatron_lite.objectives.teacher import teacher_engine, with_teaching
from megatron_lite.parallel.grid import make_grid
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.options import (
    Balancing,
    Distillation,
    LoRA,
    ModelOptions,
    OptimizerOptions,
    Recompute,
)
from tests.trainer.parallel.compared_steps import require_as_alone, require_figures
from tests.trainer.parallel.worlds import World

FIXTURES = Path(__file__).parents[2] / "fixtures"
ROWS, LENGTH, MICROBATCHES, STEPS = 2, 16, 2, 10
LR, DECAY, BETAS = 5e-3, 0.1, (0.9, 0.95)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    distributed: bool = False
    stage: int = 1
    """Of ZeRO, if `distributed`."""
    recompute: Recompute = Recompute()  # noqa: RUF009  # frozen
    options: Distillation = Distillation()  # noqa: RUF009  # frozen
    lora: LoRA | None = None
    balance: Balancing = Balancing()  # noqa: RUF009  # frozen
    teacher: str = "mixtral-experts"
    student: str = "llama-all-linear"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def alone(self) -> "Case":
        """The same in one process."""
        return Case(
            options=self.options, lora=self.lora, teacher=self.teacher, student=self.student
        )

    def __str__(self) -> str:
        sizes = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "vpp", "dp", "cp", "ep")]
        words = [word for word in sizes if not word.endswith("p1")]
        words += ["sp"] * self.sequence_parallel + [f"zero{self.stage}"] * self.distributed
        words += ["lora"] * (self.lora is not None) + [self.recompute.granularity or ""]
        loss = self.options
        shown = f"alpha {loss.alpha} t {loss.temperature} beta {loss.beta}"
        return " ".join([self.student, "of", self.teacher, shown, *words]).strip()


def base(name: str) -> Path:
    return FIXTURES / f"peft-{name}" / "base"


def make(case: Case, device: torch.device = CPU) -> tuple[Engine, Engine]:
    """The student and its teacher."""
    source, taught = open_checkpoint(base(case.student)), open_checkpoint(base(case.teacher))
    stages = split_layers(source.config.layer_count, case.pp, case.vpp, LayerSplit())
    layout = Layout(case.tp, case.pp, case.vpp, case.ep, stage_layers=stages)
    has_experts = any(each.config.experts.count > 0 for each in (source, taught))
    grid = make_grid(layout, case.dp, device, cp=case.cp, experts=has_experts)
    options = ModelOptions(
        "float32", sequence_parallel=case.sequence_parallel, recompute=case.recompute, vocab_divisor=1 if case.tp == 1 else 2,
        lora=case.lora, balance=case.balance,
    )  # fmt: skip
    optimizer = OptimizerOptions(
        betas=BETAS, clip_grad=0, distributed=case.distributed, bucket_elements=500,
        shards_gradients=case.stage > 1, shards_parameters=case.stage > 2,
    )  # fmt: skip
    student = Engine(source.config, grid, options, optimizer, TeacherLoss(case.options))
    load_weights(student, source.tensors)
    if case.lora is not None:
        init_adapters(student, seed=7)
    return student, teacher_engine(student, taught.config, taught.tensors)


def batches(step: int) -> list[Microbatch]:
    """The microbatches of a step, some of whose labels don't count."""
    generator = torch.Generator().manual_seed(step % 2)
    found = []
    for index in range(MICROBATCHES):
        rows = torch.randint(7, 99, (ROWS, LENGTH + 1), generator=generator)
        counting = torch.rand(ROWS, LENGTH, generator=generator) < 0.7
        found.append(Microbatch(rows[:, :-1], rows[:, 1:], counting, index=index))
    return found


def train(_rank: int, case: Case) -> tuple[list[StepReport], dict[str, Tensor]]:
    student, teacher = make(case)
    grid, reports = student.grid, []
    for step in range(STEPS):
        own = batches(step)[grid.dp_rank :: grid.dp]
        reports.append(student.train_step(with_teaching(teacher, own), LR, DECAY))
    with student.whole_parameters():
        weights = {name: tensor.clone() for name, tensor in hugging_face_tensors(student)}
    grid.close()
    return reports, weights


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Of each token."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if beta in (0, 1):
        return kl(log_p, log_q) if beta else kl(log_q, log_p)
    mixed = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * kl(log_q, mixed) + (1 - beta) * kl(log_p, mixed)


def plain(case: Case) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same ten steps as one would write them."""
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(base(name), dtype=torch.float32)
        for name in (case.student, case.teacher)
    )
    options = case.options
    matrices = [parameter for parameter in student.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in student.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    found = []
    for step in range(STEPS):
        whole = batches(step)
        tokens = torch.cat([batch.tokens for batch in whole])
        labels = torch.cat([batch.labels for batch in whole])
        counting = torch.cat([batch.loss_mask for batch in whole if batch.loss_mask is not None])
        logits = student(tokens).logits
        with torch.no_grad():
            taught = teacher(tokens).logits
        log_p, log_q = ((each / options.temperature).log_softmax(-1) for each in (logits, taught))
        apart = divergence(log_p, log_q, options.beta) * options.temperature**2
        crossed = -logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
        apart, crossed = apart[counting].mean(), crossed[counting].mean()
        loss = options.alpha * apart + (1 - options.alpha) * crossed
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), float("inf"))
        optimizer.step()
        found.append({
            "loss": loss.item(), "grad_norm": norm.item(), "cross_entropy": crossed.item(), "divergence": apart.item(),
        })  # fmt: skip
    return found, {name: parameter.detach() for name, parameter in student.named_parameters()}


LOSSES = [
    Case(),
    Case(options=Distillation(0.7, 2.0), teacher="gpt2-conv1d"),
    Case(options=Distillation(0.5, 1.0, 1.0)),
    Case(options=Distillation(1.0, 1.5, 0.3), teacher="qwen3-5"),
    Case(student="mixtral-experts", teacher="llama-all-linear"),
]


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_ten_steps_are_those_of_plain_torch(case: Case) -> None:
    reports, weights = train(0, case)
    expected, trained = plain(case)
    assert expected[8]["loss"] < 0.97 * expected[0]["loss"], "something is learned"
    require_figures(reports, expected)
    if case.student == "llama-all-linear":  # transformers names the tensors of experts otherwise
        for name, tensor in trained.items():
            assert (weights[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


MIXED = Distillation(0.6, 2.0, 0.3)
QUICK = [
    Case(tp=2, dp=2, sequence_parallel=True, distributed=True, options=MIXED),
    Case(pp=2, teacher="qwen3-5", lora=LoRA(4, 8)),
]
FURTHER = [
    Case(tp=2, options=Distillation(0.6, 2.0, 1.0)),
    Case(tp=2, options=Distillation(0.6, 2.0)),
    Case(tp=2, pp=2, sequence_parallel=True, student="mixtral-experts", teacher="gpt-oss", ep=2),
    Case(dp=2, ep=2, student="mixtral-experts", teacher="llama-all-linear", options=MIXED),
    Case(cp=2, options=MIXED),
    Case(tp=2, cp=2, sequence_parallel=True, teacher="llama-all-linear", options=MIXED),
    Case(pp=2, vpp=2, student="qwen3-5", teacher="llama-all-linear"),
    Case(dp=2, distributed=True, stage=3, options=MIXED),
    Case(pp=4, student="qwen3-5", teacher="llama-all-linear", recompute=Recompute("full")),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_ten_steps_at_a_layout_are_those_of_one_process(case: Case, world: World) -> None:
    assert_as_alone(case, world)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER, ids=str)
def test_ten_steps_at_every_layout_are_those_of_one_process(case: Case, world: World) -> None:
    assert_as_alone(case, world)


def assert_as_alone(case: Case, world: World) -> None:
    expected, weights = train(0, case.alone())
    assert expected[8].loss < 0.97 * expected[0].loss, "of the same batch"
    require_as_alone(world.run(case.world, train, case), (expected, weights))


def test_a_model_learns_nothing_from_itself() -> None:
    case = Case(teacher="llama-all-linear")
    student, teacher = make(case)
    report = student.train_step(with_teaching(teacher, batches(0)), LR)
    assert report.loss == pytest.approx(0, abs=1e-6)
    assert report.grad_norm == pytest.approx(0, abs=1e-6)


def test_the_experts_of_a_teacher_drop_no_tokens() -> None:
    """The flags of capacity are for the student. A teacher with its capacity predicts something else than the model."""
    found = []
    for balance in (Balancing(), Balancing(capacity_factor=0.5, pads=True)):
        case = Case(student="mixtral-experts", balance=balance)
        student, teacher = make(case)
        assert student.options.balance == balance
        found.append(teacher.teaching(batches(0))[0].hidden)
    assert torch.equal(*found)
