"""Pairs of answers in a run: how probable the reference model finds each, measured once before training by the engine itself."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_lite.checkpoint.restore import Start, find_reference
from megatron_lite.data.batches import GlobalBatches, prefetch
from megatron_lite.data.finetuning.dataset import PairDataset
from megatron_lite.data.samples import Dataset
from megatron_lite.engine import Engine
from megatron_lite.loop.model_types import MODEL_TYPES, Feeder
from megatron_lite.loop.node import Group, once_a_node
from megatron_lite.settings.config import Settings
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.sizes import Sizes
from megatron_lite.settings.wording import counted

Say = Callable[[str], None]


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
    engine: Engine, settings: Settings, datasets: Sequence[Dataset | None], sizes: Sizes, vocab: int, say: Say
) -> list[Dataset | None]:
    """The same pairs, each with the log-probabilities of its answers. engine: has the reference's weights. Collective."""
    found: list[Dataset | None] = []
    for dataset in datasets:
        if isinstance(dataset, PairDataset):
            started = time.monotonic()
            dataset = replace(dataset, reference=_measured(engine, settings, dataset, sizes, vocab))
            pairs = counted(len(np.unique(dataset.order)), "pair")
            say(f"the reference's log-probabilities of {pairs}: {time.monotonic() - started:.1f} s")
        found.append(dataset)
    return found


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
