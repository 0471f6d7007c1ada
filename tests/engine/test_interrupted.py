"""Runs that are stopped: by Ctrl-C, by SIGTERM, by SIGKILL at any moment, and by another run on the same target."""

import signal
import subprocess
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
from tests.models import write_large_llama, write_llama
from tests.runs import (
    Outcome,
    assert_refused,
    finish,
    run,
    snapshot,
    start,
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


def conversion(model: Path, *options: object) -> list[object]:
    return [
        "convert",
        "--load-dir",
        model,
        "--saver",
        "core",
        "--save-dir",
        model.parent / "out",
        "--tp",
        2,
        *options,
    ]


def staging(model: Path) -> Path:
    return model.parent / ".out.megaconv-partial"


@contextmanager
def under_way(model: Path, *options: object, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """A conversion that has begun to write."""
    process = start(*conversion(model, *options), before=before)
    try:
        wait(lambda: any(staging(model).glob("data/*/*/*")) or process.poll() is not None)
        assert process.poll() is None, finish(process)
        yield process
    finally:
        process.kill()
        process.communicate()


def complete_outcome(model: Path) -> dict[str, str]:
    """What a run that nobody disturbs makes."""
    arguments = conversion(model)
    arguments[6] = model.parent / "undisturbed"
    assert run(*arguments).status == 0
    return snapshot(model.parent / "undisturbed")


# Ctrl-C and SIGTERM.


@pytest.mark.parametrize("hidden", [False, True], ids=["as it is", "behind the error of a lock"])
def test_an_interruption_is_told_as_such(
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
        assert_interrupted(finish(process, 20))  # of a minute


def test_an_impatient_ctrl_c_leaves_nothing_either(large: Path) -> None:
    with unchanged(large.parent), under_way(large) as process:
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            time.sleep(0.005)
        assert_interrupted(finish(process, 10))


def test_an_interrupted_conversion_leaves_what_it_would_have_replaced(model: Path) -> None:
    write_old_output(model.parent / "out")
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
    process = start(
        command, *[model] * (1 + (command == "diff")), before=slow(tmp_path / "reading", seconds=3)
    )
    wait((tmp_path / "reading").exists)
    process.send_signal(signal.SIGINT)
    assert_interrupted(finish(process, 20))  # of a minute


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_with_resume_an_interrupted_conversion_keeps_what_it_has_done(
    model: Path, number: int
) -> None:
    expected = complete_outcome(model)
    before = (
        slow(Path("/dev/null"), 0.1)
        + "from megaconv.engine import transfer; transfer.JOURNAL_SECONDS = 0"
    )
    with under_way(model, "--resume", before=before) as process:
        wait(lambda: (staging(model) / "journal.jsonl").read_text().count("\n") > 4)
        process.send_signal(number)
        outcome = finish(process, 10)
    assert not (model.parent / "out").exists()
    assert staging(model).is_dir()
    assert_interrupted(outcome, "--resume")
    assert "nothing was left behind" not in outcome.err
    assert run(*conversion(model, "--resume")).status == 0
    assert snapshot(model.parent / "out") == expected


# SIGKILL.


def kill(
    model: Path, owner: str, name: str, number: int, *options: object, journaled: str = "pass"
) -> None:
    before = KILL.format(owner=owner, name=name, number=number, journaled=journaled)
    assert (
        finish(start(*conversion(model, "--workers", 1, *options), before=before)).status
        == -signal.SIGKILL
    )


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("owner", "name", "number"), MOMENTS)
def test_a_killed_conversion_leaves_no_output_and_the_next_one_is_as_if_nothing_had_been(
    model: Path, owner: str, name: str, number: int, resume: bool
) -> None:
    expected, source = complete_outcome(model), snapshot(model)
    kill(model, owner, name, number)
    assert not (model.parent / "out").exists()
    assert staging(model).is_dir()
    assert snapshot(model) == source
    assert run(*conversion(model, *["--resume"] * resume)).status == 0
    assert snapshot(model.parent / "out") == expected
    assert sorted(path.name for path in model.parent.iterdir()) == ["model", "out", "undisturbed"]


def test_a_conversion_that_is_killed_again_and_again_gets_there(model: Path) -> None:
    expected = complete_outcome(model)
    for number in (10, 8, 6):
        kill(
            model,
            "FileTensor",
            "read_into",
            number,
            "--resume",
            journaled="import time; time.sleep(0.3)",
        )
    assert run(*conversion(model, "--resume")).status == 0
    assert snapshot(model.parent / "out") == expected


def kill_with_most_finished(model: Path, *options: object) -> None:
    """All but ten of its tensors."""
    journal = str(staging(model) / "journal.jsonl")
    journaled = f"while open({journal!r}).read().count(chr(10)) < 30: pass"
    kill(model, "FileTensor", "read_into", 30, *options, journaled=journaled)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ([], ["--workers", 1]),
        (["--ckpt-format", "torch_dist"], ["--workers", 1]),
        (["--ckpt-format", "torch_dist"], ["--workers", 3]),
    ],
)
def test_what_was_finished_before_a_kill_is_not_read_again(
    model: Path, options: list[object], more: list[object]
) -> None:
    """Also with another number of threads, as another machine has."""
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
    outcome = finish(start(*conversion(model, "--resume", *options, *more), before=count))
    assert outcome.status == 0, outcome.err
    assert outcome.out.count("read\n") == 39 - 29
    assert "begins anew" not in outcome.err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--dtype", "fp32"], "--dtype is fp32, was None; the size of the output is "),
        (["--pp", 2], "the number of output files is "),
        (["--ckpt-format", "torch_dist", "--dist-files", 3], "the number of output files is "),
        (["--allow-lossy", "overflow"], "--allow-lossy is overflow, was none\n"),
    ],
)
def test_resuming_with_other_options_says_which_part_is_otherwise(
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


def test_a_run_that_had_finished_nothing_is_begun_anew_without_a_word(model: Path) -> None:
    kill(model, "FileTensor", "read_into", 1)
    outcome = finish(start(*conversion(model, "--resume", "--dtype", "fp32")))
    assert outcome.status == 0
    assert "begins anew" not in outcome.err


def test_a_kill_after_the_rename_leaves_the_complete_output(model: Path) -> None:
    expected = complete_outcome(model)
    kill(model, "__import__('formats.staging').staging.Staging", "discard", 1)
    assert snapshot(model.parent / "out") == expected
    assert run("diff", model, model.parent / "out").status == 0


def test_a_kill_while_a_target_is_replaced_leaves_the_old_one(model: Path) -> None:
    before = snapshot(write_old_output(model.parent / "out"))
    kill(model, "__import__('formats.renames').renames", "exchange", 1, "--overwrite")
    assert snapshot(model.parent / "out") == before
    assert run(*conversion(model, "--overwrite")).status == 0
    assert sorted(path.name for path in model.parent.iterdir()) == ["model", "out"]


@pytest.mark.parametrize(
    "options", [["--pp", 2], ["--dtype", "fp32"], ["--make-vocab-size-divisible-by", 1]]
)
def test_resuming_with_other_options_starts_over(model: Path, options: list[object]) -> None:
    kill(model, "os", "fsync", 8)
    assert run(*conversion(model, "--resume", *options)).status == 0
    arguments = conversion(model, *options)
    arguments[6] = model.parent / "undisturbed"
    assert run(*arguments).status == 0
    assert snapshot(model.parent / "out") == snapshot(model.parent / "undisturbed")


def test_resuming_with_another_source_starts_over(model: Path) -> None:
    kill(model, "os", "fsync", 8)
    write_llama(model, seed=1)
    assert run(*conversion(model, "--resume")).status == 0
    assert run("diff", model, model.parent / "out").status == 0


def test_resuming_without_a_loss_that_was_allowed_before_is_refused_as_ever(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][3, 5] = 98304.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    options, journaled = (
        ["--dtype", "fp16"],
        f"while open({str(staging(model) / 'journal.jsonl')!r}).read().count(chr(10)) < 30: pass",
    )
    kill(
        model,
        "FileTensor",
        "read_into",
        30,
        *options,
        "--allow-lossy",
        "overflow",
        journaled=journaled,
    )
    assert_refused(
        run(*conversion(model, *options, "--resume")), 2, "98304", "--allow-lossy overflow"
    )


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_damage_in_what_only_the_killed_run_read_is_found(ckpt_format: str, model: Path) -> None:
    """Of an embedding without its padding, whose checksum is that of all rows, and which the second run doesn't read."""
    padded, out = model.parent / "padded", model.parent / "out"
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
    (file,) = [*padded.glob("*/mp_rank_00/model_optim_rng.pt"), *padded.glob("*/*.distcp")]
    stored = (
        load_file(model / "model.safetensors")["model.embed_tokens.weight"][0]
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
    content = bytearray(file.read_bytes())
    content[content.index(stored)] ^= 0x40
    file.write_bytes(content)
    command: list[object] = ["convert", padded, out, "--saver", "hf", "--workers", 1]
    journal = str(staging(model) / "journal.jsonl")
    before = KILL.format(
        owner="FileTensor",
        name="read_into",
        number=30,
        journaled=f"while open({journal!r}).read().count(chr(10)) < 20: pass",
    )
    assert finish(start(*command, before=before)).status == -signal.SIGKILL
    for options in ["--resume"], []:
        assert_refused(run(*command, *options), 3, file.name, "checksum")


def test_resuming_where_nothing_was_begun_just_converts(model: Path) -> None:
    expected = complete_outcome(model)
    assert run(*conversion(model, "--resume")).status == 0
    assert snapshot(model.parent / "out") == expected


# Two at once.


@pytest.mark.parametrize("option", ["--workers=1", "--resume", "--overwrite"])
def test_a_second_run_on_the_same_target_is_refused_and_does_not_disturb_the_first(
    model: Path, option: str
) -> None:
    expected = complete_outcome(model)
    with under_way(model, before=slow(Path("/dev/null"), 0.03)) as first:
        assert_refused(run(*conversion(model, option)), 2, "another run", str(model.parent / "out"))
        outcome = finish(first)
    assert (outcome.status, outcome.err) == (0, "")
    assert snapshot(model.parent / "out") == expected


def test_a_target_that_somebody_else_made_meanwhile_is_not_replaced(model: Path) -> None:
    with under_way(model, before=slow(Path("/dev/null"), 0.03)) as process:
        (model.parent / "out").mkdir()
        (model.parent / "out" / "precious.txt").write_text("precious")
        before = snapshot(model.parent / "out")
        assert_refused(finish(process), 2, "already exists")
    assert snapshot(model.parent / "out") == before
    assert not staging(model).exists()
