"""Directories called formats, loaders or savers beside a program don't get in megaconv's way, or are named in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import write_llama
from tests.package.test_architecture import ROOT

NAMES = ("formats", "loaders", "savers")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Somebody's project with packages of these names."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MINE = {name!r}\n")
        (tmp_path / name / "images.py").write_text("")
    return tmp_path


def python(project: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """megaconv is where an installed package would be: behind the directory of the program."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=60
    )


def script(project: Path, text: str) -> subprocess.CompletedProcess[str]:
    (project / "script.py").write_text(text)
    return python(project, "script.py")


@pytest.mark.parametrize("program", ["megaconv", "megatron_lite"])
def test_the_programs_run_in_such_a_directory_without_a_word(project: Path, program: str) -> None:
    done = python(project, "-m", program, "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_conversion_runs_in_such_a_directory(project: Path) -> None:
    write_llama(project / "model")
    done = python(
        project,
        "-m",
        "megaconv",
        "convert",
        "--load-dir=model",
        "--saver=core",
        "--save-dir=out",
        "--tp=2",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (project / "out" / "latest_checkpointed_iteration.txt").is_file()


def test_a_script_in_such_a_directory_can_use_megaconv_and_gets_one_warning(project: Path) -> None:
    write_llama(project / "model")
    done = script(
        project, "import megaconv\nprint(megaconv.inspect('model').header.config.family)\n"
    )
    assert (done.returncode, done.stdout) == (0, "llama\n")
    reported = [line for line in done.stderr.splitlines() if "megaconv's own" in line]
    assert len(reported) == 1
    assert "script.py:1:" in reported[0]
    for name in NAMES:
        assert str(project / name) in reported[0]


def test_a_script_that_uses_its_own_package_first_gets_an_error_that_names_both(
    project: Path,
) -> None:
    done = script(project, "import loaders\nimport megaconv\n")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(project / "loaders") in last
    assert str(ROOT / "loaders") in last


def test_a_directory_without_python_in_it_clashes_with_nothing(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
    done = script(tmp_path, "import megaconv.api, formats, loaders\nprint(formats.__file__)\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{ROOT / 'formats' / '__init__.py'}\n"


def test_modules_of_these_names_clash_as_packages_do(tmp_path: Path) -> None:
    (tmp_path / "loaders.py").write_text("")
    done = script(tmp_path, "import loaders\nimport megaconv\n")
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {tmp_path / 'loaders.py'}")
    assert python(tmp_path, "-m", "megaconv", "formats").stderr == ""
