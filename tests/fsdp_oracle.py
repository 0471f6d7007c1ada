"""PyTorch's own FSDP2 and distributed checkpoints on two processes, with the state that torchtitan's checkpointer saves.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.fsdp_oracle MODEL OUTPUT

A run saves OUTPUT/checkpoint and goes on. `OUTPUT/convert.py`, which the test wrote, makes OUTPUT/made of it. Another run goes on from
there. Both write losses and weights, to OUTPUT/uninterrupted and OUTPUT/continued.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from tests import torch_runs

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_WHOLE = StateDictOptions(full_state_dict=True)


class Run:
    """A model, sharded over all processes, with its optimizer and schedule."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = torch_runs.model_of(directory)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch_runs.adamw(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, torch_runs.falling)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            vocab = self.model.config.vocab_size
            ids = torch_runs.tokens(self.step, dist.get_rank(), dist.get_world_size(), vocab)
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            self.step += 1
        return losses

    def state(self) -> dict[str, Any]:
        """The state as torchtitan's CheckpointManager has it since release 0.3."""
        return {
            **self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT),
            "lr_scheduler": {"last_epoch": self.scheduler.last_epoch},
            "train_state": {"step": self.step, "ntokens_seen": 0},
        }

    def load(self, checkpoint: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=checkpoint)
        optimizer = state.pop("optimizer")
        set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=_FLAT)
        self.scheduler.last_epoch = state.pop("lr_scheduler")["last_epoch"]
        self.step = state.pop("train_state")["step"]
        self.model.load_state_dict(state)

    def finish(self, output: Path) -> None:
        losses = self.train(torch_runs.AFTER)
        weights = get_model_state_dict(self.model, options=_WHOLE)
        if dist.get_rank() == 0:
            torch_runs.write(output, losses, weights)


def main(directory: Path, output: Path) -> None:
    dist.init_process_group("gloo")
    run = Run(directory)
    run.train(torch_runs.BEFORE)
    dcp.save(run.state(), checkpoint_id=output / "checkpoint")
    run.finish(output / "uninterrupted")
    if dist.get_rank() == 0:
        subprocess.run([sys.executable, output / "convert.py"], check=True)
    dist.barrier()
    other = Run(directory)
    other.load(output / "made")
    assert other.step == torch_runs.BEFORE
    other.finish(output / "continued")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
