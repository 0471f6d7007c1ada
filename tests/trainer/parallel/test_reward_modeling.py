"""Reward modeling: ten steps of transformers' class with AdamW, at any layout, and the scores of the trained model."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.weights import hugging_face_tensors
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.score_loss import ScoreLoss
from megatron_lite.objectives.scored_model import scored
from megatron_lite.parallel.grid import make_grid
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.options import LoRA, ModelOptions, OptimizerOptions, Recompute
from tests.trainer.parallel import small
from tests.trainer.parallel.compared_steps import (
    require_as_alone,
    require_figures,
    require_matrices,
)
from tests.trainer.parallel.worlds import World

pytestmark = pytest.mark.oracle
FIXTURES = Path(__file__).parents[2] / "fixtures"
PAIRS, LENGTH, STEPS = 4, 16, 10
LR, DECAY, BETAS = 2e-3, 0.1, (0.9, 0.95)
PAD = 0
MODELS = {
    "llama-all-linear": "LlamaForSequenceClassification",
    "gpt2-conv1d": "GPT2ForSequenceClassification",
    "mixtral-experts": "MixtralForSequenceClassification",
}


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    sharding: str | None = None
    recompute: Recompute = Recompute()  # noqa: RUF009  # frozen
    center: float = 0.0
    """A bias that all scores share has a gradient only with a coefficient above 0."""
    model: str = "llama-all-linear"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        words = [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "dp", "cp", "ep")
            if getattr(self, name) > 1
        ]
        sequence = ["sp"] if self.sequence_parallel else []
        return " ".join(
            [self.model, *words, *sequence, self.sharding or "", self.recompute.granularity or ""]
        ).strip()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rewards")


def made(case: Case, directory: Path) -> Path:
    """The base as a reward model that transformers made and saved."""
    import transformers

    place = directory / case.model
    if not place.is_dir():
        torch.manual_seed(5)
        kind = getattr(transformers, MODELS[case.model])
        base = FIXTURES / f"peft-{case.model}" / "base"
        model = kind.from_pretrained(base, num_labels=1, pad_token_id=PAD, dtype=torch.float32)
        with torch.no_grad():
            model.score.weight.normal_(0.0, 0.3)
        model.save_pretrained(place)
    return place


def pairs(step: int) -> list[tuple[Tensor, Tensor]]:
    """(tokens, lengths) of each pair, [2, LENGTH] and [2]: the same beginning, answers of different length, padding."""
    generator = torch.Generator().manual_seed(step % 2)
    found = []
    for _ in range(PAIRS):
        rows = torch.randint(7, 99, (2, LENGTH), generator=generator)
        rows[1, :5] = rows[0, :5]
        lengths = torch.randint(6, LENGTH + 1, (2,), generator=generator)
        for row, length in enumerate(lengths):
            rows[row, length:] = PAD
        found.append((rows, lengths))
    return found


def make(case: Case, place: Path, lora: LoRA | None = None) -> Engine:
    source = open_checkpoint(place)
    layout = Layout(
        case.tp,
        case.pp,
        1,
        ep=case.ep,
        stage_layers=split_layers(source.config.layer_count, case.pp, 1, LayerSplit()),
    )
    has_experts = source.config.experts.count > 0
    grid = make_grid(layout, case.dp, torch.device("cpu"), cp=case.cp, experts=has_experts)
    options = ModelOptions(
        "float32", sequence_parallel=case.sequence_parallel, recompute=case.recompute, vocab_divisor=1 if case.tp == 1 else 2,
        lora=lora,
    )  # fmt: skip
    zero3 = case.sharding == "optim_grads_params"
    optimizer = OptimizerOptions(
        betas=BETAS, clip_grad=0, bucket_elements=500, distributed=case.sharding is not None, shards_gradients=zero3,
        shards_parameters=zero3,
    )  # fmt: skip
    engine = Engine(source.config, grid, options, optimizer, ScoreLoss(case.center))
    load_weights(engine, source.tensors)
    return engine


def own(engine: Engine, step: int) -> list[Microbatch]:
    """The microbatches of this data-parallel rank, with two pairs each."""
    every = []
    for index, first in enumerate(range(0, PAIRS, 2)):
        tokens, lengths = (
            torch.cat(parts) for parts in zip(*pairs(step)[first : first + 2], strict=True)
        )
        last = (torch.arange(LENGTH) == lengths.unsqueeze(1) - 1).float()
        every.append(Microbatch(tokens, tokens, last, index=index))
    return every[engine.grid.dp_rank :: engine.grid.dp]


def train(_rank: int, case: Case, place: Path) -> tuple[list[StepReport], dict[str, Tensor]]:
    engine = make(case, place)
    reports = [engine.train_step(own(engine, step), LR, DECAY) for step in range(STEPS)]
    with engine.whole_parameters():
        weights = {name: tensor.clone() for name, tensor in hugging_face_tensors(engine)}
    engine.grid.close()
    return reports, weights


def plain(case: Case, place: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same ten steps as one would write them. transformers finds the last tokens by the token of padding."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(place, dtype=torch.float32).eval()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    found = []
    for step in range(STEPS):
        tokens = torch.stack([rows for rows, _ in pairs(step)])
        visible = tokens != PAD
        scores = model(tokens.flatten(0, 1), attention_mask=visible.flatten(0, 1).long()).logits
        chosen, rejected = scores.view(PAIRS, 2).unbind(1)
        losses = -F.logsigmoid(chosen - rejected) + case.center * (chosen + rejected) ** 2
        optimizer.zero_grad()
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        found.append({
            "loss": losses.mean().item(), "grad_norm": norm.item(), "chosen_score": chosen.mean().item(),
            "rejected_score": rejected.mean().item(), "score_margin": (chosen - rejected).mean().item(),
            "score_accuracy": (chosen > rejected).float().mean().item(),
        })  # fmt: skip
    model.save_pretrained(place / "trained")
    return found, load_file(place / "trained" / "model.safetensors")


def assert_as_transformers(case: Case, place: Path) -> None:
    reports, weights = train(0, case, place)
    expected, trained = plain(case, place)
    assert expected[-1]["loss"] < 0.9 * expected[0]["loss"], "something is learned"
    assert [report.tokens for report in reports] == [PAIRS] * STEPS
    require_figures(reports, expected)
    assert "score.weight" in trained
    require_matrices(weights, trained)


@pytest.mark.parametrize("case", [Case(), Case(center=0.05)], ids=lambda case: f"{case.center}")
def test_ten_steps_are_those_of_transformers(case: Case, directory: Path) -> None:
    assert_as_transformers(case, made(case, directory))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2-conv1d", "mixtral-experts"])
def test_ten_steps_of_other_families_are_those_of_transformers(model: str, directory: Path) -> None:
    case = Case(model=model, center=0.05)
    assert_as_transformers(case, made(case, directory))


QUICK = [
    Case(tp=2, sequence_parallel=True, sharding="optim", dp=2),
    Case(tp=2, pp=2),
]
FURTHER = [
    Case(tp=2),
    Case(pp=2, dp=2, recompute=Recompute("full")),
    Case(dp=2, sharding="optim_grads_params"),
    Case(cp=2, center=0.05),
    Case(tp=2, cp=2, sequence_parallel=True, sharding="optim"),
    Case(model="gpt2-conv1d", pp=2, tp=2, sequence_parallel=True, center=0.05),
    Case(model="mixtral-experts", tp=2, sequence_parallel=True),
    Case(model="mixtral-experts", dp=2, ep=2),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_ten_steps_at_a_layout_are_those_of_one_process(
    case: Case, directory: Path, world: World
) -> None:
    assert_as_alone(case, made(case, directory), world)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER, ids=str)
def test_ten_steps_at_every_layout_are_those_of_one_process(
    case: Case, directory: Path, world: World
) -> None:
    assert_as_alone(case, made(case, directory), world)


def assert_as_alone(case: Case, place: Path, world: World) -> None:
    alone = Case(model=case.model, center=case.center)
    expected, weights = train(0, alone, place)
    assert expected[-1].loss < 0.9 * expected[0].loss
    require_as_alone(world.run(case.world, train, case, place), (expected, weights))


@pytest.mark.parametrize("model", ["further tokens", "further tokens, tied"])
def test_a_reward_model_has_no_mtp_layers(model: str) -> None:
    made = scored(small.MODELS[model], "place")
    assert (small.MODELS[model].mtp_layers, made.mtp_layers) == (2, 0)
    assert scored(made, "place") is made
