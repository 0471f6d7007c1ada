"""Runs that are stopped: by Ctrl-C, by SIGTERM, by SIGKILL at any moment, and by another run on the same target."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.commands import cli
from megaconv.errors import Interrupted
from tests.forks import Fork, start
from tests.models import write_large_llama, write_llama
from tests.runs import (
    Outcome,
    assert_refused,
    finish,
    run,
    snapshot,
    unchanged,
    write_old_output,
)

SLOW = """
import pathlib, time
from formats.tensor import FileTensor
read_into = FileTensor.read_into
def slowly(self, box, out):
    pathlib.Path({marker!r}).touch()
    time.sleep({seconds})
    read_into(self, box, out)
FileTensor.read_into = slowly
"""
"""A command reads the small model in `seconds` times 39, and makes a file when it has begun to."""

KILL = """
import os, pathlib, signal
from formats.tensor import FileTensor
from megaconv.engine import transfer
transfer.JOURNAL_SECONDS = 0
owner, name, number = {owner}, {name!r}, {number}
call, calls = getattr(owner, name), []
def fatal(*arguments):
    calls.append(1)
    if len(calls) == number:
        {journaled}
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*arguments)
setattr(owner, name, fatal)
"""
"""SIGKILL instead of the call with the given number."""


def slow(marker: Path, seconds: float = 0.3) -> str:
    return SLOW.format(marker=str(marker), seconds=seconds)


def wait(condition: Callable[[], object]) -> None:
    """Until it is true, for ten seconds at most."""
    for _ in range(2000):
        if condition():
            break
        time.sleep(0.005)


MOMENTS = [
    ("FileTensor", "read_into", 1), ("FileTensor", "read_into", 20), ("os", "pwrite", 30),
    ("__import__('formats.allocation').allocation", "fallocate", 3),
    ("os", "pwrite", 90), ("os", "fsync", 8), ("pathlib.Path", "rename", 1), ("pathlib.Path", "rename", 2),
]  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return write_large_llama(tmp_path / "model")


def output_of(model: Path) -> Path:
    return model.parent / "out"


def conversion(model: Path, *options: object, output: Path | None = None) -> list[object]:
    """The command that all runs here repeat. output: the target; None: that of output_of."""
    target = output or output_of(model)
    paths = ["--load-dir", model, "--save-dir", target]
    return ["convert", *paths, "--saver", "core", "--tp", 2, *options]


def staging(model: Path) -> Path:
    return model.parent / ".out.megaconv-partial"


def journal(model: Path) -> Path:
    """The file with one line for each tensor that is on disk, after a first line."""
    return staging(model) / "journal.jsonl"


def wait_for_lines(model: Path, lines: int) -> str:
    """Code that waits until the journal has so many lines."""
    return f"while open({str(journal(model))!r}).read().count(chr(10)) < {lines}: pass"


@contextmanager
def under_way(model: Path, *options: object, before: str = "") -> Iterator[Fork]:
    """A conversion that has begun to write."""
    process = start(*conversion(model, *options), before=before)

    def has_ended() -> bool:
        return process.poll() is not None

    def has_output() -> bool:
        return any(staging(model).glob("data/*/*/*"))

    try:
        wait(lambda: has_output() or has_ended())
        assert not has_ended(), finish(process)
        yield process
    finally:
        process.kill()
        process.communicate()


def undisturbed_output(model: Path, *options: object) -> dict[str, str]:
    """The files of a run that nothing stops."""
    output = model.parent / "undisturbed"
    outcome = run(*conversion(model, *options, output=output))
    assert outcome.status == 0, outcome.err
    return snapshot(output)


def assert_converts(model: Path, *options: object) -> None:
    outcome = run(*conversion(model, *options))
    assert outcome.status == 0, outcome.err


# Ctrl-C and SIGTERM.


@pytest.mark.parametrize("hidden", [False, True], ids=["as it is", "behind the error of a lock"])
def test_an_interruption_is_reported_as_one(
    hidden: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal may come while Condition.wait() takes its lock back: then leaving the lock fails."""

    def interrupted(**_: object) -> None:
        try:
            raise Interrupted
        finally:
            if hidden:
                raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(cli, "app", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "megaconv: interrupted; nothing was left behind\n"


def assert_interrupted(outcome: Outcome, *words: str) -> None:
    assert outcome.status == 130, outcome
    assert outcome.out == ""
    assert len(outcome.err.splitlines()) == 1, outcome.err
    assert outcome.err.startswith("megaconv: interrupted"), outcome.err
    for word in words:
        assert word in outcome.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing(large: Path, number: int) -> None:
    with unchanged(large.parent), under_way(large) as process:
        process.send_signal(number)
        assert_interrupted(finish(process, 10), "nothing was left behind")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_slow_conversion_ends_at_once(
    model: Path, tmp_path_factory: pytest.TempPathFactory, number: int
) -> None:
    marker = tmp_path_factory.mktemp("marker") / "reading"
    with unchanged(model.parent), under_way(model, before=slow(marker, seconds=3)) as process:
        wait(marker.exists)
        process.send_signal(number)
        assert_interrupted(finish(process, 20))  # undisturbed, it takes a minute


def test_an_impatient_ctrl_c_leaves_nothing_either(large: Path) -> None:
    with unchanged(large.parent), under_way(large) as process:
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            time.sleep(0.005)
        assert_interrupted(finish(process, 10))


def test_an_interrupted_conversion_leaves_what_it_would_have_replaced(model: Path) -> None:
    write_old_output(output_of(model))
    with (
        unchanged(model.parent),
        under_way(model, "--overwrite", before=slow(Path("/dev/null"))) as process,
    ):
        process.send_signal(signal.SIGINT)
        assert_interrupted(finish(process, 10))


def test_an_interrupted_verification_leaves_nothing(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    marker = tmp_path_factory.mktemp("marker") / "verifying"
    verifying = f"""
from megaconv.engine import conversion
verify = conversion.verify_fingerprint
def slowly(*arguments, **options):
    exec({slow(marker)!r}, {{}})
    verify(*arguments, **options)
conversion.verify_fingerprint = slowly
"""
    with unchanged(model.parent), under_way(model, "--verify", before=verifying) as process:
        wait(marker.exists)
        process.send_signal(signal.SIGINT)
        assert_interrupted(finish(process, 10))


@pytest.mark.parametrize("command", ["fingerprint", "diff"])
def test_an_interrupted_reading_command_ends_at_once(
    model: Path, tmp_path: Path, command: str
) -> None:
    marker = tmp_path / "reading"
    models = [model, model] if command == "diff" else [model]
    process = start(command, *models, before=slow(marker, seconds=3))
    wait(marker.exists)
    process.send_signal(signal.SIGINT)
    assert_interrupted(finish(process, 20))  # undisturbed, it takes a minute


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_with_resume_an_interrupted_conversion_keeps_what_it_has_done(
    model: Path, number: int
) -> None:
    expected = undisturbed_output(model)
    write_journal_at_once = "from megaconv.engine import transfer; transfer.JOURNAL_SECONDS = 0"
    before = slow(Path("/dev/null"), 0.1) + write_journal_at_once
    with under_way(model, "--resume", before=before) as process:
        wait(lambda: journal(model).read_text().count("\n") > 4)
        process.send_signal(number)
        outcome = finish(process, 10)
    assert not output_of(model).exists()
    assert staging(model).is_dir()
    assert_interrupted(outcome, "--resume")
    assert "nothing was left behind" not in outcome.err
    assert_converts(model, "--resume")
    assert snapshot(output_of(model)) == expected


# SIGKILL.


def kill(
    model: Path, owner: str, name: str, number: int, *options: object, journaled: str = "pass"
) -> None:
    """Convert, with SIGKILL in place of a call. journaled: code that runs before the kill."""
    before = KILL.format(owner=owner, name=name, number=number, journaled=journaled)
    command = conversion(model, "--workers", 1, *options)
    outcome = finish(start(*command, before=before))
    assert outcome.status == -signal.SIGKILL, outcome


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("owner", "name", "number"), MOMENTS)
def test_a_killed_conversion_leaves_no_output_and_the_next_one_is_as_if_nothing_had_been(
    model: Path, owner: str, name: str, number: int, resume: bool
) -> None:
    expected = undisturbed_output(model)
    source = snapshot(model)
    kill(model, owner, name, number)
    assert not output_of(model).exists()
    assert staging(model).is_dir()
    assert snapshot(model) == source
    options = ["--resume"] if resume else []
    assert_converts(model, *options)
    assert snapshot(output_of(model)) == expected
    left = sorted(path.name for path in model.parent.iterdir())
    assert left == ["model", "out", "undisturbed"]


def test_a_conversion_that_is_killed_again_and_again_gets_there(model: Path) -> None:
    expected = undisturbed_output(model)
    pause = "import time; time.sleep(0.3)"
    for number in (10, 8, 6):
        kill(model, "FileTensor", "read_into", number, "--resume", journaled=pause)
    assert_converts(model, "--resume")
    assert snapshot(output_of(model)) == expected


def kill_with_most_finished(model: Path, *options: object) -> None:
    """Convert all but ten of its tensors."""
    all_before = wait_for_lines(model, 30)
    kill(model, "FileTensor", "read_into", 30, *options, journaled=all_before)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ([], ["--workers", 1]),
        (["--ckpt-format", "torch_dist"], ["--workers", 1]),
        (["--ckpt-format", "torch_dist"], ["--workers", 3]),
    ],
)
def test_tensors_finished_before_a_kill_are_not_read_again(
    model: Path, options: list[object], more: list[object]
) -> None:
    """This also holds for another number of threads, as on another machine."""
    kill_with_most_finished(model, *options)
    # One system call writes a whole line: lines of two threads don't mix.
    count = """
import os
from formats.tensor import FileTensor
read_into = FileTensor.read_into
def counted(self, box, out):
    os.write(1, b"read\\n")
    read_into(self, box, out)
FileTensor.read_into = counted
"""
    command = conversion(model, "--resume", *options, *more)
    outcome = finish(start(*command, before=count))
    assert outcome.status == 0, outcome.err
    tensors, finished = 39, 29
    assert outcome.out.count("read\n") == tensors - finished
    assert "starts again" not in outcome.err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--dtype", "fp32"], "--dtype is fp32, was None; the size of the output is "),
        (["--pp", 2], "the number of output files is "),
        (["--ckpt-format", "torch_dist", "--dist-files", 3], "the number of output files is "),
        (["--allow-lossy", "overflow"], "--allow-lossy is overflow, was none\n"),
    ],
)
def test_resuming_with_other_options_says_which_part_differs(
    model: Path, options: list[object], reason: str
) -> None:
    kill_with_most_finished(model)
    outcome = finish(start(*conversion(model, "--resume", *options)))
    assert outcome.status == 0
    assert f"starts again and discards the work of the interrupted run: {reason}" in outcome.err


