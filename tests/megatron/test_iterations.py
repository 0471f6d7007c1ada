"""The iteration of an output: that of the run, or a release, from which a run begins."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from formats import rank_files, torch_zip
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.optimizer_models import load, write_trained_llama
from tests.runs import assert_refused, run

RUN = FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint"
"""Iteration 2 of a run, 8 samples."""

FORMS = [("core", "torch"), ("core", "torch_dist"), ("core", "zarr"), ("legacy", "torch")]


def convert(source: Path, target: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    """(the tracker, everything beside the tensors)."""
    megaconv.convert(source, target, **({"saver": "core"} | options))
    version = rank_files.find_version(target)
    assert version is not None
    files = (
        version / "common.pt",
        version / "mp_rank_00" / "model_optim_rng.pt",
        version / "mp_rank_00_000" / "model_optim_rng.pt",
    )
    state: Any = torch_zip.read(next(file for file in files if file.is_file()))
    return (target / rank_files.TRACKER).read_text(), state


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), layers=2)


@pytest.mark.parametrize(("saver", "ckpt_format"), FORMS)
def test_a_model_that_no_run_has_trained_is_a_release(
    hf: Path, tmp_path: Path, saver: str, ckpt_format: str
) -> None:
    chosen = {} if saver == "legacy" else {"ckpt_format": ckpt_format}
    tracker, state = convert(hf, tmp_path / "out", saver=saver, **chosen)
    assert (tracker, state["iteration"], state["args"].iteration) == ("release", 0, 0)
    assert state["args"].consumed_train_samples == 0
    again, state = convert(tmp_path / "out", tmp_path / "again", saver=saver, tp=2, **chosen)
    assert (again, state["iteration"]) == ("release", 0)


@pytest.mark.parametrize(("saver", "ckpt_format"), FORMS)
def test_iteration_asks_for_one(hf: Path, tmp_path: Path, saver: str, ckpt_format: str) -> None:
    chosen = {} if saver == "legacy" else {"ckpt_format": ckpt_format}
    tracker, state = convert(hf, tmp_path / "out", saver=saver, iteration=7, **chosen)
    assert (tracker, state["iteration"]) == ("7", 7)
    assert (tmp_path / "out" / "iter_0000007").is_dir()


@pytest.mark.parametrize("optimizer", [None, False])
def test_a_runs_iteration_stays_with_and_without_its_optimizer(
    tmp_path: Path, optimizer: bool | None
) -> None:
    tracker, state = convert(RUN, tmp_path / "out", optimizer=optimizer, tp=1)
    assert (tracker, state["iteration"], state["args"].consumed_train_samples) == ("2", 2, 8)


def test_release_begins_anew_at_the_first_sample(tmp_path: Path) -> None:
    """Megatron takes the samples seen from a release too: it would begin its data behind them."""
    tracker, state = convert(RUN, tmp_path / "out", release=True)
    args = state["args"]
    assert (tracker, "optimizer" in state, args.no_save_optim) == ("release", False, True)
    assert (
        args.consumed_train_samples,
        args.consumed_valid_samples,
        args.skipped_train_samples,
    ) == (0, 0, 0)
    assert state["num_floating_point_operations_so_far"] == 0


def test_an_optimizer_without_an_iteration_is_no_release_which_would_lose_it(
    tmp_path: Path,
) -> None:
    source = write_trained_llama(tmp_path / "run")
    (file,) = source.glob("*/mp_rank_00/model_optim_rng.pt")
    state = load(file)
    del state["iteration"]
    torch.save(state, file)
    tracker, state = convert(source, tmp_path / "out")
    assert (tracker, state["iteration"], "optimizer" in state) == ("1", 1, True)


def test_megatron_bridge_which_knows_no_release_gets_an_iteration(hf: Path, tmp_path: Path) -> None:
    for_bridge = {"ckpt_format": "torch_dist", "options": {"for": "megatron-bridge"}}
    tracker, state = convert(hf, tmp_path / "out", **for_bridge)
    assert (tracker, state["iteration"]) == ("1", 1)
    convert(hf, tmp_path / "release")
    tracker, _ = convert(tmp_path / "release", tmp_path / "of-a-release", **for_bridge)
    assert tracker == "1"


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("hf", ["--release", "--iteration", 3], "--release and --iteration 3 contradict each other"),
        ("run", ["--iteration", 3], "--iteration 3: the source is iteration 2 of a run"),
        ("hf", ["--iteration", 10**12 + 1], "should be from 1 to 1,000,000,000,000"),
    ],
)  # fmt: skip
def test_an_iteration_that_cannot_be_is_refused(
    hf: Path, tmp_path: Path, source: str, options: list[object], words: str
) -> None:
    place = {"hf": hf, "run": RUN}[source]
    assert_refused(run("convert", place, tmp_path / "out", "--saver", "core", *options), 2, words)
    assert not (tmp_path / "out").exists()


def test_an_iteration_of_the_runs_own_number_may_be_asked_for(tmp_path: Path) -> None:
    assert convert(RUN, tmp_path / "out", iteration=2)[0] == "2"


def test_an_output_without_iterations_takes_none(hf: Path, tmp_path: Path) -> None:
    outcome = run("convert", hf, tmp_path / "out", "--saver", "hf", "--iteration", 3)
    assert_refused(outcome, 2, "--iteration 3: has no effect with --saver hf")
