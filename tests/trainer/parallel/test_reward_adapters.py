"""Reward modeling with adapters: ten steps of transformers' class with LoRA and a whole head of scores, at any layout."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor, nn

from megaconv.checkpoint import open_checkpoint
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.model.fields import changed
from megaconv.model.ir import WEIGHT
from megatron_lite.checkpoint.adapters import gather_adapters, init_adapters
from megatron_lite.checkpoint.peft import adapter_files, read_adapter
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.score_loss import MARGIN
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.options import LoRA
from tests.trainer.parallel.compared_steps import figures, require_figures
from tests.trainer.parallel.test_reward_modeling import (
    BETAS,
    DECAY,
    LR,
    PAD,
    PAIRS,
    STEPS,
    Case,
    made,
    make,
    own,
    pairs,
)
from tests.trainer.parallel.worlds import World

pytestmark = pytest.mark.oracle
FIXTURES = Path(__file__).parents[2] / "fixtures"
HEAD = "score.weight"
LORA = LoRA(4, 8.0, ("q_proj", "v_proj", "down_proj"))
MARGINS = torch.tensor([0.0, 0.5, 2.0, -1.0])
"""Of the pairs of a step."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that transformers made and saved."""
    return made(Case(), tmp_path_factory.mktemp("rewards"))


def weights(engine: Engine) -> dict[str, Tensor]:
    """Adapters and head, whole on rank 0."""
    found = gather_adapters(engine)
    return {key.name: tensor for key, tensor in found.items() if key.slot == WEIGHT}


def fresh(case: Case, place: Path) -> Engine:
    engine = make(case, place, LORA)
    init_adapters(engine, seed=7)
    return engine


def with_margins(batch: Microbatch) -> Microbatch:
    margins = MARGINS.view(-1, 2)[batch.index]
    return replace(batch, extras={MARGIN: margins})


class Trained(NamedTuple):
    reports: list[StepReport]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def train(_rank: int, case: Case, place: Path) -> Trained:
    engine = fresh(case, place)
    before = weights(engine)
    reports = []
    for step in range(STEPS):
        batches = [with_margins(batch) for batch in own(engine, step)]
        reports.append(engine.train_step(batches, LR, DECAY))
    after = weights(engine)
    engine.grid.close()
    return Trained(reports, before, after)


class Adapted(nn.Module):
    """A frozen weight plus the product of two trained matrices."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, weight: Tensor) -> Tensor:
        changed: Tensor = weight + LORA.scale * self.b @ self.a
        return changed


@dataclass(frozen=True)
class Plain:
    """transformers' class with the same adapters, and the parameters that are trained by their names in peft."""

    model: nn.Module
    trained: dict[str, nn.Parameter]

    @classmethod
    def of(cls, place: Path, start: dict[str, Tensor]) -> "Plain":
        from torch.nn.utils.parametrize import register_parametrization
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(place, dtype=torch.float32)
        model.eval().requires_grad_(False)
        model.score.weight.requires_grad_(True)
        trained = {HEAD: model.score.weight}
        for name in sorted(name for name in start if name.endswith("lora_A.weight")):
            path = name.removesuffix(".lora_A.weight")
            name_b = f"{path}.lora_B.weight"
            added = Adapted(start[name], start[name_b])
            register_parametrization(model.get_submodule(path), "weight", added)
            trained |= {name: added.a, name_b: added.b}
        return cls(model, trained)

    def steps(self) -> list[dict[str, float]]:
        found = []
        optimizer = torch.optim.AdamW(self.trained.values(), lr=LR, betas=BETAS, weight_decay=DECAY)
        for step in range(STEPS):
            tokens = torch.stack([rows for rows, _ in pairs(step)]).flatten(0, 1)
            scores = self.model(tokens, attention_mask=(tokens != PAD).long()).logits
            chosen, rejected = scores.view(PAIRS, 2).unbind(1)
            loss = -F.logsigmoid(chosen - rejected - MARGINS).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), float("inf"))
            optimizer.step()
            found.append({
                "loss": loss.item(), "grad_norm": norm.item(), "chosen_score": chosen.mean().item(),
                "rejected_score": rejected.mean().item(), "score_margin": (chosen - rejected).mean().item(),
                "score_accuracy": (chosen > rejected).float().mean().item(),
            })  # fmt: skip
        return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


def test_ten_steps_with_margins_are_those_of_transformers(place: Path) -> None:
    reports, before, after = train(0, Case(), place)
    assert torch.equal(before[HEAD], load_file(place / "model.safetensors")[HEAD])
    plain = Plain.of(place, before)
    expected = plain.steps()
    assert expected[-1]["loss"] < 0.9 * expected[0]["loss"], "something is learned"
    require_figures(reports, expected)
    assert (after[HEAD] - before[HEAD]).norm() > 0.01
    assert_same(after, {name: tensor.detach() for name, tensor in plain.trained.items()})


QUICK = [
    Case(tp=2, sequence_parallel=True, sharding="optim", dp=2),
    Case(tp=2, pp=2),
]
FURTHER = [
    Case(tp=2),
    Case(pp=2, dp=2, sharding="optim"),
    Case(dp=2, sharding="optim_grads_params"),
    Case(cp=2),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_ten_steps_at_a_layout_are_those_of_one_process(
    case: Case, place: Path, world: World
) -> None:
    assert_as_alone(case, place, world)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER, ids=str)
def test_ten_steps_at_every_layout_are_those_of_one_process(
    case: Case, place: Path, world: World
) -> None:
    assert_as_alone(case, place, world)


def assert_as_alone(case: Case, place: Path, world: World) -> None:
    expected = train(0, Case(), place)
    ranks = world.run(case.world, train, case, place)
    for reports, *_ in ranks:
        require_figures(reports, map(figures, expected.reports))
    assert_same(ranks[0].before, expected.before)
    assert_same(ranks[0].after, expected.after)


def test_only_adapters_and_the_head_are_trained(place: Path) -> None:
    engine = fresh(Case(), place)
    (chunk,), (trained,) = engine.chunks, engine.trained
    learning = {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
    assert learning == {info.name for info in trained}
    others = [info.name for info in trained if ".adapter." not in info.name]
    assert others == ["output_layer.weight"]
    assert trained[-1].name == others[0], "the last of a forward pass"


def saved(place: Path, directory: Path) -> Path:
    """The files of a fresh adapter of the reward model."""
    engine = fresh(Case(), place)
    for name, content in adapter_files(weights(engine), engine.config, LORA, "base").items():
        (directory / name).write_bytes(bytes(content))
    return directory


def test_a_head_of_another_size_is_refused(place: Path, tmp_path: Path) -> None:
    three = changed(open_checkpoint(place).config, {"head.labels": 3})
    with pytest.raises(TensorMismatch, match=r"score.weight has shape \[1, 32\], the model needs"):
        read_adapter(saved(place, tmp_path), three)


def test_a_head_of_scores_is_refused_for_a_language_model(place: Path, tmp_path: Path) -> None:
    language_model = open_checkpoint(FIXTURES / "peft-llama-all-linear" / "base").config
    with pytest.raises(TensorMismatch, match=r"score.weight is not in the model; it belongs to"):
        read_adapter(saved(place, tmp_path), language_model)


def test_an_adapter_of_a_language_model_has_no_head(place: Path) -> None:
    config = open_checkpoint(place).config
    with pytest.raises(NotExpressible, match=r"no head of scores .* start from the result"):
        read_adapter(FIXTURES / "peft-llama-all-linear" / "adapter", config)
