"""The whole story in one script, at sizes that teach the model nothing: every step runs, shows its command and leaves what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megaconv
from tests.documented_commands import commands_of

ROOT = Path(__file__).parents[3]
TINY = {
    "STEPS": "4",
    "LAYERS": "2",
    "HIDDEN": "32",
    "VOCAB": "400",
    "CHAT_EPOCHS": "1",
    "PAIR_EPOCHS": "1",
    "LOG": "1",
}


def without_numbers(text: str) -> str:
    """A command as at any size of the run."""
    return re.sub(r"\b\d+\b", "N", text)


@pytest.mark.slow
def test_every_step_of_the_speedrun_runs_and_is_reported(tmp_path: Path) -> None:
    environment = (
        os.environ
        | TINY
        | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    )
    work = tmp_path / "run"
    done = subprocess.run(
        ["bash", "examples/speedrun.sh", str(work)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^== (\d+)\. ", done.stdout, re.M) == [
        str(number) for number in range(1, 12)
    ]
    for command in (
        "preprocess", "pretrain", "finetune --load pretrained", "finetune --load chat-hf", "evaluate --load model", "serve --load model",
    ):  # fmt: skip
        assert f"$ megatron-lite {command}" in done.stdout
    page = commands_of(ROOT / "docs" / "speedrun.md")
    documented = [
        without_numbers(command.plain) for command in page if command.language == "console"
    ]
    assert set(documented) <= {
        without_numbers(line[2:]) for line in done.stdout.splitlines() if line.startswith("$ ")
    }
    assert "reward" in done.stdout
    assert megaconv.diff(work / "model", work / "back").same
    report = (work / "report.html").read_text()
    assert report.count("<svg") == 5
    assert not re.search(r"src=|href=|url\(", report), "nothing is loaded from elsewhere"
