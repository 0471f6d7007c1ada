"""A command as a process: signals at awkward moments, standard streams that are closed or full."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaconv.commands.endings import GO_ON, NOTHING_LEFT
from tests.models import write_llama
from tests.runs import MAIN, Outcome, finish, run, start, write_old_output

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=2)


def conversion(model: Path, *options: object) -> list[object]:
    return [
        "convert",
        "--load-dir",
        model,
        "--saver",
        "core",
        "--save-dir",
        model.parent / "out",
        *options,
    ]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Signals.

AT_CALL = """
import formats.renames, formats.staging, formats.tensor, gc, os, signal
import megaconv.engine.conversion
owner, name, once = {owner}, {name!r}, []
call = getattr(owner, name)
def signalled(*arguments, **options):
    result = call(*arguments, **options)
    if not once:
        once.append(1)
        os.kill(os.getpid(), {number})
    return result
setattr(owner, name, signalled)
"""
"""A signal comes after a function's first call."""


def signalled(model: Path, owner: str, name: str, number: int, *options: object) -> Outcome:
    before = AT_CALL.format(owner=owner, name=name, number=int(number))
    return finish(start(*conversion(model, *options), before=before))


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_signal_that_comes_too_late_says_that_the_output_is_there(
    model: Path, number: int, resume: list[str]
) -> None:
    write_old_output(model.parent / "out")
    outcome = signalled(model, "formats.renames", "exchange", number, "--overwrite", *resume)
    assert outcome == Outcome(
        130, "", f"megaconv: interrupted; {model.parent / 'out'} is complete\n"
    )
    assert run("diff", model, model.parent / "out").status == 0
    assert names(model.parent) == ["model", "out"]


def test_a_signal_after_the_commit_reports_the_complete_output(model: Path) -> None:
    outcome = signalled(model, "formats.staging.Staging", "commit", signal.SIGTERM)
    assert outcome == Outcome(
        130, "", f"megaconv: interrupted; {model.parent / 'out'} is complete\n"
    )


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_before_the_commit_leaves_nothing(model: Path, number: int) -> None:
    outcome = signalled(model, "megaconv.engine.conversion", "combine", number)
    assert outcome == Outcome(130, "", f"megaconv: interrupted; {NOTHING_LEFT}\n")
    assert names(model.parent) == ["model"]


def test_a_terminal_that_is_closed_ends_no_run_under_nohup(model: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    before = ignoring + AT_CALL.format(
        owner="megaconv.engine.conversion", name="combine", number=int(signal.SIGHUP)
    )
    assert finish(start(*conversion(model), before=before)).status == 0


IN_DESTRUCTOR = """
import os, signal
from formats.tensor import InputFile
from megaconv.engine import conversion
class Doomed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass
prepare = conversion.prepare
def doomed(*arguments):
    Doomed()
    return prepare(*arguments)
conversion.prepare = doomed
import time
from formats.tensor import FileTensor
read_into = FileTensor.read_into
def slowly(self, box, out):
    time.sleep(0.1)
    read_into(self, box, out)
FileTensor.read_into = slowly
"""


def test_a_signal_that_comes_in_a_destructor_is_not_swallowed(model: Path) -> None:
    outcome = finish(start(*conversion(model, "--workers", 1), before=IN_DESTRUCTOR))
    assert outcome == Outcome(130, "", f"megaconv: interrupted; {NOTHING_LEFT}\n")
    assert names(model.parent) == ["model"]


def test_other_errors_in_a_destructor_are_still_reported() -> None:
    before = """
from megaconv.commands import cli
class Doomed:
    def __del__(self):
        raise ArithmeticError("in a destructor")
cli.app = lambda **options: Doomed() and None
"""
    outcome = finish(start("formats", before=before))
    assert outcome.status == 0
    assert "ArithmeticError: in a destructor" in outcome.err


@pytest.mark.parametrize("name", ["freeze", "enable"])
def test_a_signal_while_the_garbage_collector_is_set_changes_nothing_any_more(
    model: Path, name: str
) -> None:
    outcome = signalled(model, "gc", name, signal.SIGTERM)
    assert outcome.status == 0
    assert "fingerprint" in outcome.out
    assert outcome.err == ""


# Standard streams.


def in_shell(words: list[object], redirections: str) -> Outcome:
    line = f'exec "$0" -c "$1" "${{@:2}}" {redirections}'
    command = ["bash", "-c", line, sys.executable, MAIN, *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_a_conversion_needs_no_standard_streams(model: Path, closed: str) -> None:
    """No file of its output gets the number of a closed stream."""
    outcome = in_shell(conversion(model), closed)
    assert (outcome.status, outcome.err) == (0, "")
    assert ("fingerprint" in outcome.out) == (">&-" not in closed.replace("2>&-", ""))
    assert run("diff", model, model.parent / "out").status == 0


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_an_error_without_a_usable_stderr_keeps_its_exit_status(model: Path, stderr: str) -> None:
    assert in_shell(conversion(model, "--tp", 3), stderr) == Outcome(2, "", "")


def test_files_never_get_the_number_of_a_closed_stream(model: Path) -> None:
    before = """
import os
opened = os.open
def checked(*arguments, **options):
    descriptor = opened(*arguments, **options)
    assert descriptor > 2 or arguments[0] == os.devnull, arguments
    return descriptor
os.open = checked
"""
    line = before + MAIN
    command = [
        "bash",
        "-c",
        'exec "$0" -c "$1" "${@:2}" <&- 2>&-',
        sys.executable,
        line,
        *map(str, conversion(model)),
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert (
        subprocess.run(
            command, capture_output=True, timeout=60, env=environment, check=False
        ).returncode
        == 0
    )


@pytest.mark.parametrize("reader", ["true", "head -c 1"])
def test_a_reader_that_goes_away_ends_a_command_without_a_word(model: Path, reader: str) -> None:
    outcome = in_shell(["inspect", model, "--json"], f"| (sleep 0.1; {reader} > /dev/null)")
    assert outcome.err == ""


def test_results_that_do_not_arrive_are_an_error(model: Path) -> None:
    outcome = in_shell(["inspect", model, "--json"], "> /dev/full")
    message = "megaconv: error: stdout: No space left on device\n"
    assert outcome == Outcome(1, "", message)
    assert in_shell(["inspect", model], "> /dev/full") == outcome


def test_a_working_directory_that_was_removed_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    line = 'cd "$1" && rmdir "$1" && exec "$0" -c "$2" inspect model'
    command = ["bash", "-c", line, sys.executable, str(tmp_path / "gone"), MAIN]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    message = "the working directory was removed; change to another one"
    assert (done.returncode, done.stderr) == (1, f"megaconv: error: {message}\n")


# Descriptors.


def test_no_descriptor_is_closed_twice(model: Path) -> None:
    before = """
import os
from formats import journal, renames, run_lock, staging, tensor
close, fail = os.close, []
def strict(descriptor):
    try:
        close(descriptor)
    except OSError:
        fail.append(descriptor)
        os.write(2, b"closed twice")
        raise
os.close = strict
"""
    outcome = finish(start(*conversion(model, "--verify"), before=before))
    assert (outcome.status, outcome.err) == (0, "")


STARTS = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from megaconv.commands.start import main
main()
"""


@pytest.mark.parametrize(
    ("options", "message"), [([], "nothing was left behind"), (["--resume"], GO_ON)]
)
def test_ctrl_c_during_the_imports_is_one_line(options: list[str], message: str) -> None:
    command = [sys.executable, "-c", STARTS, "inspect", "model", *options]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stdout) == (130, "")
    assert outcome.stderr == f"megaconv: interrupted; {message}\n"
