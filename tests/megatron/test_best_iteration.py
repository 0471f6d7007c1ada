"""`RUN/best` is the iteration that a run with --keep-best records."""

import shutil
from pathlib import Path

import pytest

import megaconv
from megaconv.best_iteration import with_best
from megaconv.hub import require_input
from tests.conftest import FIXTURES
from tests.runs import assert_refused
from tests.runs import run as megaconv_run

BEST = "best_checkpointed_iteration.txt"


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A run whose last iteration is damaged, and whose best iteration is whole."""
    root = tmp_path / "tuned"
    shutil.copytree(FIXTURES / "core-llama-tp2pp2/checkpoint", root)
    (version,) = root.glob("iter_*")
    (root / BEST).write_text(f"{int(version.name[5:])}\n")
    (root / "iter_0000099").mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("99")
    return root


def expected(tuned: Path) -> str:
    return f"iter_{int((tuned / BEST).read_text()):07}"


def test_the_best_iteration_is_read(tuned: Path, tmp_path: Path) -> None:
    weights = megaconv.fingerprint(tuned / expected(tuned))
    for place in (tuned / "best", str(tuned / "best"), f"{tuned}/best/"):
        assert megaconv.fingerprint(place) == weights
    require_input(f"{tuned}/best")
    for words in (("inspect",), ("plan",), ("scan",), ("fingerprint",)):
        assert megaconv_run(*words, tuned / "best").status == 0
    out = tmp_path / "out"
    assert megaconv_run("convert", tuned / "best", out, "--saver", "hf", "--verify").status == 0
    assert megaconv_run("diff", tuned / "best", out).status == 0
    sealed = megaconv_run("seal", tuned / "best")
    assert f"sealed without a signature: {tuned / expected(tuned)}/megaconv.json" in sealed.out
    assert megaconv_run("verify", tuned / "best").status == 0


def test_a_configuration_may_be_that_of_the_best_iteration(tuned: Path, tmp_path: Path) -> None:
    original = tmp_path / "original"
    assert megaconv_run("convert", tuned / "best", original, "--saver", "hf").status == 0
    shutil.copytree(original, tuned / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    out = tmp_path / "out"
    words = ("convert", original, out, "--saver", "core", "--config")
    assert megaconv_run(*words, tuned / "best").status == 0
    shutil.rmtree(out)
    (tuned / BEST).unlink()
    assert_refused(megaconv_run(*words, tuned / "best"), 2, "there is no", BEST)


def test_an_original_has_to_be_in_hugging_faces_files(tuned: Path, tmp_path: Path) -> None:
    """The message names the iteration."""
    words = ("convert", tuned / "best", tmp_path / "out", "--saver", "hf", "--base", tuned / "best")
    place = f"--base {tuned}/{expected(tuned)}: has no config.json"
    assert_refused(megaconv_run(*words), 2, place)


def test_a_relative_path_may_look_like_a_name_on_the_hub(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tuned.parent)
    assert with_best("tuned/best") == f"tuned/{expected(tuned)}"
    monkeypatch.chdir(tuned)
    assert with_best("best") == f"./{expected(tuned)}"


def test_a_directory_of_this_name_comes_first(tuned: Path) -> None:
    (tuned / "best").mkdir()
    assert with_best(f"{tuned}/best") == f"{tuned}/best"


@pytest.mark.parametrize(
    "place", ["org/best", "hf://org/best", "best", "tuned/best/more", "best@x"]
)
def test_other_places_stay_as_they_are(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    assert with_best(place) == place


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tuned/best: there is no {record}, which a run with --keep-best writes"),
        ("11", "{record}: says 11, but there is no {tuned}/iter_0000011"),
        ("release", "{record}: should hold an iteration number, found 7 characters"),
        ("", "{record}: should hold an iteration number, found 0 characters"),
        ("-1", "{record}: should hold an iteration number, found 2 characters"),
        ("1" * 19, "{record}: should hold an iteration number, found 19 characters"),
    ],
)
def test_a_record_that_helps_nobody_is_named(
    content: str | None, message: str, tuned: Path
) -> None:
    record = tuned / BEST
    if content is None:
        record.unlink()
    else:
        record.write_text(content)
    outcome = megaconv_run("inspect", tuned / "best")
    advice = f"name an iteration, such as {tuned}/iter_0000099"
    status = 2 if content is None else 3
    assert_refused(outcome, status, message.format(record=record, tuned=tuned), advice)
