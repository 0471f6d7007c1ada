"""The benchmark of a GPU on a machine without one: what fails, hangs or is missing ends no other measurement."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPTS = ("measurements", "trainer", "on_gpu", "contenders", "turns")
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

FAILS = "import sys; print('a long story'); sys.exit('torch.OutOfMemoryError: no memory')"
HANGS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("waiting", file=sys.stderr, flush=True)
time.sleep(600)
"""
WORKS = "print('a library says hello'); print('{\"tokens_per_second\": 5}')"
SILENT = "print('hello')"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts of benchmarks/ import each other by their names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("scripts")
def test_a_measurement_that_fails_or_hangs_ends_no_other(tmp_path: Path) -> None:
    programs = {"fails": FAILS, "hangs": HANGS, "is silent": SILENT, "works": WORKS}
    commands = {name: [sys.executable, "-c", program] for name, program in programs.items()}
    results = tmp_path / "new" / "results.jsonl"
    begun = time.monotonic()
    found = import_module("measurements").run_all(commands, 2.0, results)
    assert time.monotonic() - begun < 30
    assert found == {
        "fails": {"failed": "torch.OutOfMemoryError: no memory"},
        "hangs": {"failed": "no result within 0.0333 minutes"},
        "is silent": {"failed": "printed no result: hello"},
        "works": {"tokens_per_second": 5},
    }
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["measurement"] for line in lines] == list(programs)
    assert lines[1]["errors"] == "waiting\n"
    assert lines[3]["tokens_per_second"] == 5


@pytest.mark.usefixtures("scripts")
def test_results_are_written_before_the_next_measurement_begins(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    reads = f"import json, pathlib; print(json.dumps({{'lines': len(open({str(results)!r}).readlines())}}))"
    commands = {name: [sys.executable, "-c", reads] for name in ("first", "second")}
    results.touch()
    found = import_module("measurements").run_all(commands, 60.0, results)
    assert found == {"first": {"lines": 0}, "second": {"lines": 1}}


@pytest.mark.usefixtures("scripts")
def test_a_second_command_continues_with_failed_measurements_last(tmp_path: Path) -> None:
    measurements = import_module("measurements")
    results = tmp_path / "results.jsonl"
    programs = {"fails": FAILS, "fails, then works": WORKS, "works": WORKS, "is new": WORKS}
    commands = {name: [sys.executable, "-c", program] for name, program in programs.items()}
    assert list(measurements.without_result(commands, results)) == list(commands)
    failed = {name: [sys.executable, "-c", FAILS] for name in ("fails", "fails, then works")}
    measurements.append(results, {"software": {}})
    measurements.run_all(failed, 60.0, results)
    left = measurements.without_result(commands, results)
    assert list(left) == ["works", "is new", "fails", "fails, then works"]
    measurements.run_all(
        {name: left[name] for name in ("works", "fails, then works")}, 60.0, results
    )
    measurements.run_all({"works": failed["fails"]}, 60.0, results)
    assert list(measurements.without_result(commands, results)) == ["is new", "fails"]


@pytest.mark.usefixtures("scripts")
def test_all_measurements_end_in_the_time_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = import_module("measurements")
    monkeypatch.setattr(measurements, "LEAST_S", 1.0)
    results = tmp_path / "results.jsonl"
    commands = {name: [sys.executable, "-c", HANGS] for name in ("first", "second")}
    begun = time.monotonic()
    found = measurements.run_all(commands, 600.0, results, total_s=2.0)
    assert time.monotonic() - begun < 30
    assert found["first"]["failed"].startswith("no result within 0.033")
    assert list(found) == ["first"]
    assert len(results.read_text().splitlines()) == 1


def test_a_terminated_benchmark_keeps_its_results_and_ends_its_measurement(tmp_path: Path) -> None:
    """A measurement that goes on would hold the memory of the GPU."""
    results, pid = tmp_path / "results.jsonl", tmp_path / "pid"
    hangs = f"import os, pathlib; pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n{HANGS}"
    commands = {"works": [sys.executable, "-c", WORKS], "hangs": [sys.executable, "-c", hangs]}
    program = (
        "import pathlib, measurements; measurements.exit_at_sigterm(); "
        f"measurements.run_all({commands!r}, 600.0, pathlib.Path({str(results)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
        while not (pid.is_file() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
    assert process.returncode
    (line,) = results.read_text().splitlines()
    assert json.loads(line)["tokens_per_second"] == 5
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.usefixtures("scripts")
def test_a_measurement_finds_the_packages_of_the_users_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = import_module("turns").environment()["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(ROOT), str(tmp_path)]


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param((), "needs a CUDA device, and torch .* finds none", marks=WITHOUT_GPU),
        (("7B", "--tiny"), "unknown model '7B'; take one of: 8B with .*, 1B, 3B, "),
    ],
)
def test_the_benchmark_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["trainer.py", "gpu", *words])
    with pytest.raises(SystemExit, match=expected):
        import_module("trainer").main()


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    "contender",
    ["megatron_lite, compiled, bf16 state", "transformers, compiled, autocast"],
)
def test_trainers_that_keep_as_much_as_each_other_are_measured(contender: str) -> None:
    script = str(ROOT / "benchmarks" / "on_gpu.py")
    words = [sys.executable, script, "1B", contender, "--tiny", "--steps", "1"]
    environment = import_module("turns").environment()
    printed = subprocess.run(words, env=environment, capture_output=True, check=True).stdout
    assert json.loads(printed)["tokens_per_second"] > 0


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("contender", "package"),
    [
        ("megatron-core", "megatron-core"),
        ("transformers, compiled", "transformers"),
        ("transformers, compiled, autocast", "transformers"),
        ("transformers and peft, compiled", "peft"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, contender: str, package: str
) -> None:
    def version(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "1B", contender, "--tiny"])
    with pytest.raises(SystemExit, match=f"{package} is not installed: pip install {package}"):
        import_module("on_gpu").main()
