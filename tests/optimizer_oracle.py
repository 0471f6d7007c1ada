"""Megatron core's own optimizers, run on the CPU: they load a checkpoint, take one step, and save it again.

    step([(checkpoint, target), ...], directory)

Four gloo processes, each `python -m tests.optimizer_oracle RANK JOBS`. Gradients are a function of the fp32 parameter
alone, element by element, so that a step is the same step at every layout. The optimizer is torch's AdamW; the
distributed one of core 0.16 loads files only with Transformer Engine's or Apex's FusedAdam, for which a plain AdamW with
their interface stands in.
"""

import contextlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import score_oracle
from tests.megatron_oracle import (
    REPOSITORY,
    WORLD,
    build,
    own_file,
    process_groups,
    read_rank_file,
    run_on_cpu,
    version_directory,
    virtual_stages,
)

if TYPE_CHECKING:
    import torch

SECONDS = 600


def step(jobs: list[tuple[Path, Path]], directory: Path) -> None:
    """Each checkpoint, one step further, at its target. Fails with what the ranks said."""
    listed = directory / "jobs.json"
    listed.write_text(json.dumps([[str(source), str(target)] for source, target in jobs]))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    ranks = []
    for rank in range(WORLD):
        command = [sys.executable, "-m", "tests.optimizer_oracle", str(rank), str(listed)]
        with (directory / f"rank-{rank}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
            )
    try:
        statuses = [rank.wait(SECONDS) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = "".join(
        f"\n{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(directory.glob("rank-*.log"))
    )
    assert statuses == [0] * WORLD, said


def gradient(master: "torch.Tensor") -> "torch.Tensor":
    """A gradient of a realistic size, without any meaning."""
    return (1000 * master.float()).cos() * 1e-3


# A rank's side.


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let optimizers run on a CPU, in addition to megatron_oracle.run_on_cpu: they ask for CUDA by the names of
    tensor types."""
    import torch
    from torch.overrides import TorchFunctionMode

    class AsOnCuda(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = function(*args, **(kwargs or {}))
            if function is torch.Tensor.type and len(args) == 1 and not kwargs:
                return found.replace("torch.", "torch.cuda.")
            return found

    with run_on_cpu(), AsOnCuda():
        yield


def stand_in() -> Any:
    """AdamW as Transformer Engine's FusedAdam has it: a step in every group, none with the parameters."""
    import torch

    class FusedAdam(torch.optim.Optimizer):
        def __init__(
            self,
            params: Any,
            lr: float,
            weight_decay: float,
            betas: Any,
            eps: float,
            adam_w_mode: bool,
            capturable: bool = False,  # from core 0.19 on
        ) -> None:
            super().__init__(
                params,
                {
                    "lr": lr,
                    "bias_correction": True,
                    "betas": betas,
                    "eps": eps,
                    "weight_decay": weight_decay,
                },
            )

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    state = self.state[parameter]
                    adamw(
                        parameter,
                        state["exp_avg"],
                        state["exp_avg_sq"],
                        gradient(parameter),
                        group["step"],
                        group,
                    )

    return FusedAdam


def adamw(
    master: "torch.Tensor",
    first: "torch.Tensor",
    second: "torch.Tensor",
    gradients: "torch.Tensor",
    count: int,
    group: Any,
) -> None:
    """One step in place, by the book."""
    beta1, beta2 = group["betas"]
    master.mul_(1 - group["lr"] * group["weight_decay"])
    first.mul_(beta1).add_(gradients, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    scale = (second / (1 - beta2**count)).sqrt_().add_(group["eps"])
    master.addcdiv_(first / (1 - beta1**count), scale, value=-group["lr"])


def sgd(
    master: "torch.Tensor", momentum: "torch.Tensor", gradients: "torch.Tensor", group: Any
) -> None:
    """One step in place, by the book."""
    momentum.mul_(group["momentum"]).add_(gradients).add_(master, alpha=group["weight_decay"])
    master.add_(momentum, alpha=-group["lr"])


def take_step(rank: int, checkpoint: Path, target: Path) -> None:
    version = version_directory(checkpoint)
    args = read_rank_file(
        min([*version.glob("common.pt"), *version.glob("mp_rank_*/model_optim_rng.pt")])
    )["args"]
    args.rank, args.world_size = rank, WORLD  # Megatron sets these at its start
    target.parent.mkdir(parents=True, exist_ok=True)
    with process_groups(args, rank, target.with_suffix(".rendezvous")):
        stages = range(virtual_stages(args) or 1)
        names = ["model"] if len(stages) == 1 else [f"model{stage}" for stage in stages]
        chunks = [build(args, stage if len(stages) > 1 else None) for stage in stages]
        for chunk in chunks:
            score_oracle.replace_head(chunk, checkpoint)
        models = dict(zip(names, wrapped(args, chunks), strict=True))
        optimizer = build_optimizer(args, list(models.values()))
        state = load(version, args, models, optimizer)
        update(optimizer)
        save(
            target / version.name / own_file(version, args).relative_to(version),
            state,
            args,
            models,
            optimizer,
        )


def update(optimizer: Any) -> None:
    """Take one step, with gradients that the parameters alone determine."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = gradient(parameter)
        part.optimizer.step()
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()


def load(version: Path, args: Namespace, models: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Everything into its place, with Megatron's own code for either format; returns what else there is."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    if (version / "metadata.json").exists():
        content = read_rank_file(version / "common.pt")["content_metadata"]
        wanted: dict[str, Any] = {
            name: chunk.module.sharded_state_dict() for name, chunk in models.items()
        }
        wanted["optimizer"] = optimizer.sharded_state_dict(
            wanted, is_loading=True, metadata=content
        )
        if not args.no_save_rng:
            wanted["rng_state"] = random_generators()
        with torch.serialization.safe_globals([Namespace]):
            state: Any = dist_checkpointing.load(
                wanted, str(version), strict=StrictHandling.RAISE_ALL
            )
    else:
        state = read_rank_file(own_file(version, args))
    for name, chunk in models.items():
        chunk.module.load_state_dict(state[name], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    if args.use_distributed_optimizer and not (version / "metadata.json").exists():
        optimizer.load_parameter_state(str(own_file(version, args).with_name("distrib_optim.pt")))
    return dict(state)


def random_generators() -> Any:
    """The random number generators that Megatron saves, for this rank's place in the grid of stages and tensor
    ranks."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedObject

    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", None, (stages, ranks), (stage, rank), replica_id=copy)


def save(
    file: Path, state: dict[str, Any], args: Namespace, models: dict[str, Any], optimizer: Any
) -> None:
    """Save a state as a rank file."""
    import torch
    from megatron.core import parallel_state

    file.parent.mkdir(parents=True, exist_ok=True)
    if args.use_distributed_optimizer:
        for chunk in models.values():
            chunk.start_param_sync(force_sync=True)
        optimizer.save_parameter_state(str(file.with_name("distrib_optim.pt")))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        weights = {
            name: chunk.module.state_dict_for_save_checkpoint() for name, chunk in models.items()
        }
        kept = {key: value for key, value in state.items() if key not in ("optimizer", *weights)}
        torch.save({**kept, **weights, "optimizer": optimizer.state_dict(), "args": args}, file)


def wrapped(args: Namespace, chunks: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
    )
    return [
        DistributedDataParallel(chunk.config, config, chunk.to(args.params_dtype).train())
        for chunk in chunks
    ]


def build_optimizer(args: Namespace, chunks: list[Any]) -> Any:
    from megatron.core import optimizer as core
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer

    if args.use_distributed_optimizer:
        core.Adam = distrib_optimizer.Adam = stand_in()
        core.USING_PYTORCH_OPTIMIZER, distrib_optimizer.HAVE_APEX_OR_TE = False, True
    config = OptimizerConfig(
        optimizer=args.optimizer, sgd_momentum=getattr(args, "sgd_momentum", 0.9), lr=args.lr, min_lr=args.min_lr,
        weight_decay=args.weight_decay, bf16=args.bf16, fp16=args.fp16, params_dtype=args.params_dtype,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )  # fmt: skip
    return core.get_megatron_optimizer(config, chunks)


def main(rank: int, jobs: Path) -> None:
    with on_cpu():
        for source, target in json.loads(jobs.read_text()):
            take_step(rank, Path(source), Path(target))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
