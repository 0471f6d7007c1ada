"""megatron-core 0.15.3's own RetroDataset, run on the CPU in an environment of its own, on a project directory.

    python -m tests.retro_oracle PROJECT NEIGHBORS CHUNKS EOD OUTPUT.npz

Core 0.15.3 is the last release with Retro. Its datasets are made as Megatron-LM's pretrain_retro.py makes them, from config.json.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def datasets_of(project: Path, config: dict[str, Any], eod: int) -> dict[str, Any]:
    """The GPT samples of each split with their number, by core's builder."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.retro.query.multi_split_gpt_dataset import (
        MultiSplitGPTDataset,
        MultiSplitGPTDatasetConfig,
    )
    from megatron.core.datasets.utils import get_blend_from_list

    words = list(config["retro_gpt_data_path"])
    words[1::2] = [str(project / "data" / name) for name in words[1::2]]
    batch = config["retro_gpt_global_batch_size"]
    steps = config["retro_gpt_train_samples"] // batch
    evaluations = steps // config["retro_gpt_eval_interval"] + 1
    evaluated = config["retro_gpt_eval_iters"] * batch
    counts = [config["retro_gpt_train_samples"], evaluations * evaluated, evaluated]
    options = MultiSplitGPTDatasetConfig(
        random_seed=config["retro_gpt_seed"],
        sequence_length=config["retro_gpt_seq_length"],
        blend=get_blend_from_list(words),
        split=config["retro_gpt_split"],
        split_preprocessing=config["retro_gpt_split"],
        path_to_cache=None,
        return_document_ids=True,
        tokenizer=SimpleNamespace(eod=eod, unique_identifiers={"eod": eod}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    made = BlendedMegatronDatasetBuilder(
        MultiSplitGPTDataset, counts, lambda: True, options
    ).build()
    return dict(zip(("train", "valid", "test"), zip(made, counts, strict=True), strict=True))


def main(project: Path, neighbors: int, chunks: int, eod: int, output: Path) -> None:
    """Write the samples of each split: text, neighbor_chunks and neighbor_tokens."""
    import numpy as np
    import torch
    from megatron.core.datasets.retro.query.retro_dataset import get_retro_datasets

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    config = json.loads((project / "config.json").read_text(encoding="utf-8"))
    settings = SimpleNamespace(
        retro_project_dir=str(project),
        retro_chunk_length=config["retro_gpt_chunk_length"],
        retro_neighbor_dirs=config["retro_neighbor_dirs"],
        retro_block_size=config["retro_block_size"],
        retro_num_neighbors=neighbors,
        retro_num_retrieved_chunks=chunks,
        retro_verify_neighbor_count=True,
    )
    gpt = datasets_of(project, config, eod)
    made = get_retro_datasets(settings, gpt, config["retro_gpt_seq_length"], eod)
    found: dict[str, Any] = {}
    for split, dataset in zip(("train", "valid"), made, strict=False):
        samples = [dataset[index] for index in range(gpt[split][1])]
        for name in ("text", "neighbor_chunks", "neighbor_tokens"):
            found[f"{split}/{name}"] = np.stack([sample[name] for sample in samples])
    np.savez(output, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), Path(sys.argv[5]))
