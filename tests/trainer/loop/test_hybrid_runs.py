"""Runs of hybrids from Megatron's flags: saved, loaded by Megatron core, continued in the other format, generated from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import LLAMA, train
from tests.trainer.loop.test_runs import metrics

ROOT = Path(__file__).parents[3]
HYBRID = (
    LLAMA.replace(
        "--position-embedding-type rope --swiglu", "--position-embedding-type none --squared-relu"
    )
    + " --hybrid-override-pattern M*M- --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 16"
)
DELTA_NETS = (
    f"{LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 6 --attention-output-gate --qk-layernorm "
    "--apply-layernorm-1p --rotary-percent 0.5"
)
MODELS = {"hybrid": HYBRID, "delta nets": DELTA_NETS}
COMMON = "--bf16 --lr-decay-iters 7 --save ckpt"


@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
def test_megatron_core_loads_weights_and_optimizer_strictly(name: str, tmp_path: Path) -> None:
    """Saved at TP 2 as local layers; loaded in one process."""
    words = f"pretrain {MODELS[name]} {COMMON} --train-iters 3 --lr-warmup-iters 0 --tp 2 --transformer-impl local"
    train(tmp_path, 2, f"{words} --ckpt-format torch_dist")
    script = ["-m", "tests.trainer.loop.core_load", str(tmp_path / "ckpt" / "iter_0000003"), "1"]
    environment = os.environ | {
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, *script, str(tmp_path / "meeting")], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tensors and their optimizer state" in done.stdout


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("hybrid", "transformer_engine"),
        ("delta nets", "transformer_engine"),
        pytest.param("hybrid", "local", marks=pytest.mark.slow),
        pytest.param("delta nets", "local", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bits_and_both_formats_hold_the_same(
    name: str, impl: str, tmp_path: Path
) -> None:
    words = f"pretrain {MODELS[name]} {COMMON} --train-iters 3 --transformer-impl {impl}"
    train(tmp_path / "straight", 1, f"{words} --ckpt-format torch_dist")
    for more in ("--exit-interval 2", "--resume"):
        train(tmp_path / "stopped", 1, f"{words} --ckpt-format torch {more}")
    straight, stopped = (metrics(tmp_path / each) for each in ("straight", "stopped"))
    assert straight[3] == stopped[3]
    prints = [megaconv.fingerprint(tmp_path / each / "ckpt") for each in ("straight", "stopped")]
    assert prints[0].weights == prints[1].weights
