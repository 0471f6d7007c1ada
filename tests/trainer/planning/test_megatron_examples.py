"""examples/megatron: a dry run plans the model and layout of the script's name, or prints a command that is understood.

It needs neither data nor tokenizer.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

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
ENCODERS = {
    "pretrain_bert_345m": (336_226_108, (1, 1, 1)),
    "pretrain_bert_345m_distributed": (336_226_108, (1, 1, 8)),
    "pretrain_bert_345m_distributed_with_mp": (336_226_108, (2, 2, 2)),
    "pretrain_t5_220m": (221_248_426, (1, 1, 1)),
    "pretrain_t5_220m_distributed": (221_248_426, (1, 1, 8)),
    "pretrain_t5_220m_distributed_with_mp": (221_248_426, (2, 1, 4)),
}
"""A script of a BERT or a T5 -> parameters, (tp, pp, dp)."""
MAMBA = "pretrain_mamba_800m"
COMMANDS = (
    "evaluate_zeroshot_gpt",
    "finetune_mnli_distributed",
    "finetune_race_distributed",
    "run_text_generation_server_345m",
)
"""Scripts that need a checkpoint."""


def planned(name: str, directory: Path) -> dict[str, Any]:
    dry_run = subprocess.run(
        [EXAMPLES / f"{name}.sh", "--dry-run", "--json"],
        env=ENVIRONMENT, cwd=directory, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not list(directory.iterdir())
    found: dict[str, Any] = json.loads(dry_run.stdout)
    return found


def test_every_script_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.sh")} == {*SHAPES, *ENCODERS, MAMBA, *COMMANDS}


@pytest.mark.parametrize("name", SHAPES)
def test_a_dry_run_plans_the_model_and_the_layout(name: str, tmp_path: Path) -> None:
    found = planned(name, tmp_path)
    (layers, hidden, positions), (tp, pp, dp) = SHAPES[name]
    of_layers = layers * (12 * hidden**2 + 13 * hidden)
    of_ends = (50257 + positions + 2) * hidden
    assert found["parameters"] == of_layers + of_ends
    assert [found["layout"][size] for size in ("tp", "pp", "dp")] == [tp, pp, dp]


@pytest.mark.parametrize("name", ENCODERS)
def test_a_dry_run_of_an_encoder_does_so_too(name: str, tmp_path: Path) -> None:
    found = planned(name, tmp_path)
    parameters, layout = ENCODERS[name]
    assert found["parameters"] == parameters
    assert tuple(found["layout"][size] for size in ("tp", "pp", "dp")) == layout


def test_a_dry_run_of_the_hybrid_plans_megatrons_layers_from_their_shares(tmp_path: Path) -> None:
    found = planned(MAMBA, tmp_path)
    hidden, inner, heads, vocab = 1024, 2048, 32, 256000
    groups_and_states = 2 * 8 * 128
    norm = hidden
    projections = hidden * (2 * inner + groups_and_states + heads) + inner * hidden
    convolution = 5 * (inner + groups_and_states)  # width 4, and a bias
    of_heads = 3 * heads  # A_log, D and dt_bias
    mamba = projections + convolution + of_heads + inner + norm
    attention = 3 * hidden**2 + norm
    mlp = 8 * hidden**2 + norm
    ends = 2 * vocab * hidden + norm
    assert found["parameters"] == 20 * mamba + 4 * attention + 24 * mlp + ends
    assert [found["layout"][size] for size in ("tp", "pp", "dp")] == [1, 1, 8]
    assert found["stages"][0]["activation_bytes"] > 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_prints_a_command_that_misses_nothing_but_its_files(
    name: str, tmp_path: Path
) -> None:
    dry_run = subprocess.run(
        [EXAMPLES / f"{name}.sh", "--dry-run"],
        env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = shlex.split(dry_run.stdout)
    of_trainer = words[words.index("megatron_lite") + 1 :]
    started = subprocess.run(
        [sys.executable, "-m", "megatron_lite", *of_trainer],
        env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert started.returncode != 0
    assert re.search(r"error: \S+: (no such|is not a|nothing is there)", started.stderr), (
        started.stderr
    )
    assert "Traceback" not in started.stderr


@pytest.mark.parametrize("name", [*SHAPES, *ENCODERS, MAMBA])
def test_a_run_without_data_is_refused_by_the_name_of_the_variable(name: str) -> None:
    started = subprocess.run(
        [EXAMPLES / f"{name}.sh"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert started.returncode != 0
    assert "DATA_PATH: is the prefix of a dataset" in started.stderr
