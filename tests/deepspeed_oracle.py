"""DeepSpeed itself on the CPU, in an environment of its own: runs under ZeRO 1, 2 and 3 on two processes.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.deepspeed_oracle MODEL OUTPUT STAGE ...

For each stage a run saves OUTPUT/N/checkpoint and goes on. `OUTPUT/convert.py N`, which the test wrote, makes OUTPUT/N/made of it, a
universal checkpoint. Another run goes on from there. Both write losses and fp32 weights, to OUTPUT/N/uninterrupted and
OUTPUT/N/continued. The modules compute in bf16.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

from tests import torch_runs


def engine_of(stage: int, directory: Path, *, universal: bool) -> Any:
    model = torch_runs.model_of(directory)
    optimizer = torch_runs.adamw(model)
    if stage == 3:
        # ZeRO 3 gives all groups one step counter. torch's AdamW would advance it once per group.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-7)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, torch_runs.falling)
    config = {
        "train_micro_batch_size_per_gpu": torch_runs.BATCH // 2,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": universal},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    return engine


def train(engine: Any, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        vocab = engine.module.config.vocab_size
        ids = torch_runs.tokens(step, engine.global_rank, 2, vocab)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def finish(engine: Any, output: Path) -> None:
    losses = train(engine, torch_runs.BEFORE, torch_runs.AFTER)
    weights = {
        name: safe_get_full_fp32_param(parameter).clone()
        for name, parameter in engine.module.named_parameters()
    }
    if engine.global_rank == 0:
        torch_runs.write(output, losses, weights)


def both(stage: int, directory: Path, output: Path) -> None:
    engine = engine_of(stage, directory, universal=False)
    train(engine, 0, torch_runs.BEFORE)
    engine.save_checkpoint(str(output / str(stage) / "checkpoint"))
    finish(engine, output / str(stage) / "uninterrupted")
    if engine.global_rank == 0:
        subprocess.run([sys.executable, output / "convert.py", str(stage)], check=True)
    torch.distributed.barrier()
    other = engine_of(stage, directory, universal=True)
    other.load_checkpoint(str(output / str(stage) / "made"))
    assert other.global_steps == torch_runs.BEFORE
    finish(other, output / str(stage) / "continued")


def main(directory: Path, output: Path, stages: list[int]) -> None:
    # Its collectives over shared memory are compiled on their first use; gloo's need no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for stage in stages:
        both(stage, directory, output)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), list(map(int, sys.argv[3:])))
