"""Megatron-Bridge itself computes multimodal models, on ranks over gloo, with the stand-in for Transformer Engine.

    python -m tests.bridge_whole RANK WORLD RENDEZVOUS JOBS.json       rank 0 writes one line about each job

A job: {"checkpoint": its directory, "inputs": .npz with the words of forward(), "logits": .npy}. The model is built and its
tensors are loaded by Bridge's load_megatron_model, at a tensor-parallel size of WORLD.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests import delta_net_oracle
from tests.bridge_oracle import answer_jobs, import_bridge

ON_CPU = {
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
}
"""Settings of a provider with which its model runs on a CPU."""
TIMEOUT = timedelta(seconds=120)


def answer(job: dict[str, Any], world: int) -> dict[str, Any]:
    """Rank 0 writes float32 [batch, sequence, padded vocabulary]."""
    import numpy as np
    import torch
    from megatron.bridge.training import checkpointing, model_load_save
    from megatron.core import parallel_state

    iteration, release = checkpointing._resolve_checkpoint_iteration(job["checkpoint"], None)
    version = checkpointing.get_checkpoint_name(job["checkpoint"], iteration, release)
    parallel_state.initialize_model_parallel(world)
    try:
        provider, _ = model_load_save.load_model_config(version)
        overrides = {**ON_CPU, **_of_linear_layers(provider), "tensor_model_parallel_size": world}
        (model,) = model_load_save.load_megatron_model(
            version, use_cpu_init=True, mp_overrides=overrides
        )
        inputs = {name: torch.from_numpy(value) for name, value in np.load(job["inputs"]).items()}
        with torch.no_grad():
            found = model.eval()(**inputs)
        found = found[0] if isinstance(found, tuple) else found
        parts = [torch.empty_like(found) for _ in range(world)]
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_gather(parts, found.contiguous(), group=group)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            np.save(job["logits"], torch.cat(parts, -1).float().numpy())
        return {"provider": type(model.config).__name__}
    finally:
        parallel_state.destroy_model_parallel()


def _of_linear_layers(provider: Any) -> dict[str, Any]:
    """The setting with which core's linear attention runs on a CPU; empty for other models."""
    if getattr(provider, "experimental_attention_variant", None) is None:
        return {}
    delta_net_oracle.replace_length()
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    return {"deterministic_mode": True}


def serve(rank: int, world: int, rendezvous: str, jobs: list[dict[str, Any]]) -> None:
    import torch.distributed as dist

    from tests.megatron_oracle import run_on_cpu

    import_bridge(engine=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    with run_on_cpu():
        answer_jobs(jobs, rank, lambda job, _: answer(job, world))


if __name__ == "__main__":
    serve(
        int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(Path(sys.argv[4]).read_text())
    )