def test_resuming_with_another_source_says_which_file_has_changed(model: Path) -> None:
    kill_with_most_finished(model)
    write_llama(model, seed=1)
    outcome = finish(start(*conversion(model, "--resume")))
    assert outcome.status == 0
    assert f"{model / 'model.safetensors'} has changed" in outcome.err


def test_a_run_that_had_finished_nothing_starts_again_without_a_message(model: Path) -> None:
    kill(model, "FileTensor", "read_into", 1)
    outcome = finish(start(*conversion(model, "--resume", "--dtype", "fp32")))
    assert outcome.status == 0
    assert "starts again" not in outcome.err


def test_a_kill_after_the_rename_leaves_the_complete_output(model: Path) -> None:
    expected = undisturbed_output(model)
    kill(model, "__import__('formats.staging').staging.Staging", "discard", 1)
    assert snapshot(output_of(model)) == expected
    assert run("diff", model, output_of(model)).status == 0


def test_a_kill_while_a_target_is_replaced_leaves_the_old_one(model: Path) -> None:
    before = snapshot(write_old_output(output_of(model)))
    kill(model, "__import__('formats.renames').renames", "exchange", 1, "--overwrite")
    assert snapshot(output_of(model)) == before
    assert_converts(model, "--overwrite")
    assert sorted(path.name for path in model.parent.iterdir()) == ["model", "out"]


