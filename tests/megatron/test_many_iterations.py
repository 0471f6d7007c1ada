"""A run's directory with several iterations: `inspect` lists them, and `--config` finds the configuration in it."""

import json
import shutil
from pathlib import Path

import pytest

import megaconv
from tests.models import write_llama
from tests.neighbours import write_bridge
from tests.rank_states import edit, rank_paths
from tests.runs import assert_refused, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """iter_0000001, 20 and 100; the tracker names 20."""
    root = tmp_path_factory.mktemp("trained")
    megaconv.convert(write_llama(root / "hf", layers=1), root / "run", saver="core", iteration=1)
    for number in (20, 100):
        copy = shutil.copytree(root / "run" / "iter_0000001", root / "run" / f"iter_{number:07d}")
        edit(rank_paths(copy), iteration=number)
    (root / "run" / "latest_checkpointed_iteration.txt").write_text("20")
    return root / "run"


def test_the_iterations_of_a_run_are_listed(trained: Path) -> None:
    assert "iterations  1, 20, 100; the tracker names 20" in run("inspect", trained).out
    report = json.loads(run("inspect", trained, "--json").out)
    assert report["iterations"] == ["iter_0000001", "iter_0000020", "iter_0000100"]
    assert (report["read_iteration"], report["iteration"]) == ("iter_0000020", 20)


def test_one_iteration_by_itself_lists_no_others(trained: Path) -> None:
    assert "iterations" not in run("inspect", trained / "iter_0000100").out
    report = json.loads(run("inspect", trained / "iter_0000100", "--json").out)
    assert (report["iterations"], report["read_iteration"], report["iteration"]) == ([], None, 100)


def test_the_tracker_of_megatron_bridge_names_one_too(tmp_path: Path) -> None:
    path = write_bridge(tmp_path / "in", "dist-llama-tp2pp2")
    (path / "iter_0000020").mkdir()
    (path / "latest_checkpointed_iteration.txt").unlink()
    assert "10, 20; the tracker names 10" in run("inspect", path).out


def test_a_model_of_hugging_face_has_no_iterations(tmp_path: Path) -> None:
    report = json.loads(run("inspect", write_llama(tmp_path / "hf", layers=1), "--json").out)
    assert (report["iterations"], report["read_iteration"]) == ([], None)


@pytest.mark.parametrize("inside", ["", "iter_0000100", "hf"])
def test_a_run_is_a_configuration_by_its_hf_directory(
    inside: str, trained: Path, tmp_path: Path
) -> None:
    alone = shutil.copytree(trained / "iter_0000001", tmp_path / "alone" / "iter_0000001")
    words = ("--config", trained / inside, "--saver", "hf", "--save-dir", tmp_path / "out")
    outcome = run("convert", "--load-dir", alone, *words)
    assert (outcome.status, outcome.err) == (0, "")
    ours, theirs = (
        json.loads((path / "config.json").read_text())
        for path in (tmp_path / "out", trained / "hf")
    )
    assert ours == theirs
    assert run("inspect", alone, "--config", trained / inside).status == 0


def test_a_directory_without_a_configuration_is_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    for path in (tmp_path, tmp_path / "iter_0000001"):
        assert_refused(
            run("inspect", trained, "--config", path),
            2,
            f"{path}: has no config.json, nor a hf/ with one",
        )
