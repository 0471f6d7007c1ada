"""Embedding models: ten steps of transformers' hidden states with AdamW and a plain InfoNCE loss, at any layout."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.finetuning.query_dataset import NO_DOCUMENT
from megatron_lite.engine import Engine
from megatron_lite.inference.weights import hugging_face_tensors
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.pooling import pooled_tokens
from megatron_lite.objectives.contrastive_loss import (
    ACCURACY,
    DOCUMENTS,
    QUERIES,
    ContrastiveLoss,
)
from megatron_lite.parallel.grid import make_grid
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.options import LoRA, ModelOptions, OptimizerOptions, Recompute
from tests.trainer.parallel.compared_steps import (
    require_as_alone,
    require_figures,
    require_matrices,
)
from tests.trainer.parallel.worlds import World

pytestmark = pytest.mark.oracle
FIXTURES = Path(__file__).parents[2] / "fixtures"
SAMPLES, LENGTH, STEPS, NEGATIVES = 8, 16, 10, 2
LR, DECAY, BETAS = 2e-3, 0.1, (0.9, 0.95)
TEMPERATURE = 0.1


@dataclass(frozen=True)
class Case:
    """A layout of a run. micro_batch: samples of a microbatch."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    sharding: str | None = None
    recompute: Recompute = Recompute()  # noqa: RUF009  # frozen
    pooling: str = "last"
    micro_batch: int = 2
    model: str = "llama-all-linear"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        words = [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "dp", "ep")
            if getattr(self, name) > 1
        ]
        sequence = ["sp"] if self.sequence_parallel else []
        more = [self.sharding or "", self.recompute.granularity or "", self.pooling]
        return " ".join([self.model, *words, *sequence, *more, f"of {self.micro_batch}"]).strip()


@dataclass(frozen=True)
class Step:
    """The samples of a step, each with its query, its document and its hard negatives."""

    tokens: Tensor
    """[SAMPLES, 2 + NEGATIVES, LENGTH]."""
    lengths: Tensor
    queries: Tensor
    """The number of each query's text."""
    documents: Tensor
    """[SAMPLES, 1 + NEGATIVES]."""


