"""Megatron core's own transformer block computes a tower that lies beside a language model, on the CPU: a gloo process a tensor rank.

`python -m tests.tower_oracle RANK FOLDER` reads FOLDER/job.json (ranks, sizes, kind) and FOLDER/input.pt (what comes after the
embedding of patches, and the angles by which they rotate), loads the rank's file of FOLDER/core strictly by name, and rank 0 writes
FOLDER/output.pt. The layers are those of core's vit_layer_specs, local ones; merging, of which core has no module, is here.
"""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.megatron_oracle import REPOSITORY, read_rank_file, run_on_cpu, version_directory

BEFORE = "vision_model."


def compute(folder: Path, ranks: int) -> Any:
    """(merged tokens, what goes to the language model's first layers) of the job in a folder. Raises where a rank fails."""
    import torch

    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    commands = (
        [sys.executable, "-m", "tests.tower_oracle", str(rank), str(folder)]
        for rank in range(ranks)
    )
    started = [
        subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(said)
    return torch.load(folder / "output.pt")


def main(rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    job = json.loads((folder / "job.json").read_text())
    tp = job["ranks"]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=tp,
        timeout=timedelta(seconds=120),
    )
    parallel_state.initialize_model_parallel(tp)
    file = version_directory(folder / "core") / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
    model = read_rank_file(file)["model"]
    tower = {
        name.removeprefix(BEFORE): value for name, value in model.items() if name.startswith(BEFORE)
    }
    given = torch.load(folder / "input.pt")
    with run_on_cpu(), torch.no_grad():
        found = _run(job, tp, tower, given["hidden"], given["angles"])
    if rank == 0:
        torch.save(found, folder / "output.pt")
    dist.barrier()


def _run(job: dict[str, Any], tp: int, tower: dict[str, Any], hidden: Any, angles: Any) -> Any:
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlock

    config = _config(job, tp)
    spec = get_vit_layer_with_local_spec()
    spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    block = TransformerBlock(config, spec, post_layer_norm=False).eval()
    merging = ("merger.", "decoder.deepstack_merger_list.")
    inside = {name: value for name, value in tower.items() if name.startswith("decoder.layers.")}
    block.load_state_dict(
        {name.removeprefix("decoder."): value for name, value in inside.items()}, strict=True
    )
    outside = {name for name in tower if name not in inside and not name.startswith(merging)}
    assert all(name.startswith(("patch_embed.", "pos_embed.")) for name in outside), outside
    after: list[Any] = []
    for layer in block.layers:
        layer.register_forward_hook(lambda module, args, output: after.append(output[0][:, 0]))
    block(hidden[:, None], attention_mask=None, rotary_pos_emb=angles[:, None, None])
    merged = _merger(config, job, tower, "merger.", after_merge=False)(after[-1])
    deep = [
        _merger(config, job, tower, f"decoder.deepstack_merger_list.{index}.", after_merge=True)(
            after[layer]
        )
        for index, layer in enumerate(job["deepstack"])
    ]
    return merged, deep


def _config(job: dict[str, Any], tp: int) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    exact = "silu" if job["gated"] else "gelu"
    activation = getattr(torch.nn.functional, exact)
    off = (
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "gradient_accumulation_fusion",
    )
    return TransformerConfig(
        num_layers=job["layers"],
        hidden_size=job["hidden"],
        num_attention_heads=job["heads"],
        num_query_groups=job["kv_heads"],
        ffn_hidden_size=job["ffn"],
        kv_channels=job["hidden"] // job["heads"],
        gated_linear_unit=job["gated"],
        activation_func=activation
        if job["gated"]
        else lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        normalization="RMSNorm" if job["gated"] else "LayerNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=True,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        **dict.fromkeys(off, False),
    )


def _merger(
    config: Any, job: dict[str, Any], tower: dict[str, Any], before: str, *, after_merge: bool
) -> Any:
    """Norm, column parallel, gelu, row parallel; of several tokens beside each other. after_merge: norms them once they are."""
    import torch
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    width = config.hidden_size * job["merge"]
    kind = torch.nn.RMSNorm if job["gated"] else torch.nn.LayerNorm
    norm = kind(width if after_merge else config.hidden_size, eps=1e-6)
    same: Any = {
        "config": config,
        "init_method": config.init_method,
        "bias": True,
        "skip_bias_add": False,
    }
    fc1 = ColumnParallelLinear(width, width, gather_output=False, **same)
    fc2 = RowParallelLinear(width, job["out"], input_is_parallel=True, **same)
    parts = torch.nn.ModuleDict({"patch_norm": norm, "linear_fc1": fc1, "linear_fc2": fc2})
    parts.load_state_dict(
        {
            name.removeprefix(before): value
            for name, value in tower.items()
            if name.startswith(before)
        },
        strict=True,
    )

    def forward(hidden: Any) -> Any:
        beside = norm(hidden.view(-1, width)) if after_merge else norm(hidden).view(-1, width)
        return fc2(torch.nn.functional.gelu(fc1(beside)[0]))[0]

    return forward


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
