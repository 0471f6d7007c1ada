"""The project that megatron-core 0.15.3 made from a small corpus (tests/trainer/fixtures/retro-data)."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIXTURE = Path(__file__).parents[1] / "fixtures" / "retro-data"
INFO: dict[str, Any] = json.loads((FIXTURE / "info.json").read_text(encoding="utf-8"))
EOD: int = INFO["eod"]
QUERIES = {
    "train": "train_5d1eaf96373bec0ab960019310ecb66c",
    "valid": "valid_bd648f92bd980e2b568ff86a21c3116b",
    "test": None,
}


def expected() -> dict[str, NDArray[Any]]:
    """The arrays that megatron-core returned."""
    with np.load(FIXTURE / "expected.npz") as found:
        return {name: found[name] for name in found}


def settings_of_the_run() -> dict[str, Any]:
    """The settings as Megatron's preprocessing writes them into config.json."""
    return {
        "retro_gpt_seq_length": INFO["seq_length"],
        "retro_gpt_chunk_length": INFO["chunk_length"],
        "retro_gpt_data_path": ["0.7", "a", "0.3", "b"],
        "retro_gpt_split": INFO["split"],
        "retro_gpt_seed": INFO["seed"],
        "retro_gpt_train_samples": INFO["samples"]["train"],
        "retro_gpt_global_batch_size": 8,
        "retro_gpt_eval_interval": 100,
        "retro_gpt_eval_iters": 1,
        "retro_gpt_tokenizer_type": "NullTokenizer",
        "retro_block_size": INFO["block_size"],
        "retro_neighbor_dirs": QUERIES,
    }


def megatrons_project(directory: Path) -> Path:
    """The project with its data and config.json, as Megatron leaves it."""
    shutil.copytree(FIXTURE / "project", directory)
    shutil.copytree(FIXTURE / "data", directory / "data")
    shutil.copy(FIXTURE / "db" / "indexed_dataset_infos.json", directory / "db")
    config = json.dumps(settings_of_the_run(), indent=4, sort_keys=True)
    (directory / "config.json").write_text(config, encoding="utf-8")
    return directory
