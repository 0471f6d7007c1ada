"""A BERT with a head for a task: ten steps of transformers' own model with AdamW, at any layout; the same logits on the way back."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import megaconv
from megaconv.families import families
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import Layout, padded_vocab
from megaconv.model.naming import CORE
from megaconv.model.natives import native_tensors
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.bert import Bert
from megatron_lite.models.build_plan import make_plan
from megatron_lite.models.rng import Seed
from megatron_lite.objectives.answer_loss import ACCURACY, ANSWERS, COUNTING, AnswerLoss
from megatron_lite.parallel.grid import make_grid
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.options import ModelOptions, OptimizerOptions, Recompute
from tests.trainer.parallel.test_bert import CONFIG, Case
from tests.trainer.parallel.worlds import World

pytestmark = pytest.mark.oracle
STEPS, MICROBATCHES, EXAMPLES, LENGTH, VOCAB = 10, 2, 3, 16, 61
RATE, DECAY, BETAS, EPS, CLIP = 1e-3, 0.1, (0.9, 0.95), 1e-6, 0.5
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of head."""

    model: str
    rows: int = 1
    classes: int = 3


CLASSES, CHOICES = (
    Kind("MegatronBertForSequenceClassification"),
    Kind("MegatronBertForMultipleChoice", rows=4, classes=4),
)


def make(kind: Kind, directory: Path) -> Path:
    import transformers

    torch.manual_seed(7)
    config = transformers.MegatronBertConfig(**SIZES, num_labels=3)
    model = getattr(transformers, kind.model)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.1)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
    model.save_pretrained(directory)
    return directory


@cache
def batches(kind: Kind, step: int) -> list[Microbatch]:
    """The last example of a step fills it up and doesn't count."""
    random = torch.Generator().manual_seed(step)
    found = []
    for index in range(MICROBATCHES):
        rows = EXAMPLES * kind.rows
        tokens = torch.randint(5, VOCAB, (rows, LENGTH), generator=random)
        visible = torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (rows, 1), generator=random)
        types = (torch.arange(LENGTH) > torch.randint(1, 9, (rows, 1), generator=random)).long()
        answers = torch.randint(0, kind.classes, (EXAMPLES,), generator=random)
        counting = torch.ones(EXAMPLES)
        counting[-1] = float(index + 1 < MICROBATCHES)
        found.append(
            Microbatch(
                tokens * visible,
                tokens,
                types=types * visible,
                visible=visible,
                extras={ANSWERS: answers, COUNTING: counting},
                index=index,
            )
        )
    return found


Figures = list[tuple[float, float, float]]
"""The figures of each step: loss, accuracy, norm of gradients."""


def scores_of(engine: Engine, batch: Microbatch) -> Tensor | None:
    last = engine.last_stage(batch)
    if last is None:
        return None
    network, hidden = last
    assert isinstance(network, Bert)
    return network.scores(hidden, EXAMPLES).detach()


def train(_rank: int, directory: Path, kind: Kind, case: Case) -> tuple[Figures, Tensor | None]:
    """Losses, and what the trained model gives."""
    source = megaconv.open(directory)
    layout = Layout(
        case.tp, case.pp, 1, stage_layers=(source.config.layer_count // case.pp,) * case.pp
    )
    options = ModelOptions(
        "float32",
        sequence_parallel=case.sequence,
        vocab_divisor=1,
        recompute=Recompute(case.recompute),
    )
    optimizer = OptimizerOptions(
        betas=BETAS, eps=EPS, clip_grad=CLIP, distributed=case.distributed, bucket_elements=5000
    )
    grid = make_grid(layout, case.dp, torch.device("cpu"))
    engine = Engine(source.config, grid, options, optimizer, AnswerLoss())
    load_weights(engine, source.tensors)
    found = []
    for step in range(STEPS):
        own = batches(kind, step)[engine.grid.dp_rank :: engine.grid.dp]
        report = engine.train_step(own, RATE, DECAY)
        found.append((report.loss, report.others[ACCURACY], report.grad_norm))
    scores = scores_of(engine, batches(kind, STEPS)[0])
    engine.finish()
    engine.grid.close()
    return found, scores


def theirs(directory: Path, kind: Kind, batch: Microbatch, model: Any) -> Tensor:
    """[examples, classes or choices]"""
    shape = (EXAMPLES, kind.rows, LENGTH) if kind.rows > 1 else (EXAMPLES, LENGTH)
    assert batch.types is not None
    assert batch.visible is not None
    given = {
        "input_ids": batch.tokens,
        "token_type_ids": batch.types,
        "attention_mask": batch.visible.long(),
    }
    logits: Tensor = model(**{name: value.view(shape) for name, value in given.items()}).logits
    return logits


def expected(directory: Path, kind: Kind) -> tuple[Figures, Tensor]:
    """The figures of transformers and torch's AdamW in float64. A float32 reference would add its own rounding to the
    difference."""
    import transformers

    model: Any = getattr(transformers, kind.model).from_pretrained(directory, dtype=torch.float64)
    groups = [
        {
            "params": [each for each in model.parameters() if (each.ndim > 1) == decays],
            "weight_decay": DECAY * decays,
        }
        for decays in (True, False)
    ]
    optimizer, found = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS), []
    for step in range(STEPS):
        scores = torch.cat([theirs(directory, kind, batch, model) for batch in batches(kind, step)])
        answers, counting = (
            torch.cat([batch.extras[name] for batch in batches(kind, step)])
            for name in (ANSWERS, COUNTING)
        )
        loss = (
            F.cross_entropy(scores, answers, reduction="none") * counting
        ).sum() / counting.sum()
        right = ((scores.argmax(1) == answers) * counting).sum() / counting.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((loss.item(), right.item(), norm.item()))
    with torch.no_grad():
        return found, theirs(directory, kind, batches(kind, STEPS)[0], model)


