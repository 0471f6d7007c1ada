"""Megatron core loads one of our checkpoints, weights and optimizer, strictly: `python -m tests.trainer.loop.core_load ITERATION TP`.

One process for each tensor rank, started with RANK set. The keys of optimizer state are what core's distributed optimizer
makes of the model's own sharded tensors in its fully_reshardable form: prefixed, fp32.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.megatron_oracle import build, run_on_cpu


def load(version: Path, tp: int) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    parallel_state.initialize_model_parallel(tp, 1)
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = dist_checkpointing.load_common_state_dict(str(version))
        args = common["args"]
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, 1
        args.virtual_pipeline_model_parallel_size = args.num_layers_per_virtual_pipeline_stage = (
            None
        )
        args.sequence_parallel = False
        model = build(args, None)
        sharded = model.sharded_state_dict()
        apply_factories(sharded)
        weights = [item for item in nested_values(sharded) if isinstance(item, ShardedTensor)]
        # Of names of one and the same tensor core's optimizer takes the last.
        last = {item.data.data_ptr(): number for number, item in enumerate(weights)}
        trained = [
            last[item.data.data_ptr()] == number and not item.key.endswith("router.expert_bias")
            for number, item in enumerate(weights)
        ]
        wanted = {
            f"{slot} {number}": replace(
                item,
                key=f"optimizer.state.{slot}.{item.key}",
                data=torch.full(item.data.shape, torch.nan),
                dtype=torch.float32,
            )
            for slot in ("param", "exp_avg", "exp_avg_sq")
            for number, item in enumerate(weights)
            if trained[number]
        }
        plain = {f"weight {number}": item for number, item in enumerate(weights)}
        objects = {
            name: item
            for name, item in sharded.items()
            if not isinstance(item, ShardedTensor | list | dict)
        }
        loaded = dist_checkpointing.load(
            {**plain, **wanted, **objects}, str(version), strict=StrictHandling.RAISE_ALL
        )
    for number in range(len(weights)):
        if not trained[number]:
            continue
        weight, master = loaded[f"weight {number}"], loaded[f"param {number}"]
        assert torch.equal(master.to(args.params_dtype), weight.to(args.params_dtype)), weights[
            number
        ].key
        assert loaded[f"exp_avg_sq {number}"].min() >= 0
        assert torch.isfinite(loaded[f"exp_avg {number}"]).all()
    assert any(
        bool(loaded[f"exp_avg {number}"].any()) for number in range(len(weights)) if trained[number]
    )
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert {(group["wd_mult"], group["lr_mult"], group["is_expert_parallel"], group["is_decoupled_lr"]) for group in groups} == {
        (1.0, 1.0, False, False), (0.0, 1.0, False, False),
    }  # fmt: skip
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    state = common["opt_param_scheduler"]
    holder = argparse.Namespace(param_groups=groups)
    # Read the saved rates now: making the scheduler sets those of a first step.
    ours = [group["lr"] for group in groups]
    scheduler = OptimizerParamScheduler(
        holder, 0.0, state["max_lr"], state["min_lr"], state["lr_warmup_steps"], state["lr_decay_steps"], state["lr_decay_style"],
        state["start_wd"], state["end_wd"], state["wd_incr_steps"], state["wd_incr_style"],
    )  # fmt: skip
    scheduler.load_state_dict(state)
    assert min(ours) > 0, "a rate of 0 shows nothing"
    theirs = [group["lr"] for group in groups]
    assert theirs == ours, f"the learning rate would jump from {ours} to {theirs}"
    print(f"{len(weights)} tensors and their optimizer state", flush=True)


def main() -> None:
    version, tp = Path(sys.argv[1]), int(sys.argv[2])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=tp)
    with run_on_cpu():
        load(version, tp)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
