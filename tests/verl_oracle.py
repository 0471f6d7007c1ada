"""verl's own checkpoint managers, run on the CPU: they save a model with the state of its optimizer.

    VERL_PYTHON -m tests.verl_oracle megatron CHECKPOINT TARGET HUGGINGFACE SHARDING
    VERL_PYTHON -m tests.verl_oracle fsdp HUGGINGFACE TARGET SHARDING

Source: verl 0.9.1, with megatron-core 0.19.2 and transformers 5.10. Each rank is a process with gloo.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.megatron_oracle import REPOSITORY

SECONDS = 600
STEPS = 2


def save(python: str, ranks: int, directory: Path, kind: str, *arguments: object) -> None:
    """Run the ranks of a save in verl's Python. Fails with what they printed."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [python, "-m", "tests.verl_oracle", kind, *map(str, arguments)]
    logs = [directory / f"verl-{rank}.log" for rank in range(ranks)]
    started = []
    for rank, log in enumerate(logs):
        given = [*command, str(rank), str(ranks), str(directory / "rendezvous")]
        with log.open("w") as output:
            started.append(
                subprocess.Popen(
                    given, cwd=REPOSITORY, env=environment, stdout=output, stderr=output
                )
            )
    try:
        statuses = [process.wait(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    printed = "".join(f"\n{log.name}:\n{log.read_text()[-3000:]}" for log in logs)
    assert statuses == [0] * ranks, printed


# A rank's side.


def save_megatron(
    checkpoint: Path, target: Path, huggingface: Path, sharding: str, rank: int, rendezvous: Path
) -> None:
    """Megatron takes a step from a checkpoint, saves rank files in `target`/core, and verl its own in `target`/actor."""
    from transformers import AutoConfig
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    from tests import optimizer_oracle
    from tests.megatron_oracle import (
        WORLD,
        build,
        own_file,
        process_groups,
        read_rank_file,
        save_without_cuda,
        version_directory,
    )

    with optimizer_oracle.on_cpu():
        version = version_directory(checkpoint)
        args = read_rank_file(min(version.glob("mp_rank_*/model_optim_rng.pt")))["args"]
        args.rank, args.world_size = rank, WORLD
        with process_groups(args, rank, rendezvous):
            save_without_cuda()
            models = {"model": optimizer_oracle.wrapped(args, [build(args, None)])[0]}
            optimizer = optimizer_oracle.build_optimizer(args, list(models.values()))
            state = optimizer_oracle.load(version, args, models, optimizer)
            optimizer_oracle.update(optimizer)
            file = target / "core" / own_file(version, args).relative_to(checkpoint)
            optimizer_oracle.save(file, state, args, models, optimizer)
            megatron = SimpleNamespace(
                dist_ckpt_optim_fully_reshardable=sharding == "fully_reshardable",
                distrib_optim_fully_reshardable_mem_efficient=False,
            )
            manager = MegatronCheckpointManager(
                config=SimpleNamespace(
                    model=SimpleNamespace(path=str(huggingface)), megatron=megatron
                ),
                checkpoint_config=Contents(async_save=False),
                model_config=None,
                transformer_config=models["model"].module.config,
                role="actor",
                model=list(models.values()),
                arch="LlamaForCausalLM",
                hf_config=AutoConfig.from_pretrained(huggingface),
                param_dtype=args.params_dtype,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                processing_class=None,
                optimizer=optimizer,
                optimizer_scheduler=scheduler(state["opt_param_scheduler"]),
                use_distributed_optimizer=args.use_distributed_optimizer,
                use_dist_checkpointing=True,
            )
            manager.save_checkpoint(str(target / "actor"), global_step=STEPS)


def save_fsdp(huggingface: Path, target: Path, kind: str, rank: int, ranks: int, rendezvous: Path) -> None:  # fmt: skip
    """A model of transformers takes steps under FSDP. verl saves it in `target`/actor, and rank 0 its complete optimizer.

    kind: `fsdp` or `fsdp2` as verl's strategy; with `-hybrid`, `-orig` (use_orig_params) or `-frozen` (a frozen norm).
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.torch_functional import get_constant_schedule_with_warmup

    torch.distributed.init_process_group(
        "gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks
    )
    shape = (2, ranks // 2) if "hybrid" in kind else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    model = AutoModelForCausalLM.from_pretrained(huggingface, torch_dtype=torch.float32)
    model.model.norm.weight.requires_grad_("frozen" not in kind)
    wrapped = sharded(model, mesh, kind)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, weight_decay=0.1)
    schedule = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=4)
    for step in range(STEPS):
        torch.manual_seed(step * ranks + rank)
        tokens = torch.randint(model.config.vocab_size, (2, 8))
        wrapped(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    contents = ["model", "optimizer", "extra"]
    FSDPCheckpointManager(
        wrapped, optimizer, schedule, None, Contents(save=contents, load=contents)
    ).save_checkpoint(str(target / "actor"), global_step=STEPS)
    found = complete(wrapped, optimizer)
    if rank == 0:
        torch.save(found, target / "complete.pt")
    torch.distributed.destroy_process_group()


def sharded(model: Any, mesh: Any, kind: str) -> Any:
    """The model as FSDPEngine of verl shards it."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
    from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy

    if kind.startswith("fsdp2"):
        apply_fsdp2(model, {"mesh": mesh}, {})
        return model
    hybrid = mesh.ndim == 2
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(model),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params="orig" in kind,
    )
    FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT)
    return wrapped


def complete(model: Any, optimizer: Any) -> dict[str, Any]:
    """torch's own state dict of the optimizer, with all tensors by name and complete."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    # With cpu_offload, torch 2.13 reuses a buffer on the CPU under use_orig_params: both moments become the second.
    options = StateDictOptions(full_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


class Contents(dict[str, Any]):
    """verl's CheckpointConfig, as its managers read it: by key and by attribute."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def scheduler(state: dict[str, Any]) -> Any:
    """A scheduler with the state of Megatron's OptimizerParamScheduler."""
    return SimpleNamespace(state_dict=lambda: state)


def main(kind: str, *arguments: str) -> None:
    *given, rank, ranks, rendezvous = arguments
    if kind == "megatron":
        checkpoint, target, huggingface, sharding = given
        save_megatron(
            Path(checkpoint), Path(target), Path(huggingface), sharding, int(rank), Path(rendezvous)
        )
    if kind == "fsdp":
        model, target, strategy = given
        save_fsdp(Path(model), Path(target), strategy, int(rank), int(ranks), Path(rendezvous))


if __name__ == "__main__":
    main(*sys.argv[1:])