def step_of(number: int) -> Step:
    """Two queries are alike, two documents are alike, a hard negative is the own document of its query, and one is missing."""
    generator = torch.Generator().manual_seed(number % 2)
    rows = 2 + NEGATIVES
    tokens = torch.randint(7, 99, (SAMPLES, rows, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (SAMPLES, rows), generator=generator)
    queries = torch.arange(SAMPLES)
    documents = torch.arange(SAMPLES * (rows - 1)).view(SAMPLES, rows - 1) + 100
    for one, other in (((1, 0), (5, 0)), ((2, 1), (4, 1)), ((3, 1), (3, 2))):
        tokens[other], lengths[other] = tokens[one], lengths[one]
    queries[5] = queries[1]
    documents[4, 0] = documents[2, 0]
    documents[3, 1] = documents[3, 0]
    documents[6, NEGATIVES] = NO_DOCUMENT
    lengths[6, 1 + NEGATIVES] = 1
    return Step(tokens, lengths, queries, documents)


def own(engine: Engine, case: Case, step: Step) -> list[Microbatch]:
    """The microbatches of this data-parallel rank."""
    every = []
    for index, first in enumerate(range(0, SAMPLES, case.micro_batch)):
        part = slice(first, first + case.micro_batch)
        tokens = step.tokens[part].flatten(0, 1)
        chosen = pooled_tokens(step.lengths[part].flatten(), LENGTH, case.pooling)
        extras = {QUERIES: step.queries[part], DOCUMENTS: step.documents[part]}
        every.append(Microbatch(tokens, tokens, chosen, extras=extras, index=index))
    return every[engine.grid.dp_rank :: engine.grid.dp]


def make(case: Case, lora: LoRA | None = None) -> Engine:
    source = open_checkpoint(FIXTURES / f"peft-{case.model}" / "base")
    stage_layers = split_layers(source.config.layer_count, case.pp, 1, LayerSplit())
    layout = Layout(case.tp, case.pp, 1, ep=case.ep, stage_layers=stage_layers)
    has_experts = source.config.experts.count > 0
    grid = make_grid(layout, case.dp, torch.device("cpu"), experts=has_experts)
    options = ModelOptions(
        "float32", sequence_parallel=case.sequence_parallel, recompute=case.recompute, vocab_divisor=1 if case.tp == 1 else 2,
        lora=lora,
    )  # fmt: skip
    zero3 = case.sharding == "optim_grads_params"
    optimizer = OptimizerOptions(
        betas=BETAS, clip_grad=0, bucket_elements=500, distributed=case.sharding is not None, shards_gradients=zero3,
        shards_parameters=zero3,
    )  # fmt: skip
    engine = Engine(source.config, grid, options, optimizer, ContrastiveLoss(TEMPERATURE))
    load_weights(engine, source.tensors)
    return engine


def train(_rank: int, case: Case) -> tuple[list[StepReport], dict[str, Tensor]]:
    engine = make(case)
    reports = [
        engine.train_step(own(engine, case, step_of(number)), LR, DECAY) for number in range(STEPS)
    ]
    with engine.whole_parameters():
        weights = {name: tensor.clone() for name, tensor in hugging_face_tensors(engine)}
    engine.grid.close()
    return reports, weights


def plain_losses(vectors: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """The loss of each query, and whether its own document has the best score, by a loop over all queries and documents."""
    losses, best = [], []
    for query in range(SAMPLES):
        mine, scores = step.documents[query, 0], []
        for sample in range(SAMPLES):
            for place in range(1 + NEGATIVES):
                is_own = (sample, place) == (query, 0)
                number = step.documents[sample, place]
                answers_too = place == 0 and step.queries[sample] == step.queries[query]
                if is_own or not (number in (mine, NO_DOCUMENT) or answers_too):
                    score = vectors[query, 0] @ vectors[sample, 1 + place] / TEMPERATURE
                    scores.insert(0, score) if is_own else scores.append(score)
        together = torch.stack(scores)
        losses.append(-together.log_softmax(0)[0])
        best.append(together.argmax() == 0)
    return torch.stack(losses), torch.stack(best).float()


def plain(case: Case, directory: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same ten steps as one would write them."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base = FIXTURES / f"peft-{case.model}" / "base"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    found = []
    for number in range(STEPS):
        step = step_of(number)
        lengths = step.lengths.flatten()
        visible = torch.arange(LENGTH) < lengths.unsqueeze(1)
        hidden = model.base_model(
            step.tokens.flatten(0, 1), attention_mask=visible.long()
        ).last_hidden_state
        if case.pooling == "last":
            pooled = hidden[torch.arange(len(lengths)), lengths - 1]
        else:
            pooled = (hidden * visible.unsqueeze(2)).sum(1) / lengths.unsqueeze(1)
        vectors = F.normalize(pooled, dim=1).view(SAMPLES, 2 + NEGATIVES, -1)
        losses, best = plain_losses(vectors, step)
        optimizer.zero_grad()
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        found.append({
            "loss": losses.mean().item(), "grad_norm": norm.item(), ACCURACY: best.mean().item(),
        })  # fmt: skip
    model.save_pretrained(directory)
    return found, load_file(directory / "model.safetensors")


def assert_as_transformers(case: Case, directory: Path) -> None:
    reports, weights = train(0, case)
    expected, trained = plain(case, directory)
    assert expected[-1]["loss"] < 0.9 * expected[0]["loss"], "something is learned"
    assert [report.tokens for report in reports] == [SAMPLES] * STEPS
    require_figures(reports, expected)
    require_matrices(weights, trained)


@pytest.mark.parametrize("case", [Case(), Case(pooling="mean", micro_batch=SAMPLES)], ids=str)
def test_ten_steps_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    assert_as_transformers(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2-conv1d", "mixtral-experts"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_ten_steps_of_other_families_are_those_of_transformers(
    model: str, pooling: str, tmp_path: Path
) -> None:
    assert_as_transformers(Case(model=model, pooling=pooling), tmp_path)


QUICK = [
    Case(tp=2, sequence_parallel=True, sharding="optim", dp=2),
    Case(tp=2, pp=2),
]
FURTHER = [
    Case(tp=2, pooling="mean"),
    Case(tp=2, sequence_parallel=True, pooling="mean"),
    Case(pp=2, dp=2, recompute=Recompute("full")),
    Case(dp=2, sharding="optim_grads_params"),
    Case(dp=4, micro_batch=2),
    Case(dp=2, micro_batch=1),
    Case(dp=2, micro_batch=4),
    Case(model="gpt2-conv1d", pp=2, tp=2, sequence_parallel=True),
    Case(model="gpt2-conv1d", pp=2, dp=2, sharding="optim"),
    Case(model="mixtral-experts", tp=2, sequence_parallel=True),
    Case(model="mixtral-experts", dp=2, ep=2),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_ten_steps_at_a_layout_are_those_of_one_process(case: Case, world: World) -> None:
    assert_as_alone(case, world)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER, ids=str)
def test_ten_steps_at_every_layout_are_those_of_one_process(case: Case, world: World) -> None:
    assert_as_alone(case, world)


def assert_as_alone(case: Case, world: World) -> None:
    expected = train(0, Case(model=case.model, pooling=case.pooling))
    assert expected[0][-1].loss < 0.9 * expected[0][0].loss
    require_as_alone(world.run(case.world, train, case), expected)


def test_the_head_keeps_its_values_and_a_tied_one_is_trained() -> None:
    for model, name in (("llama-all-linear", "lm_head.weight"), ("gpt2-conv1d", "wte.weight")):
        _, weights = train(0, Case(model=model))
        (key,) = [each for each in weights if each.endswith(name)]
        source = dict(open_native(model))
        assert torch.equal(weights[key], source[key]) == (name == "lm_head.weight")


def open_native(model: str) -> dict[str, Tensor]:
    """The tensors of a base model, float32."""
    from safetensors.torch import load_file

    (file,) = (FIXTURES / f"peft-{model}" / "base").glob("*.safetensors")
    found = {name: tensor.float() for name, tensor in load_file(file).items()}
    return {name.removeprefix("transformer."): tensor for name, tensor in found.items()} | found
