"""`evaluate --retro-project-dir`: the loss of a Retro on a project's validation samples, by its neighbors.

with retrieval       the neighbors that the project has
without              no neighbors: cross attention is not computed
random neighbors     chunks drawn at random, as a control

`covered_loss` is of the tokens that see neighbors: those behind the first chunk.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.inference.live_search import require_chunks
from megatron_lite.inference.opening import Opened
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.rng import mix
from megatron_lite.retrieval.retro.database import ChunkDatabase
from megatron_lite.retrieval.retro.neighbors import Neighbors
from megatron_lite.retrieval.retro.project import open_project
from megatron_lite.retrieval.retro.windows import Windows

SPLIT = "valid"
ROWS = 4
"""Samples of a pass."""
Find = Callable[[int], NDArray[np.int64]]
"""Number of a sample -> int64 [chunks, neighbors], rows of the database."""


@dataclass(frozen=True)
class Measured:
    """The samples of a project, and the model's numbers."""

    windows: Windows
    near: Neighbors
    database: ChunkDatabase
    count: int
    chunks: int
    megatron: bool
    seed: int

    def found(self, sample: int) -> NDArray[np.int64]:
        """Return the neighbors that the project has."""
        return self.near.of_sample(sample, self.count)

    def drawn(self, sample: int) -> NDArray[np.int64]:
        """Return random neighbors, the same in every run."""
        generator = np.random.default_rng(mix(self.seed, sample))
        return generator.integers(len(self.database), size=self.found(sample).shape)

    def batches(self, find: Find | None, first_label: int) -> Iterator[Microbatch]:
        """Yield all samples. find: None for passes without neighbors. first_label: the first label that counts."""
        for first in range(0, len(self.windows), ROWS):
            numbers = range(first, min(first + ROWS, len(self.windows)))
            rows = torch.from_numpy(np.stack([self.windows[number].tokens for number in numbers]))
            source = None if find is None else self._tokens([find(number) for number in numbers])
            mask = torch.ones_like(rows[:, 1:], dtype=torch.float32)
            mask[:, :first_label] = 0
            yield Microbatch(rows[:, :-1], rows[:, 1:], mask, source=source)

    def _tokens(self, rows: list[NDArray[np.int64]]) -> torch.Tensor:
        found = self.database.retrieved(np.stack(rows), self.chunks, megatron=self.megatron)
        return torch.from_numpy(found.reshape(-1, found.shape[-1]))


def measure(opened: Opened, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return loss and perplexity by kind of neighbors. Raises UsageError, CorruptCheckpoint."""
    config = opened.config
    if not config.retrieval.layers:
        raise UsageError(
            f"--retro-project-dir: {opened.path} is a {config.family} without retrieval; measure it with --corpus"
        )
    if opened.model.grid.world > 1:
        raise UsageError("--retro-project-dir: the loss is measured in one process; start only one")
    project = open_project(given.retro_project_dir)
    project.check_data()
    require_chunks(project, opened)
    windows, near = project.windows(SPLIT), project.neighbors(SPLIT)
    if windows is None or near is None:
        raise UsageError(f"{project.path}: has no samples for validation with neighbors")
    own = Measured(
        windows, near, project.database(project.eod(opened.tokenizer)), config.retrieval.neighbors,
        config.retrieval.chunks, given.retro_megatron_neighbors, project.settings.seed,
    )  # fmt: skip
    kinds: dict[str, Find | None] = {
        "retro, with retrieval": own.found,
        "retro, without": None,
        "retro, random neighbors": own.drawn,
    }
    return {name: _measures(opened, own, find) for name, find in kinds.items()}


def _measures(opened: Opened, own: Measured, find: Find | None) -> dict[str, Any]:
    loss, tokens = _loss(opened, own.batches(find, 0))
    covered, _ = _loss(opened, own.batches(find, opened.config.retrieval.chunk - 1))
    perplexity = math.exp(min(loss, 700.0))
    return {
        "loss": loss,
        "covered_loss": covered,
        "perplexity": perplexity,
        "predicted_tokens": tokens,
    }


def _loss(opened: Opened, batches: Iterator[Microbatch]) -> tuple[float, int]:
    """Return the mean loss, and the number of labels that count."""
    total, tokens = 0.0, 0.0
    device = opened.model.grid.device
    for batch in batches:
        found, count = opened.model.engine.evaluate([batch.to(device)])["loss"]
        total, tokens = total + found, tokens + count
    return total / tokens, int(tokens)
