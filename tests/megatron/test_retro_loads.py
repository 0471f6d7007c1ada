"""megatron-core 0.15.3, the last release with Retro, loads what megaconv and the trainer write, and computes the same.

It needs an environment of its own (CONTRIBUTING.md has the commands), whose Python RETRO_PYTHON names.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import megaconv
from tests.megatron.test_retro import RANKS
from tests.trainer.parallel.test_retro import array

PYTHON = os.environ.get("RETRO_PYTHON", "")
pytestmark = [
    pytest.mark.retro,
    pytest.mark.skipif(not PYTHON, reason="RETRO_PYTHON names no Python with megatron-core 0.15.3"),
]
ROOT = Path(__file__).parents[2]


def test_megatron_core_loads_both_formats_strictly(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", array("rope", "tokens")[:2, :-1])
    np.save(tmp_path / "neighbors.npy", array("rope", "neighbors")[:2])
    formats = ("torch", "torch_dist")
    for form in formats:
        megaconv.convert(
            RANKS, tmp_path / form, saver="core", ckpt_format=form, tp=1, transformer_impl="local"
        )
    words = [str(tmp_path / name) for name in ("tokens.npy", "neighbors.npy", *formats)]
    subprocess.run(
        [PYTHON, "-m", "tests.retro_model_oracle", *words], check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    answer = array("rope", "logits")
    for form in formats:
        found = np.load(tmp_path / f"{form}.npy")
        assert np.abs(found - answer).max() <= 1e-5 * np.abs(answer).max()
