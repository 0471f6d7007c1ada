"""examples/megatron: each script's dry run plans the model and layout of its name, and needs neither data nor tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "megatron"
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHON": sys.executable,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}

SHAPES = {
    "pretrain_gpt_345m": ((24, 1024, 1024), (1, 1, 1)),
    "pretrain_gpt_345m_distributed": ((24, 1024, 1024), (1, 1, 8)),
    "pretrain_gpt_345m_distributed_with_mp": ((24, 1024, 1024), (2, 2, 2)),
    "pretrain_gpt2_8.3b": ((72, 3072, 1024), (8, 1, 64)),
    "pretrain_gpt3_175b": ((96, 12288, 2048), (8, 16, 8)),
}
"""A script -> (layers, hidden size, positions), (tp, pp, dp)."""


def test_every_script_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.sh")} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_dry_run_plans_the_model_and_the_layout(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / f"{name}.sh"
    planned = subprocess.run(
        [script, "--dry-run", "--json"],
        env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(planned.stdout)
    (layers, hidden, positions), (tp, pp, dp) = SHAPES[name]
    of_layers = layers * (12 * hidden**2 + 13 * hidden)
    of_ends = (50257 + positions + 2) * hidden
    assert found["parameters"] == of_layers + of_ends
    assert [found["layout"][size] for size in ("tp", "pp", "dp")] == [tp, pp, dp]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_without_data_is_refused_by_the_name_of_the_variable(name: str) -> None:
    started = subprocess.run(
        [EXAMPLES / f"{name}.sh"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert started.returncode != 0
    assert "DATA_PATH: is the prefix of a dataset" in started.stderr
