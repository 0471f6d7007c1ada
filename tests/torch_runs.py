"""The run that the oracles of PyTorch and DeepSpeed train: transformers' Llama, AdamW, a falling learning rate.

The same batches at the same step for every run, so that a run that goes on from a checkpoint can be compared with one that never
stopped.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import torch

BEFORE, AFTER = 3, 5
"""Steps before the checkpoint, and after it."""
BATCH, LENGTH = 4, 12


def model_of(directory: Path) -> torch.nn.Module:
    """transformers' model with the weights of a Hugging Face directory, in fp32."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.train()


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Matrices decay and vectors don't, as in the Trainer and in Megatron."""
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in trained if each.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-7, foreach=False)


def launch(python: str, module: str, *words: str | Path) -> None:
    """Run an oracle on two processes that share this machine's loopback."""
    root = Path(__file__).parents[1]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    subprocess.run([python, *ranks, "-m", module, *words], check=True, cwd=root, env=environment)


def falling(step: int) -> float:
    return 0.5 * (1 + math.cos(step / 20))


def tokens(step: int, rank: int, ranks: int, vocab: int) -> torch.Tensor:
    """This rank's part of the batch of a step: [BATCH / ranks, LENGTH]."""
    generator = torch.Generator().manual_seed(1000 + step)
    whole = torch.randint(vocab, (BATCH, LENGTH), generator=generator)
    return whole.chunk(ranks)[rank]


def write(path: Path, losses: list[float], weights: dict[str, torch.Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    torch.save(weights, path / "weights.pt")
    (path / "losses.json").write_text(json.dumps(losses))


def results(path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses: list[float] = json.loads((path / "losses.json").read_text())
    weights: dict[str, torch.Tensor] = torch.load(path / "weights.pt", weights_only=True)
    return losses, weights


def same(found: Path, expected: Path) -> bool:
    """True if the losses and the final weights of two runs are equal, bit for bit."""
    (losses, weights), (others, theirs) = results(found), results(expected)
    assert len(losses) == AFTER
    return (
        losses == others
        and weights.keys() == theirs.keys()
        and all(torch.equal(each, theirs[name]) for name, each in weights.items())
    )
