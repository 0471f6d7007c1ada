"""The reference model of pairs: its log-probabilities, measured once before training with the same engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from formats.wording import counted
from megatron_lite.checkpoint.restore import Start, find_reference, load
from megatron_lite.data.batches import GlobalBatches, prefetch
from megatron_lite.data.finetuning.dataset import PairDataset
from megatron_lite.data.samples import Dataset
from megatron_lite.engine import Engine
from megatron_lite.objectives import reference_cache
from megatron_lite.objectives.feeder import Convert, Feeder
from megatron_lite.objectives.training_data import Setup
from megatron_lite.processes import launch
from megatron_lite.processes.failure import all_or_none
from megatron_lite.processes.node import once_a_node

NAMES = ("training", "validation", "test")
"""Names of the datasets."""
Values = NDArray[np.float64]
"""Log-probabilities [pairs, 2] by the pair's number; NaN for pairs that are not drawn."""


def with_reference(
    engine: Engine, start: Start, datasets: Sequence[Dataset | None], setup: Setup, convert: Convert
) -> list[Dataset | None]:
    """Return the same pairs with the reference's log-probabilities of their answers. Collective.

    Afterwards the engine has the weights of `start`. Values from --dpo-reference-cache are not computed again. If it
    has all values, the reference is not even loaded. Raises CheckpointError.
    """
    reference = reference_of(start, setup)
    named = dict(zip(NAMES, datasets, strict=True))
    pairs = {name: dataset for name, dataset in named.items() if isinstance(dataset, PairDataset)}
    cache = _Cache.of(engine, setup, used=bool(pairs))
    known = {name: cache.read(name, dataset) for name, dataset in pairs.items()}
    unknown = [name for name, values in known.items() if values is None]
    if unknown:
        load(engine, reference)
    for name in unknown:
        known[name] = values = _measured(engine, pairs[name], setup, convert)
        cache.write(name, pairs[name], values)
    if start is not reference or not unknown:
        load(engine, start)
    for name, dataset in pairs.items():
        named[name] = replace(dataset, reference=known[name])
    return list(named.values())


def reference_of(start: Start, setup: Setup) -> Start:
    """Return the start of --load, also if the run continues from --save. Collective. Raises CheckpointError."""
    settings = setup.settings
    if start.path == settings.checkpointing.load:
        return start
    return once_a_node(lambda: find_reference(settings), setup.place.node)


@dataclass(frozen=True)
class _Cache:
    """--dpo-reference-cache. Only rank 0 reads and writes it. Without the flag, nothing is read or written."""

    directory: str | None
    engine: Engine
    setup: Setup
    weights: str = ""

    @classmethod
    def of(cls, engine: Engine, setup: Setup, *, used: bool) -> "_Cache":
        """Open the cache. It reads all weights of the reference for their fingerprint. Collective. Raises CheckpointError."""
        settings = setup.settings
        directory, place = settings.dpo.dpo_reference_cache, settings.checkpointing.load
        assert place is not None
        if directory is None or not used:
            return cls(None, engine, setup)
        weights = all_or_none(
            lambda: reference_cache.weights_of(place) if launch.rank() == 0 else ""
        )
        return cls(directory, engine, setup, weights)

    def read(self, which: str, dataset: PairDataset) -> Values | None:
        """Return the values of a dataset, or None. Collective."""
        if self.directory is None:
            return None
        answer: list[tuple[Values | None, str | None]] = [(None, None)]
        path, drawn = reference_cache.path_of(self.directory, which), np.unique(dataset.order)
        if launch.rank() == 0:
            answer = [reference_cache.read(path, self._made_of(dataset), drawn)]
        if dist.is_initialized():
            dist.broadcast_object_list(answer, 0)
        values, why = answer[0]
        if values is not None:
            pairs = counted(len(drawn), "pair")
            self.setup.say(f"the reference's log-probabilities of {pairs}: taken from {path}")
        elif why is not None:
            self.setup.say(f"{path}: {why}; the reference's log-probabilities are computed anew")
        return values

    def write(self, which: str, dataset: PairDataset, values: Values) -> None:
        """Write the values of a dataset. Collective. Raises CheckpointError."""
        if self.directory is not None:
            path = reference_cache.path_of(self.directory, which)
            made_of = self._made_of(dataset) if launch.rank() == 0 else {}
            all_or_none(
                lambda: reference_cache.write(path, made_of, values) if launch.rank() == 0 else None
            )

    def _made_of(self, dataset: PairDataset) -> reference_cache.MadeOf:
        engine = self.engine
        return reference_cache.made_of(
            self.weights, dataset, self.setup.sizes, engine.options, engine.grid.device
        )


def _measured(engine: Engine, dataset: PairDataset, setup: Setup, convert: Convert) -> Values:
    """Return the log-probabilities of the pairs that are drawn.

    It computes step by step, with as many pairs as a training step.
    """
    started = time.monotonic()
    size = setup.sizes.batch.full
    drawn = np.unique(dataset.order)
    steps = -(-len(drawn) // size)
    # The last step is filled up with repeated pairs.
    order = np.resize(drawn, steps * size)
    filled = replace(dataset, order=order)
    grid = engine.grid
    feeder = Feeder(convert, setup.settings, grid.device, grid.dp, grid.dp_rank)
    vocab = setup.tokenizer.vocab_size
    batches = GlobalBatches(filled, setup.sizes.micro_batch, grid.dp_rank, grid.dp, vocab)
    found = np.full((len(dataset.pieces), 2), np.nan)
    starts = [(step * size, size) for step in range(steps)]
    for consumed, batch in prefetch(batches, starts):
        sums = engine.log_probs(feeder.microbatches(batch)).cpu().numpy()
        # [dp, microbatches, rows] -> pairs in the order of the batch, where the ranks' microbatches alternate
        in_order = np.swapaxes(sums, 0, 1).reshape(-1, 2)
        numbers = order[consumed : consumed + size]
        found[numbers] = in_order
    pairs = counted(len(drawn), "pair")
    seconds = time.monotonic() - started
    setup.say(f"the reference's log-probabilities of {pairs}: {seconds:.1f} s")
    return found
