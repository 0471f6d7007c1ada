"""Several ranks of Megatron-Bridge itself on the CPU, over gloo: load checkpoints, put adapters on them, answer with logits.

    python -m tests.bridge_ranks RANK WORLD RENDEZVOUS JOBS.json      rank 0 writes one line about each job

A job: {"base": checkpoint, "adapter": checkpoint or null, "tokens": .npy, "logits": .npy, "tp", "pp", "ep", "etp": sizes}. The model is
built and its tensors are loaded by Bridge's load_megatron_model, at the job's sizes; the adapter's modules are put on it by the
class that its run_config.yaml names, which picks its keys, and Bridge's load of a model's state dict, not strict, as it resumes a
run that trains an adapter (checkpointing.py: is_peft_resume). What is replaced: see bridge_oracle.

"grouped": true builds grouped layers of experts (bridge_grouped.py). {"peft": settings of a class, "save": directory} instead of
an adapter: random matrices, which Bridge saves.
"""

import json
import sys
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.bridge_grouped import grouped_layers
from tests.bridge_oracle import answer_jobs, answer_overrides, import_bridge

TIMEOUT = timedelta(seconds=120)


def with_adapter(chunks: list[Any], checkpoint: Path) -> dict[str, Any]:
    """Puts Bridge's modules on the model, and what the checkpoint holds of them into these. Returns their sizes by key."""
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.config import CheckpointConfig
    from megatron.bridge.utils.instantiate_utils import instantiate
    from megatron.core import dist_checkpointing

    version = _version(checkpoint)
    settings = checkpointing.read_run_config(
        checkpointing.get_checkpoint_run_config_filename(version)
    )
    peft = instantiate(settings["peft"])
    _put_on(chunks, peft)
    common = dist_checkpointing.load_common_state_dict(version)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)

    def wanted() -> dict[str, Any]:
        found = checkpointing._generate_model_state_dict(chunks, {"metadata": metadata})
        chosen: dict[str, Any] = checkpointing.apply_peft_adapter_filter_to_state_dict(found, peft)
        return chosen

    keys = _keys(wanted())
    loaded = dist_checkpointing.load(
        wanted(), version, strict=CheckpointConfig.dist_ckpt_strictness
    )
    for number, chunk in enumerate(chunks):
        name = "model" if len(chunks) == 1 else f"model{number}"
        checkpointing._load_model_state_dict(chunk, loaded[name], False)
    return keys


def _put_on(chunks: list[Any], peft: Any) -> None:
    peft(chunks, training=True)
    peft.set_params_to_save(chunks)
    peft(chunks, training=False)


def with_random_adapter(chunks: list[Any], job: dict[str, Any]) -> dict[str, Any]:
    """Puts modules with random matrices on the model, and saves them with Bridge's description of its settings."""
    import torch
    import yaml
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.utils.instantiate_utils import instantiate
    from megatron.core import dist_checkpointing
    from megatron.core.parallel_state import get_data_parallel_group

    from tests.megatron_oracle import save_without_cuda

    peft = instantiate(job["peft"])
    _put_on(chunks, peft)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".adapter." in name:
                _fill(name, parameter)
    version = Path(job["save"]) / "iter_0000001"
    version.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    metadata = {"singleton_local_shards": False, "dp_cp_group": get_data_parallel_group()}

    def saved() -> dict[str, Any]:
        found = checkpointing._generate_model_state_dict(chunks, {"metadata": metadata})
        chosen: dict[str, Any] = checkpointing.apply_peft_adapter_filter_to_state_dict(found, peft)
        return chosen

    save_without_cuda()
    dist_checkpointing.save(saved(), str(version))
    described = {
        "model": {
            "tensor_model_parallel_size": job.get("tp", 1),
            "expert_tensor_parallel_size": job.get("etp", job.get("tp", 1)),
        },
        "peft": ConfigContainer._convert_value_to_dict(peft),
    }
    (version / "run_config.yaml").write_text(yaml.safe_dump(described))
    return _keys(saved())


def _fill(name: str, parameter: Any) -> None:
    """Random values: the same on all ranks that hold a copy, and others on ranks that hold another share."""
    import torch
    from megatron.core import parallel_state

    seed = crc32(name.encode()) + parallel_state.get_tensor_model_parallel_rank()
    if parameter.dim() == 3 or ".local_experts." in name:
        seed += 8 * parallel_state.get_expert_model_parallel_rank()
    generator = torch.Generator().manual_seed(seed)
    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)


def _keys(wanted: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(wanted)
    return {
        each.key: list(each.global_shape)
        for each in nested_values(wanted)
        if isinstance(each, ShardedTensor)
    }


def _version(checkpoint: Path) -> str:
    from megatron.bridge.training import checkpointing

    iteration, release = checkpointing._resolve_checkpoint_iteration(str(checkpoint), None)
    return str(checkpointing.get_checkpoint_name(str(checkpoint), iteration, release))


def answer(job: dict[str, Any], rank: int, world: int, rendezvous: str) -> dict[str, Any]:
    """The last stage's first rank writes float32 [batch, sequence, padded vocabulary]."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from megatron.bridge.training import model_load_save
    from megatron.core import parallel_state

    from tests.megatron_oracle import forward

    tp, pp, ep = (job.get(name, 1) for name in ("tp", "pp", "ep"))
    etp = job.get("etp", tp)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    try:
        version = _version(Path(job["base"]))
        provider, _ = model_load_save.load_model_config(version)
        overrides = answer_overrides(provider) | {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
        }
        overrides |= {
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            "pipeline_dtype": torch.float32,
        }
        chunks = model_load_save.load_megatron_model(
            version, use_cpu_init=True, mp_overrides=overrides
        )
        keys = {}
        if job.get("adapter"):
            keys = with_adapter(chunks, Path(job["adapter"]))
        elif job.get("peft"):
            keys = with_random_adapter(chunks, job)
        sizes = Namespace(hidden_size=chunks[0].config.hidden_size, params_dtype=torch.float32)
        with torch.no_grad():
            found = forward(
                sizes, [chunk.eval() for chunk in chunks], torch.from_numpy(np.load(job["tokens"]))
            )
        last = parallel_state.is_pipeline_last_stage()
        if last and tp > 1 and found.shape[-1] < chunks[0].vocab_size:
            parts = [torch.empty_like(found) for _ in range(tp)]
            dist.all_gather(
                parts, found.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
            )
            found = torch.cat(parts, -1)
        if (
            last
            and parallel_state.get_tensor_model_parallel_rank()
            == parallel_state.get_data_parallel_rank()
            == 0
        ):
            np.save(job["logits"], found.float().numpy())
        dist.barrier()
        return {"keys": keys}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def serve(rank: int, world: int, rendezvous: str, jobs: list[dict[str, Any]]) -> None:
    from tests.megatron_oracle import run_on_cpu

    import_bridge()

    def answered(job: dict[str, Any], number: int) -> dict[str, Any]:
        with grouped_layers() if job.get("grouped") else nullcontext():
            return answer(job, rank, world, f"{rendezvous}-{number}")

    with run_on_cpu():
        answer_jobs(jobs, rank, answered)


if __name__ == "__main__":
    serve(
        int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(Path(sys.argv[4]).read_text())
    )