def compare(found: tuple[Figures, Tensor | None], answer: tuple[Figures, Tensor]) -> None:
    for step, (figures, wanted) in enumerate(zip(found[0], answer[0], strict=True)):
        assert figures == pytest.approx(wanted, rel=5e-6), f"step {step}"
    if found[1] is not None:
        # A score added to all choices changes nothing, so rounding alone moves the bias of their head.
        ours, theirs = (
            scores.double() - scores.double().mean(1, keepdim=True)
            for scores in (found[1], answer[1])
        )
        assert torch.allclose(ours, theirs, atol=1e-5)


LAYOUTS = [
    (CLASSES, Case()),
    (CHOICES, Case()),
    (CLASSES, Case(tp=2, sequence=True)),
    (CHOICES, Case(pp=2, dp=2, distributed=True)),
]
MORE_LAYOUTS = [
    (kind, case)
    for kind in (CLASSES, CHOICES)
    for case in (
        Case(tp=2), Case(pp=2), Case(dp=2), Case(tp=2, pp=2, sequence=True, recompute="full"), Case(tp=2, dp=2, distributed=True),
        Case(tp=4, sequence=True),
    )
]  # fmt: skip


def config_of(kind: Kind) -> ModelConfig:
    heads = {"head.activation": "", "head.binary": False, "tie_embeddings": False}
    return changed(
        CONFIG, {**heads, "head.classes": 3} if kind is CLASSES else {**heads, "head.choices": True}
    )


@pytest.mark.parametrize("kind", [CLASSES, CHOICES], ids=lambda kind: kind.model)
def test_parameters_are_named_and_cut_as_the_table_says(kind: Kind) -> None:
    config, rows = config_of(kind), families()["bert"].rows
    for tp, pp in ((1, 1), (2, 1), (2, 2)):
        layout = Layout(tp, pp, 1, stage_layers=(2 // pp,) * pp)
        for chunk in layout.chunks():
            plan = make_plan(
                config, layout, ModelOptions(vocab_divisor=8), TensorGroup(None, 0, tp, True)
            )
            with torch.device("meta"):
                found = {
                    name: tuple(parameter.shape)
                    for name, parameter in Bert(plan, chunk).named_parameters()
                }
            natives = native_tensors(
                rows, config, CORE, layout, 0, chunk, padded_vocab(config.vocab, 8, tp)
            )
            assert found == {native.name: native.shape for native in natives}


def test_a_heads_dropout_is_that_of_hidden_states() -> None:
    """The dropout of the pooled token: at 0.5 its elements are 0 or twice as large."""
    plan = make_plan(
        config_of(CLASSES),
        Layout(stage_layers=(2,)),
        ModelOptions("float32", hidden_dropout=0.5),
        TensorGroup(),
    )
    network = Bert(plan, next(iter(Layout(stage_layers=(2,)).chunks())))
    head, hidden = network.classification_head, torch.randn(4, 5, 32)
    assert head is not None
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.0)
        assert network.pooler is not None
        network.pooler.dense.bias.fill_(1.0)
        head.weight.fill_(1.0)
        whole, dropped = network.scores(hidden, 5), network.scores(hidden, 5, Seed(1))
    kept = (dropped / torch.tanh(torch.tensor(1.0))) / 2
    assert torch.allclose(whole, torch.tanh(torch.tensor(1.0)) * 32)
    assert torch.allclose(kept, kept.round(), atol=1e-4)
    assert 5 < kept[:, 0].min() < kept[:, 0].max() < 27


def shown(value: Kind | Case) -> str:
    return str(value) if isinstance(value, Case) else value.model


@pytest.mark.parametrize(("kind", "case"), LAYOUTS, ids=shown)
def test_ten_steps_are_those_of_transformers_with_adamw(
    kind: Kind, case: Case, tmp_path: Path, world: World
) -> None:
    directory = make(kind, tmp_path / "hf")
    answer = expected(directory, kind)
    for found in (
        world.run(case.world, train, directory, kind, case)
        if case.world > 1
        else [train(0, directory, kind, case)]
    ):
        compare(found, answer)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), MORE_LAYOUTS, ids=shown)
def test_ten_steps_at_further_layouts(kind: Kind, case: Case, tmp_path: Path, world: World) -> None:
    directory = make(kind, tmp_path / "hf")
    answer = expected(directory, kind)
    for found in world.run(case.world, train, directory, kind, case):
        compare(found, answer)
