"""The objective of docs/plugins.md, as another package has it: trained, evaluated, saved and resumed."""

import importlib
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.objective import Objective
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.config import Settings
from tests.trainer.loop.launches import LLAMA, launch, metrics
from tests.trainer.loop.test_manners import refused
from tests.trainer.parallel.small import MODELS, Case, make_engine

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"
HEADING = "## Write a training objective"
COMMAND = f"pretrain {LLAMA} --objective reversed --train-iters 2".replace(
    "--eval-iters 0", "--eval-iters 1"
)


def block(language: str) -> str:
    _, _, section = PAGE.read_text(encoding="utf-8").partition(HEADING)
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the page's module, installed."""
    directory = tmp_path_factory.mktemp("package")
    (directory / "reversed_tokens.py").write_text(block("python"))
    info = directory / "reversed_tokens-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reversed-tokens\nVersion: 1\n")
    entries = block("toml").replace(
        'project.entry-points."megaconv.objectives"', "megaconv.objectives"
    )
    (info / "entry_points.txt").write_text(entries.replace('"', ""))
    return directory


def install(_rank: int, package: Path) -> None:
    sys.path.insert(0, str(package))


def run(package: Path, directory: Path, size: int, command: str) -> str:
    running = launch(directory, size, command, partial(install, package=package))
    assert running.wait() == [0] * size, running.logs()
    return running.log(0)


def test_the_loss_is_that_of_sequences_read_from_their_end(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package))
    objective = importlib.import_module("reversed_tokens").OBJECTIVE
    assert isinstance(objective, Objective)
    words = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": words[:, :-1], "labels": words[:, 1:], "loss_mask": torch.ones(2, 16)}
    plain = make_engine(Case("gpt2"))
    grid = make_grid(plain.grid.layout, 1, torch.device("cpu"))
    engine = Engine(MODELS["gpt2"], grid, plain.options, None, objective.criterion(Settings()))
    for name, tensor in ((name, tensor) for _, name, tensor in plain.parameters()):
        engine.chunks[0].get_parameter(name).data.copy_(tensor)
    found = engine.evaluate([objective.microbatch(batch, Settings())])
    backward = words.flip(1)
    logits = plain.logits(Microbatch(backward[:, :-1], backward[:, 1:]))
    assert logits is not None
    losses = F.cross_entropy(logits.flatten(0, 1), backward[:, 1:].flatten(), reduction="none")
    likely = (losses < 0.6931471805599453).sum().item()
    assert found == {
        "loss": (pytest.approx(losses.sum().item(), rel=1e-6), 32),
        "likely": (likely, 32),
    }


@pytest.mark.slow
def test_it_is_trained_evaluated_saved_and_resumed_at_any_layout(
    package: Path, tmp_path: Path
) -> None:
    log = run(package, tmp_path, 2, f"{COMMAND} --tp 2 --save straight --eval-interval 2")
    assert len(re.findall(r"^step +[12]/2 .* \| likely \d\.\d{5} \| lr ", log, re.MULTILINE)) == 2
    assert re.search(
        r"^step +2 \| validation loss \d.* \| perplexity .* \| likely \d", log, re.MULTILINE
    )
    straight = [(line["loss"], line["likely"]) for line in metrics(tmp_path) if "loss" in line]
    (tmp_path / "metrics.jsonl").unlink()
    run(package, tmp_path, 1, f"{COMMAND} --save parted --exit-interval 1")
    resumed = run(package, tmp_path, 2, f"{COMMAND} --save parted --resume --micro-batch-size 2")
    assert "continuing after step 1, 4 samples" in resumed
    parted = [(line["loss"], line["likely"]) for line in metrics(tmp_path) if "loss" in line]
    assert parted == [pytest.approx(each, rel=1e-5) for each in straight]


def test_an_objective_that_no_package_has_is_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, COMMAND)
    assert said == "--objective reversed is not known; no installed package has one"
    said = refused(tmp_path, f"{COMMAND} --dpo --finetune-data x --load y")
    assert said == "--objective reversed and --dpo are two objectives; leave one of them out"
