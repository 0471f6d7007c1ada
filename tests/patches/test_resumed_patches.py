"""A `delta` or an `apply` that is killed goes on with --resume, and its output has the bytes of one that wasn't."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megaconv.commands.endings import GO_ON, NOTHING_LEFT
from megaconv.patches import making
from tests.commands.test_process import AT_CALL
from tests.forks import start
from tests.models import write_llama
from tests.patches.test_patches import applied, make, require_equal, trained
from tests.runs import Outcome, assert_refused, finish, run, snapshot

DIES_IN_DELTA = """
import os
from megaconv.patches import blocks_file, making
blocks_file.JOURNAL_SECONDS = 0
whole, seen = making._tensor, []
def dying(*words):
    seen.append(words)
    if len(seen) > 20:
        os._exit(9)
    return whole(*words)
making._tensor = dying
"""
DIES_IN_APPLY = """
import os
from megaconv.engine import transfer
transfer.JOURNAL_SECONDS = 0
whole, seen = transfer.Transfer._move, []
def dying(self, *words):
    seen.append(words)
    if len(seen) > 20:
        os._exit(9)
    return whole(self, *words)
transfer.Transfer._move = dying
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(old, new, the patch between them)."""
    directory = tmp_path_factory.mktemp("models")
    old = write_llama(directory / "old", vocab=128)
    new = trained(old, directory / "new")
    make(old, new, directory / "patch")
    return old, new, directory / "patch"


def killed(models: tuple[Path, Path, Path], directory: Path) -> tuple[object, ...]:
    """Kill a `delta` after 20 tensors. Returns the command that continues it."""
    old, new, _ = models
    words = ("delta", old, new, "--save-dir", directory / "patch", "--resume")
    assert finish(start(*words, before=DIES_IN_DELTA)).status == 9
    assert not (directory / "patch").exists()
    return words


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors whose blocks are made."""
    names: list[str] = []
    whole = making._tensor

    def counting(*words: object) -> object:
        names.append(str(words[2]))
        return whole(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(making, "_tensor", counting)
    return names


def test_a_killed_delta_goes_on_behind_its_finished_tensors(
    models: tuple[Path, Path, Path], tmp_path: Path, computed: list[str]
) -> None:
    words = killed(models, tmp_path)
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    assert len(computed) == 39 - 20
    assert snapshot(tmp_path / "patch") == snapshot(models[2])
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("options", "message", "is_kept"),
    [(["--resume"], GO_ON, True), ([], NOTHING_LEFT, False)],
    ids=["resume", "plain"],
)
def test_an_interrupted_delta_says_what_it_keeps(
    models: tuple[Path, Path, Path],
    tmp_path: Path,
    options: list[str],
    message: str,
    is_kept: bool,
) -> None:
    old, new, _ = models
    words = ("delta", old, new, "--save-dir", tmp_path / "patch", *options)
    interrupted = DIES_IN_DELTA.replace("os._exit(9)", "os.kill(os.getpid(), 15)")
    outcome = finish(start(*words, before=interrupted))
    assert (outcome.status, outcome.err) == (130, f"megaconv: interrupted; {message}\n")
    assert (tmp_path / ".patch.megaconv-partial").exists() == is_kept


@pytest.mark.parametrize("sparse", [[], ["--sparse", "vllm"]])
def test_a_signal_after_the_commit_of_a_delta_reports_the_complete_output(
    models: tuple[Path, Path, Path], tmp_path: Path, sparse: list[str]
) -> None:
    old, new, _ = models
    late = AT_CALL.format(owner="formats.staging.Staging", name="commit", number=15)
    words = ("delta", old, new, "--save-dir", tmp_path / "patch", *sparse)
    outcome = finish(start(*words, before=late))
    complete = f"megaconv: interrupted; {tmp_path / 'patch'} is complete\n"
    assert outcome == Outcome(130, "", complete)
    assert (tmp_path / "patch").is_dir()


def cut(data: bytearray, place: int) -> bytearray:
    return data[:place]


def flip(data: bytearray, place: int) -> bytearray:
    data[place] ^= 16
    return data


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("data/blocks.bin", flip),
        pytest.param("data/blocks.bin", cut, marks=pytest.mark.slow),
        pytest.param("journal.jsonl", flip, marks=pytest.mark.slow),
        pytest.param("journal.jsonl", cut, marks=pytest.mark.slow),
    ],
)
def test_a_delta_goes_on_after_its_files_were_damaged(
    models: tuple[Path, Path, Path],
    tmp_path: Path,
    computed: list[str],
    name: str,
    change: Callable[[bytearray, int], bytearray],
) -> None:
    words = killed(models, tmp_path)
    path = tmp_path / ".patch.megaconv-partial" / name
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data, len(data) // 2))
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    assert 39 - 20 < len(computed) < 39
    assert snapshot(tmp_path / "patch") == snapshot(models[2])


def test_a_delta_of_a_changed_source_starts_again(
    models: tuple[Path, Path, Path],
    tmp_path: Path,
    computed: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new, _ = models
    words = killed(models, tmp_path)
    other = trained(old, tmp_path / "other", seed=7)
    content = (new / "model.safetensors").read_bytes()
    try:
        (new / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        outcome = run(*words)
        assert outcome.status == 0, outcome.err
        assert "starts again" in caplog.text
        assert len(computed) == 39
        require_equal(applied(old, tmp_path / "patch", target=tmp_path / "made"), other)
    finally:
        (new / "model.safetensors").write_bytes(content)


@pytest.mark.slow
def test_a_delta_without_resume_discards_what_a_killed_one_left(
    models: tuple[Path, Path, Path], tmp_path: Path, computed: list[str]
) -> None:
    words = killed(models, tmp_path)
    assert run(*words[:-1]).status == 0
    assert len(computed) == 39
    outcome = run(*words[:-3], "--sparse", "vllm", "--save-dir", tmp_path / "up", "--resume")
    assert_refused(outcome, 2, "--resume", "--sparse")


def test_a_killed_apply_can_be_resumed(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, new, patch = models
    words = ("apply", old, patch, "--save-dir", tmp_path / "made", "--resume")
    assert finish(start(*words, before=DIES_IN_APPLY)).status == 9
    assert not (tmp_path / "made").exists()
    outcome = run(*words)
    assert outcome.status == 0, outcome.err
    require_equal(tmp_path / "made", new)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_delta_and_apply_may_be_killed_at_any_moment(
    models: tuple[Path, Path, Path], tmp_path: Path, attempt: int
) -> None:
    old, new, patch = models
    commands = (
        ("delta", old, new, "--save-dir", tmp_path / "patch", "--resume"),
        ("apply", old, patch, "--save-dir", tmp_path / "made", "--resume"),
    )
    for words in commands:
        process = start(*words)
        time.sleep(random.Random(attempt).random() * 3)
        process.kill()
        process.communicate()
        target = Path(str(words[4]))
        if not target.exists():
            assert run(*words).status == 0
    assert snapshot(tmp_path / "patch") == snapshot(patch)
    require_equal(tmp_path / "made", new)
