"""The story of the README, as it stands there: torchrun, four processes, Hugging Face to Hugging Face."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megaconv

ROOT = Path(__file__).parents[3]


@pytest.mark.oracle
@pytest.mark.slow
def test_a_small_llama_learns_two_sentences_by_heart(tmp_path: Path) -> None:
    """`transformers` repeats both to the letter."""
    environment = os.environ | {
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "examples/finetune.sh", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "A checkpoint is a model at rest. Its tensors have names, shapes and values.",
        "Training is a model at work. Its tensors have gradients, moments and no rest.",
    ]
    assert "layout      TP 2, PP 2" in done.stdout
    assert (
        megaconv.fingerprint(tmp_path / "tuned").weights
        == megaconv.fingerprint(tmp_path / "tuned-hf").weights
    )


@pytest.mark.oracle
@pytest.mark.slow
def test_a_small_gpt_learns_from_its_nontoxic_texts(tmp_path: Path) -> None:
    """The script fails unless the bad words fall by half and clean text stays as likely."""
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "examples/detoxify.sh", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("after ")


@pytest.mark.slow
def test_the_retro_example_reads_what_it_retrieves(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    found = subprocess.run(
        ["bash", "examples/retro.sh", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    last = found.stdout.splitlines()[-1]
    numbers = re.fullmatch(r"covered tokens: (\S+) with retrieval, (\S+) without", last)
    assert numbers is not None, last
    assert float(numbers[1]) < 1.6
    assert 4.4 < float(numbers[2]) < 4.9