@pytest.mark.parametrize(
    "options", [["--pp", 2], ["--dtype", "fp32"], ["--make-vocab-size-divisible-by", 1]]
)
def test_resuming_with_other_options_starts_over(model: Path, options: list[object]) -> None:
    kill(model, "os", "fsync", 8)
    assert_converts(model, "--resume", *options)
    assert snapshot(output_of(model)) == undisturbed_output(model, *options)


def test_resuming_with_another_source_starts_over(model: Path) -> None:
    kill(model, "os", "fsync", 8)
    write_llama(model, seed=1)
    assert_converts(model, "--resume")
    assert run("diff", model, output_of(model)).status == 0


def test_resuming_without_a_loss_that_was_allowed_before_is_refused_as_ever(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][3, 5] = 98304.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    as_fp16 = ["--dtype", "fp16"]
    kill_with_most_finished(model, *as_fp16, "--allow-lossy", "overflow")
    resumed = run(*conversion(model, *as_fp16, "--resume"))
    assert_refused(resumed, 2, "98304", "--allow-lossy overflow")


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_damage_in_what_only_the_killed_run_read_is_found(ckpt_format: str, model: Path) -> None:
    """Damage in a padded embedding: its checksum covers all rows, and the second run doesn't read it."""
    padded = model.parent / "padded"
    files = {"dist_files": 1} if ckpt_format == "torch_dist" else {}
    megaconv.convert(
        model,
        padded,
        saver="core",
        ckpt_format=ckpt_format,
        make_vocab_size_divisible_by=256,
        workers=1,
        **files,
    )
    (padded / "megaconv.json").unlink()
    rank_files = padded.glob("*/mp_rank_00/model_optim_rng.pt")
    dist_files = padded.glob("*/*.distcp")
    (file,) = [*rank_files, *dist_files]
    damage_embedding(file, model)
    command: list[object] = ["convert", padded, output_of(model), "--saver", "hf", "--workers", 1]
    embedding_is_read = wait_for_lines(model, 20)
    before = KILL.format(
        owner="FileTensor", name="read_into", number=30, journaled=embedding_is_read
    )
    killed = finish(start(*command, before=before))
    assert killed.status == -signal.SIGKILL, killed
    for options in ["--resume"], []:
        assert_refused(run(*command, *options), 3, file.name, "checksum")


