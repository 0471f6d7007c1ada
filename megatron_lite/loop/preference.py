"""Pairs of answers in a run: how probable the reference model finds each, measured once before training by the engine itself."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_lite.checkpoint.restore import Start, find_reference, load
from megatron_lite.data.batches import GlobalBatches, prefetch
from megatron_lite.data.finetuning.dataset import PairDataset
from megatron_lite.data.samples import Dataset
from megatron_lite.engine import Engine
from megatron_lite.loop import launch, reference_cache
from megatron_lite.loop.failure import all_or_none
from megatron_lite.loop.model_types import MODEL_TYPES, Feeder
from megatron_lite.loop.node import Group, once_a_node
from megatron_lite.settings.config import Settings
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.sizes import Sizes
from megatron_lite.settings.wording import counted

Say = Callable[[str], None]
NAMES = ("training", "validation", "test")
"""Of the data sets."""


def without_dropout(options: ModelOptions, say: Say) -> ModelOptions:
    """Of the model, whose log-probabilities are compared with a reference's; adapters keep theirs."""
    dropouts = options.hidden_dropout, options.attention_dropout
    if any(dropouts):
        say(
            "dropout {:g} and {:g} of the model are left out: answers are compared with the reference's".format(
                *dropouts
            )
        )
    return replace(options, hidden_dropout=0.0, attention_dropout=0.0)


def reference_of(settings: Settings, start: Start, node: Group) -> Start:
    """--load, also where the run goes on from --save. Collective. Raises CheckpointError."""
    if start.path == settings.checkpointing.load:
        return start
    return once_a_node(lambda: find_reference(settings), node)


def with_reference(
    engine: Engine,
    settings: Settings,
    start: Start,
    node: Group,
    datasets: Sequence[Dataset | None],
    sizes: Sizes,
    vocab: int,
    say: Say,
) -> list[Dataset | None]:
    """The same pairs, each with the log-probabilities of its answers; the engine has the weights of `start` then. Collective.

    What --dpo-reference-cache has is not computed: where it has all, the reference is not even loaded. Raises CheckpointError.
    """
    reference = reference_of(settings, start, node)
    cache = _Cache.of(engine, settings, datasets, sizes)
    known = [cache.read(which, dataset, say) for which, dataset in zip(NAMES, datasets, strict=True)]
    wanted = [
        isinstance(dataset, PairDataset) and values is None for dataset, values in zip(datasets, known, strict=True)
    ]
    found: list[Dataset | None] = []
    if any(wanted):
        load(engine, reference)
    for which, dataset, values in zip(NAMES, datasets, known, strict=True):
        if isinstance(dataset, PairDataset):
            if values is None:
                started = time.monotonic()
                values = _measured(engine, settings, dataset, sizes, vocab)
                pairs = counted(len(np.unique(dataset.order)), "pair")
                say(f"the reference's log-probabilities of {pairs}: {time.monotonic() - started:.1f} s")
                cache.write(which, dataset, values)
            dataset = replace(dataset, reference=values)
        found.append(dataset)
    if start is not reference or not any(wanted):
        load(engine, start)
    return found


@dataclass(frozen=True)
class _Cache:
    """--dpo-reference-cache, which rank 0 alone reads and writes; without it there is nothing, and nothing is kept."""

    directory: str | None
    engine: Engine
    sizes: Sizes
    weights: str = ""

    @classmethod
    def of(cls, engine: Engine, settings: Settings, datasets: Sequence[Dataset | None], sizes: Sizes) -> "_Cache":
        """Collective. Reads all weights of the reference, for their fingerprint. Raises CheckpointError."""
        directory, place = settings.dpo.dpo_reference_cache, settings.checkpointing.load
        assert place is not None
        if directory is None or not any(isinstance(dataset, PairDataset) for dataset in datasets):
            return cls(None, engine, sizes)
        weights = all_or_none(lambda: reference_cache.weights_of(place) if launch.rank() == 0 else "")
        return cls(directory, engine, sizes, weights)

    def read(self, which: str, dataset: Dataset | None, say: Say) -> NDArray[np.float64] | None:
        """Collective."""
        if self.directory is None or not isinstance(dataset, PairDataset):
            return None
        answer: list[tuple[NDArray[np.float64] | None, str | None]] = [(None, None)]
        path = reference_cache.path_of(self.directory, which)
        if launch.rank() == 0:
            answer = [reference_cache.read(path, self._made_of(dataset), np.unique(dataset.order))]
        if dist.is_initialized():
            dist.broadcast_object_list(answer, 0)
        values, why = answer[0]
        if values is not None:
            say(
                f"the reference's log-probabilities of {counted(len(np.unique(dataset.order)), 'pair')}: taken from {path}"
            )
        elif why is not None:
            say(f"{path}: {why}; the reference's log-probabilities are computed anew")
        return values

    def write(self, which: str, dataset: PairDataset, values: NDArray[np.float64]) -> None:
        """Collective. Raises CheckpointError."""
        if self.directory is not None:
            path = reference_cache.path_of(self.directory, which)
            made_of = self._made_of(dataset) if launch.rank() == 0 else {}
            all_or_none(lambda: reference_cache.write(path, made_of, values) if launch.rank() == 0 else None)

    def _made_of(self, dataset: PairDataset) -> reference_cache.MadeOf:
        return reference_cache.made_of(self.weights, dataset, self.sizes, self.engine.options, self.engine.grid.device)


def _measured(
    engine: Engine, settings: Settings, dataset: PairDataset, sizes: Sizes, vocab: int
) -> NDArray[np.float64]:
    """[pairs, 2] by the pair's number; those that are not drawn have none. Step by step, with as many pairs as a step of training has."""
    drawn, size = np.unique(dataset.order), sizes.batch.full
    steps = -(-len(drawn) // size)
    filled = replace(dataset, order=np.resize(drawn, steps * size))  # the last step has some for the second time
    grid, found = engine.grid, np.full((len(dataset.pieces), 2), np.nan)
    feeder = Feeder(MODEL_TYPES["gpt"], settings, grid.device, grid.dp, grid.dp_rank)
    batches = GlobalBatches(filled, sizes.micro_batch, grid.dp_rank, grid.dp, vocab)
    for consumed, batch in prefetch(batches, [(step * size, size) for step in range(steps)]):
        sums = engine.log_probs(feeder.microbatches(batch)).cpu().numpy()
        # [dp, microbatches, rows] -> pairs in the order of the batch, in which ranks take turns with their microbatches
        found[filled.order[consumed : consumed + size]] = np.swapaxes(sums, 0, 1).reshape(-1, 2)
    return found
