"""megatron-core 0.15.3's RetroDataset reads what `retro build --retro-project-format megatron` writes.

It needs an environment of its own (CONTRIBUTING.md has the commands), whose Python RETRO_PYTHON names.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from megatron_lite.retrieval.retro.project import open_project
from tests.trainer.retrieval.retro_fixture import FIXTURE

PYTHON = os.environ.get("RETRO_PYTHON")
ROOT = Path(__file__).parents[3]
EOD = 64
NEIGHBORS, CHUNKS = 2, 2
FLAGS = (
    "--retro-gpt-seq-length 32 --retro-gpt-chunk-length 8 --retro-gpt-split 80,20,0 --retro-gpt-train-samples 24 "
    "--retro-gpt-global-batch-size 8 --retro-gpt-eval-iters 1 --retro-gpt-eval-interval 100 --retro-block-size 40 "
    "--retro-query-num-neighbors-query 3 --retro-query-num-neighbors-save 3 "
    "--tokenizer-type NullTokenizer --vocab-size 64 --retro-project-format megatron"
)
pytestmark = [
    pytest.mark.retro,
    pytest.mark.skipif(not PYTHON, reason="RETRO_PYTHON names no Python with megatron-core 0.15.3"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_lite.retrieval.commands.retro import main

    directory = tmp_path_factory.mktemp("core") / "project"
    data = ("0.7", str(FIXTURE / "data/a"), "0.3", str(FIXTURE / "data/b"))
    place = ["build", "--retro-project-dir", str(directory), "--retro-gpt-data-path", *data]
    assert main([*place, *FLAGS.split()]) == 0
    return directory


@pytest.fixture(scope="module")
def theirs(project: Path) -> Any:
    output = project / "core.npz"
    words = [project, NEIGHBORS, CHUNKS, EOD, output]
    command = [str(PYTHON), "-m", "tests.retro_oracle", *map(str, words)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    return np.load(output)


def test_some_chunks_have_fewer_neighbours_than_core_reads(project: Path) -> None:
    """Core then takes the last chunk of the database and the first one."""
    near = open_project(project).neighbors("train")
    assert near is not None
    assert any((near.of_sample(sample, NEIGHBORS) < 0).any() for sample in range(len(near)))


@pytest.mark.parametrize("split", ["train", "valid"])
def test_cores_samples_are_ours(project: Path, theirs: Any, split: str) -> None:
    """Tokens and neighbours of every sample."""
    opened = open_project(project)
    windows, near = opened.windows(split), opened.neighbors(split)
    assert windows is not None
    assert near is not None
    database = opened.database(EOD)
    for sample in range(len(windows)):
        rows = near.of_sample(sample, NEIGHBORS)
        tokens = database.retrieved(rows, CHUNKS, megatron=True)
        assert_array_equal(theirs[f"{split}/text"][sample], windows.window(sample))
        assert_array_equal(theirs[f"{split}/neighbor_tokens"][sample], tokens)
        assert_array_equal(theirs[f"{split}/neighbor_chunks"][sample][..., 0], rows % len(database))
