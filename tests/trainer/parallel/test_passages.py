"""Megatron's task RET-FINETUNE-NQ: six steps on its own samples, and the figures of its validation (fixtures/retriever/dpr)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from formats.errors import CorruptCheckpoint
from megaconv.engine.stream import as_lazy
from megaconv.errors import UsageError
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.state import Progress
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.blocks.samples import Special
from megatron_lite.data.tasks.passages import PassageDataset, read_questions
from megatron_lite.data.tokenizer import TokenizerOptions, build_tokenizer
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.retrieval_loss import RetrievalLoss
from megatron_lite.objectives.passages import PassageData, Passages
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.batch_size import BatchSize
from megatron_lite.settings.config import Settings, Training
from megatron_lite.settings.options import ModelOptions, OptimizerOptions
from megatron_lite.settings.sizes import Sizes
from tests.conftest import FIXTURES as CHECKPOINTS
from tests.trainer.loop.test_manners import refused
from tests.trainer.parallel.worlds import World
from tests.trainer.retriever import FIXTURES, MODELS, expected, weights

TRAIN = FIXTURES / "retriever" / "dpr-train.json"
VOCABULARY = FIXTURES / "retriever" / "vocab.txt"
EXPECTED = expected("dpr")
LENGTH = 48
pytestmark = pytest.mark.oracle


def dataset(hard: int, others: int = 0, *, fills: bool = True) -> PassageDataset:
    """All questions in the file's order, with negatives in the file's order, as in the fixture."""
    options = TokenizerOptions("BertWordPieceLowerCase", vocab_file=VOCABULARY)
    questions = read_questions(str(TRAIN))
    return PassageDataset(
        questions,
        np.arange(len(questions)),
        build_tokenizer(options).tokenize,
        Special(2, 3, 0),
        LENGTH,
        hard,
        others,
        fills=fills,
    )


def microbatch(samples: PassageDataset, first: int, count: int) -> Microbatch:
    rows = [samples[number] for number in range(first, first + count)]
    batch: dict[str, Tensor] = {
        name: torch.from_numpy(np.stack([getattr(row, name) for row in rows]))
        for name in ("query", "contexts", "passages")
    }
    return Passages().microbatch(batch, Settings())


def test_samples_are_megatrons() -> None:
    train, valid = dataset(1), dataset(3, 2, fills=False)
    for answer in EXPECTED["rows"]:
        sample, measured = train[answer["row"]], valid[answer["row"]]
        assert sample.query.tolist() == answer["query"]
        wanted = [answer["context"], *answer["neg_context"]]
        assert sample.contexts[: sample.passages].tolist() == wanted
        others = measured.contexts[1 : measured.passages].tolist()
        assert others == answer["eval_neg_context"]


def make_engine(dp: int) -> Engine:
    criterion = RetrievalLoss(True, (1, 2, 5), reports_rank=True)
    grid = make_grid(Layout(stage_layers=(2,)), dp, torch.device("cpu"))
    options = ModelOptions("float32", vocab_divisor=1)
    engine = Engine(MODELS["plain"], grid, options, OptimizerOptions(), criterion)
    load_weights(engine, {name: as_lazy(array) for name, array in weights("plain").items()})
    return engine


def train(_rank: int, dp: int, microbatches: int) -> tuple[list[list[float]], dict[str, float]]:
    """Losses, norms and numbers of right answers of six steps; the figures of the validation after them."""
    engine, samples = make_engine(dp), dataset(1)
    found, each = [], 4 // dp // microbatches
    for step in range(6):
        batches = [
            microbatch(samples, 4 * step + each * number, each).numbered(number)
            for number in range(4 // each)
        ]
        report = engine.train_step(batches[engine.grid.dp_rank :: dp], 1e-3, 0.01)
        right = report.others["top1_acc"] * 4 / 100
        found.append([report.loss, report.grad_norm, right])
    sums: dict[str, list[float]] = {}
    valid = dataset(3, 2, fills=False)
    for first in range(0, 24, 6) if dp == 1 else ():
        for name, (total, count) in engine.evaluate([microbatch(valid, first, 6)]).items():
            so_far = sums.setdefault(name, [0.0, 0.0])
            so_far[0], so_far[1] = so_far[0] + total, so_far[1] + count
    engine.finish()
    engine.grid.close()
    return found, {name: total / count for name, (total, count) in sums.items()}


def compare(found: list[list[float]], steps: list[dict[str, Any]]) -> None:
    for figures, answer in zip(found, steps, strict=True):
        wanted = [answer[name] for name in ("loss", "grad_norm", "correct")]
        assert figures == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_six_steps_and_the_validation_are_megatrons(microbatches: int) -> None:
    found, measured = train(0, 1, microbatches)
    compare(found, EXPECTED["steps"])
    wanted = EXPECTED["validation"]
    assert {name: measured[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.slow
def test_six_steps_of_two_ranks_are_megatrons(world: World) -> None:
    for found, _ in world.run(2, train, 2, 1):
        compare(found, expected("dpr-dp2"))


def test_bad_files_are_refused_with_the_row(tmp_path: Path) -> None:
    path = tmp_path / "questions.json"
    good = {"question": "a?", "positive_ctxs": [{"title": "b", "text": "c"}]}
    for row, message in (
        ({**good, "question": ""}, "row 1: has no question"),
        ({**good, "positive_ctxs": []}, "row 1: has no positive_ctxs"),
        ({**good, "negative_ctxs": ["x"]}, "row 1: negative_ctxs should be a list of passages"),
    ):
        path.write_text(json.dumps([good, row]))
        with pytest.raises(CorruptCheckpoint, match=message):
            read_questions(str(path))


def test_a_continued_run_keeps_its_batch() -> None:
    """Epochs are of whole batches: with batches twice as large, two epochs would have ended after the first."""
    settings = Settings(training=Training(epochs=2))
    data = PassageData(read_questions(str(TRAIN)) * 4, [])
    batch = len(data.train) // 4

    def steps(size: int) -> int | None:
        sizes = Sizes(layout=Layout(), dp=1, batch=BatchSize(size, size), micro_batch=1, seq=LENGTH)
        done = Progress(iteration=4, consumed_samples=4 * batch)
        return data.fitted(settings, sizes, done, print)[0].training.train_iters

    assert steps(batch) == 8
    with pytest.raises(UsageError, match=f"the continued run has batches of {batch}"):
        steps(2 * batch)


def test_the_task_needs_the_command_finetune(tmp_path: Path) -> None:
    words = f"--task RET-FINETUNE-NQ --train-data {TRAIN} --epochs 1 --model-type biencoder"
    load = CHECKPOINTS / "biencoder-legacy-separate"
    said = refused(tmp_path, f"pretrain {words} --load {load}")
    assert said == "--task RET-FINETUNE-NQ starts from a retriever: it requires finetune"
