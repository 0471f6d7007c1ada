"""Targets that --overwrite replaces, and targets that no output replaces. A refusal is one line, before a tensor is
read."""

import os
import shutil
from pathlib import Path

import pytest

import megaconv
from megaconv.errors import UsageError
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import Outcome, assert_refused, run, snapshot, unchanged, write_old_output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=2)


def convert(model: Path, target: object, *options: object, saver: str = "core") -> Outcome:
    return run("convert", "--load-dir", model, "--saver", saver, "--save-dir", target, *options)


# Places.


@pytest.mark.parametrize("options", [[], ["--overwrite"], ["--overwrite", "--resume"]])
def test_an_empty_path_is_no_target(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """`--save-dir "$UNSET"` gives such a path."""
    monkeypatch.chdir(write_old_output(tmp_path / "here"))
    with unchanged(tmp_path):
        assert_refused(convert(model, "", *options), 2, "empty", "variable")
        with pytest.raises(UsageError, match="empty"):
            megaconv.convert(model, "", saver="core", overwrite=True)


@pytest.mark.parametrize("target", ["~/out", "~"])
def test_a_home_directory_that_no_shell_has_looked_up_is_no_target(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """`--save-dir=~/out` gives such a path, and so does "~/out" in Python."""
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--dry-run"], ["--overwrite"]):
        with unchanged(tmp_path):
            assert_refused(
                convert(model, target, *options), 2, f"{target}: ~ is for a shell", "in full"
            )
    assert_refused(run("inspect", target), 2, f"{target}: no such file", "~ is for a shell")
    assert convert(model, "~backup").status == 0


def test_an_empty_path_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_llama(tmp_path / "model", layers=1))
    assert_refused(
        run("convert", "--load-dir", "", "--saver", "core", "--save-dir", tmp_path / "out"),
        2,
        "empty",
    )
    assert_refused(run("inspect", ""), 2, "empty")


@pytest.mark.parametrize("target", [".", "./", "..", "../..", "/", "../here", "{here}", "link"])
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_the_working_directory_and_what_it_lies_in_are_no_targets(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, options: list[str]
) -> None:
    here = write_old_output(tmp_path / "above" / "here")
    (here / "link").symlink_to(tmp_path / "above")
    monkeypatch.chdir(here)
    with unchanged(tmp_path):
        assert_refused(
            convert(model, target.format(here=here), *options), 2, "the working directory"
        )


@pytest.mark.parametrize(
    "target", ["model", "model/out", "model/a/b", ".", "link", "model/../model"]
)
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_the_source_and_what_lies_in_it_or_around_it_are_no_targets(
    tmp_path: Path, target: str, options: list[str]
) -> None:
    place = write_old_output(tmp_path / "place")
    model = write_llama(place / "model", layers=1)
    (place / "link").symlink_to("model")
    with unchanged(tmp_path):
        words = "source" if options or target in ("model/out", "model/a/b") else "already exists"
        assert_refused(convert(model, place / target, *options), 2, words)


@pytest.mark.parametrize("target", ["original", "."])
def test_an_output_does_not_replace_the_base_or_the_config_that_it_reads(
    model: Path, tmp_path: Path, target: str
) -> None:
    place = write_old_output(tmp_path / "place")
    original = write_llama(place / "original", layers=2)
    with unchanged(tmp_path):
        base = convert(model, place / target, "--overwrite", "--base", original, saver="hf")
        assert_refused(base, 2, "source", str(original))
        config = convert(model, place / target, "--overwrite", "--config", original)
        assert_refused(config, 2, "source", str(original))


def test_an_output_may_lie_in_the_directory_that_only_completes_its_source(tmp_path: Path) -> None:
    original = write_llama(tmp_path / "original", layers=2)
    assert convert(original, tmp_path / "core").status == 0
    assert (
        convert(tmp_path / "core", original / "back", "--config", original, saver="hf").status == 0
    )


# What is there.


def occupy(target: Path, what: str) -> None:
    if what == "a file":
        target.write_text("precious")
        return
    target.mkdir()
    if what == "a project":
        (target / "src").mkdir()
        (target / "src" / "megaconv.json").write_text("{}")
    elif what == "a link to a record":
        (target / "megaconv.json").symlink_to("nowhere")
    elif what == "a broken tracker":
        (target / "latest_checkpointed_iteration.txt").write_text("elsewhere")
    elif what == "a directory of checkpoints":
        write_llama(target / "llama", layers=1)
    else:
        (target / "precious.txt").write_text("precious")


@pytest.mark.parametrize(
    "what",
    [
        "a file",
        "files",
        "a project",
        "a link to a record",
        "a broken tracker",
        "a directory of checkpoints",
    ],
)
@pytest.mark.parametrize("options", [["--overwrite"], ["--overwrite", "--resume"]])
def test_overwrite_replaces_only_checkpoints(
    model: Path, tmp_path: Path, what: str, options: list[str]
) -> None:
    occupy(tmp_path / "out", what)
    with unchanged(tmp_path):
        assert_refused(
            convert(model, tmp_path / "out", *options), 2, str(tmp_path / "out"), "megaconv.json"
        )


def add_something_else(target: Path, what: str) -> str:
    """Add it to a checkpoint, and return what an error says of it."""
    if what == "a repository":
        (target / ".git" / "objects").mkdir(parents=True)
        return "is a git repository"
    if what == "iterations":
        for number in (1, 2):
            (target / f"iter_{number:07d}").mkdir()
        return "is a run with 2 iterations (iter_0000001, iter_0000002)"
    if what == "a model":
        write_llama(target / "checkpoint-500", layers=1)
        return "holds 1 checkpoint besides its own (checkpoint-500)"
    if what == "a run":
        (target / "runs" / "first").mkdir(parents=True)
        (target / "runs" / "first" / "latest_checkpointed_iteration.txt").write_text("1")
        return "holds 1 checkpoint besides its own (runs/first)"
    for name in ("a", "b"):
        write_old_output(target / name)
    return "holds 2 checkpoints besides its own (a, b)"


ELSE = ["a repository", "iterations", "a model", "a run", "outputs"]


@pytest.mark.parametrize("what", ELSE)
@pytest.mark.parametrize(
    "options", [["--overwrite"], ["--overwrite", "--resume"], ["--overwrite", "--dry-run"]]
)
def test_overwrite_removes_nothing_but_one_checkpoint(
    model: Path, tmp_path: Path, what: str, options: list[str]
) -> None:
    target = write_llama(tmp_path / "out", layers=1)
    said = add_something_else(target, what)
    with unchanged(tmp_path):
        assert_refused(convert(model, target, *options), 2, str(target), said, "--overwrite would")


def test_a_patch_replaces_nothing_but_one_checkpoint(model: Path, tmp_path: Path) -> None:
    old, target = write_llama(tmp_path / "old", layers=2, seed=3), tmp_path / "patch"
    assert run("delta", old, model, "--save", target).status == 0
    said = add_something_else(target, "a model")
    with unchanged(tmp_path):
        assert_refused(run("delta", old, model, "--save", target, "--overwrite"), 2, said)


def test_the_parts_of_a_checkpoint_are_no_further_ones(model: Path, tmp_path: Path) -> None:
    """hf/ beside an iteration has a config.json, and so has the pooling of sentence-transformers."""
    for saver in ("core", "hf"):
        target = tmp_path / saver
        assert convert(model, target, saver=saver).status == 0
        (target / "notes").mkdir()
        (target / "notes" / "config.json").write_text("{}")
        assert convert(model, target, "--overwrite", saver=saver).status == 0


CHECKPOINTS = {
    "dist": FIXTURES / "dist-llama-tp2pp2", "core": FIXTURES / "core-llama-tp2pp2" / "checkpoint",
    "zarr": FIXTURES / "zarr-llama-tp2pp2" / "checkpoint", "dcp": FIXTURES / "dcp-plain-single" / "ckpt",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["hf", "llama_mistral", "our own", *CHECKPOINTS])
def test_a_checkpoint_of_any_kind_is_replaced_on_demand(
    model: Path, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "out"
    if kind == "hf":
        write_llama(target, layers=1)
    elif kind == "our own":
        write_old_output(target)
    elif kind == "llama_mistral":
        assert convert(model, target, saver=kind).status == 0
        (target / "megaconv.json").unlink()
    else:
        shutil.copytree(CHECKPOINTS[kind], target)
    assert convert(model, target, "--overwrite").status == 0
    assert run("diff", model, target).status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_an_output_of_another_user_that_can_not_be_exchanged_is_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's EACCES: nothing is tried in its place."""
    from formats import renames

    def refuse(left: Path, right: Path) -> bool:
        raise PermissionError(13, os.strerror(13))

    before = snapshot(write_old_output(tmp_path / "out"))
    monkeypatch.setattr(renames, "exchange", refuse)
    assert_refused(
        convert(model, tmp_path / "out", "--overwrite"),
        1,
        str(tmp_path / "out"),
        "Permission denied",
    )
    assert snapshot(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
