"""Megatron core itself, training on the CPU: its model, data-parallel wrapper, optimizer, parameter scheduler and schedule.

Run as `python -m tests.trainer.parallel.core_oracle JOB`: a file with checkpoints, tokens, learning rate, the answer's file.
It is a process of its own because it changes torch for all of it.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.megatron_oracle import (
    REPOSITORY,
    load_chunks,
    read_rank_file,
    run_on_cpu,
    version_directory,
)

BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


def train_with_core(
    checkpoints: list[Path], tokens: torch.Tensor, lr: float, directory: Path
) -> list[list[tuple[float, float]]]:
    """(loss, gradient norm) of each step, for each checkpoint.

    tokens int64 [steps, microbatches, batch, sequence + 1]. directory: where files are exchanged.
    """
    torch.save(tokens, directory / "tokens.pt")
    answer, job = directory / "answer.json", directory / "job.json"
    job.write_text(
        json.dumps([list(map(str, checkpoints)), str(directory / "tokens.pt"), lr, str(answer)])
    )
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.parallel.core_oracle", str(job)]
    # Dynamo fuses gelu with what stands for CUDA here; threads of such small products wait for each other on a busy machine.
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert not done.returncode, done.stderr[-4000:]
    found: list[list[tuple[float, float]]] = json.loads(answer.read_text())
    return found


def without_cuda() -> None:
    """Replace the calls of CUDA in the optimizer and the schedule: streams, events, marks, and the name of a type."""

    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

        def __enter__(self) -> "Nothing":
            return self

        def __exit__(self, *_: object) -> None: ...

    for name in ("Stream", "Event", "current_stream", "default_stream", "stream", "synchronize"):
        setattr(torch.cuda, name, Nothing)
    torch.cuda.nvtx = SimpleNamespace(range_push=lambda *_: None, range_pop=lambda *_: None)  # type: ignore[assignment]
    plain_type = torch.Tensor.type

    def named_as_on_cuda(self: torch.Tensor, *arguments: Any, **words: Any) -> Any:
        found = plain_type(self, *arguments, **words)
        # A mode that is entered looks the method up again, and so passes here twice.
        return (
            re.sub(r"^torch\.(?!cuda)", "torch.cuda.", found) if isinstance(found, str) else found
        )

    torch.Tensor.type = named_as_on_cuda  # type: ignore[method-assign, assignment]


def train(checkpoint: Path, tokens: torch.Tensor, lr: float) -> list[tuple[float, float]]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func

    version = version_directory(checkpoint)
    args = read_rank_file(min(version.glob("mp_rank_*/model_optim_rng.pt")))["args"]
    (model,) = load_chunks(args, version, further=True)
    model.output_layer.gather_output = False  # built for logits, not for a loss
    model.config.mtp_num_layers = args.mtp_num_layers  # taken away for the same reason
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    settings = OptimizerConfig(
        lr=lr,
        min_lr=lr,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        clip_grad=CLIP,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    # Without a scheduler core would let norms decay too.
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=lr, max_lr=lr, min_lr=lr, lr_warmup_steps=0, lr_decay_steps=1000, lr_decay_style="constant",
        start_wd=WEIGHT_DECAY, end_wd=WEIGHT_DECAY, wd_incr_steps=1000, wd_incr_style="constant",
    )  # fmt: skip
    found = []
    for step in tokens:
        found.append(train_step(wrapped, optimizer, step, get_forward_backward_func()))
        scheduler.step(1)
    return found


def train_step(
    model: Any, optimizer: Any, step: torch.Tensor, forward_backward: Any
) -> tuple[float, float]:
    """step int64 [microbatches, batch, sequence + 1]."""

    def forward(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        tokens, labels = batch[:, :-1], batch[:, 1:]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        losses = model(tokens, positions, None, labels=labels)

        def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

        return losses, mean

    model.zero_grad_buffer()
    optimizer.zero_grad()
    reported = forward_backward(
        forward_step_func=forward,
        data_iterator=iter(step),
        model=[model],
        num_microbatches=len(step),
        seq_length=step.shape[-1] - 1,
        micro_batch_size=step.shape[1],
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    return sum(item["loss"].item() for item in reported) / len(reported), float(norm)


def answer(checkpoints: list[str], tokens: str, lr: float, answered: str) -> None:
    """One process is its own data-parallel, tensor-parallel and pipeline-parallel group."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{answered}.meeting", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found = [train(Path(checkpoint), torch.load(tokens), lr) for checkpoint in checkpoints]
    Path(answered).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    with run_on_cpu():
        without_cuda()
        answer(*json.loads(Path(sys.argv[1]).read_text()))