def damage_embedding(file: Path, model: Path) -> None:
    """Change one bit of the embedding's first row."""
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    first_row = embedding[0].view(torch.uint8).numpy().tobytes()
    content = bytearray(file.read_bytes())
    content[content.index(first_row)] ^= 0x40
    file.write_bytes(content)


def test_resuming_where_nothing_was_begun_just_converts(model: Path) -> None:
    expected = undisturbed_output(model)
    assert_converts(model, "--resume")
    assert snapshot(output_of(model)) == expected


# Two at once.


@pytest.mark.parametrize("option", ["--workers=1", "--resume", "--overwrite"])
def test_a_second_run_on_the_same_target_is_refused_and_does_not_disturb_the_first(
    model: Path, option: str
) -> None:
    expected = undisturbed_output(model)
    with under_way(model, before=slow(Path("/dev/null"), 0.03)) as first:
        assert_refused(run(*conversion(model, option)), 2, "another run", str(output_of(model)))
        outcome = finish(first)
    assert (outcome.status, outcome.err) == (0, "")
    assert snapshot(output_of(model)) == expected


def test_a_target_that_another_process_made_meanwhile_is_not_replaced(model: Path) -> None:
    with under_way(model, before=slow(Path("/dev/null"), 0.03)) as process:
        output_of(model).mkdir()
        (output_of(model) / "precious.txt").write_text("precious")
        before = snapshot(output_of(model))
        assert_refused(finish(process), 2, "already exists")
    assert snapshot(output_of(model)) == before
    assert not staging(model).exists()
