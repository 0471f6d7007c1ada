"""Megatron core itself loads what the trainer saves, strictly, at other layouts; megaconv exports it to Hugging Face."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megaconv
from tests.megatron_oracle import Megatron
from tests.trainer.loop.launches import LLAMA, TIED, train

pytestmark = pytest.mark.oracle
ROOT = Path(__file__).parents[3]
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
DP2 = "--use-distributed-optimizer --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("model", "words", "tp"),
    [(LLAMA, TP2_PP2, 1), pytest.param(TIED, DP2, 2, marks=pytest.mark.slow)],
    ids=["untied", "tied"],
)
def test_megatron_core_loads_weights_and_optimizer_strictly(model: str, words: str, tp: int, tmp_path: Path) -> None:
    """Saved at TP2 PP2, or TP2 DP2 with a distributed optimizer; loaded at TP1 and TP2."""
    command = f"pretrain {model} --train-iters 3 --save ckpt --bf16 --ckpt-format torch_dist --transformer-impl local"
    train(tmp_path, 4, f"{command} {words}")
    meeting = str(tmp_path / "meeting")
    script = ["-m", "tests.trainer.loop.core_load", str(tmp_path / "ckpt" / "iter_0000003"), str(tp), meeting]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *script], cwd=ROOT, env=environment | {"RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(tp)
    ]  # fmt: skip
    for rank in ranks:
        said, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors[-3000:]
        assert "tensors and their optimizer state" in said


@pytest.mark.slow
def test_megatron_core_and_transformers_compute_the_same_from_a_trained_checkpoint(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    words = f"--train-iters 2 --save ckpt --no-save-optim --transformer-impl local {TP2_PP2}"
    train(tmp_path, 4, f"pretrain {LLAMA} {words}")
    train(tmp_path, 4, f"pretrain {LLAMA} {words} --ckpt-format torch".replace("ckpt ", "ranks "))
    megaconv.convert(tmp_path / "ckpt", tmp_path / "hf", saver="hf")
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)(tokens).logits
    (tmp_path / "megatron").mkdir()
    with Megatron(tmp_path / "megatron") as megatron:
        for name in ("ckpt", "ranks"):
            found = megatron.logits(tmp_path / name, tokens)[..., :60]
            assert (found - expected).abs().max().item() < 1e-4, name
