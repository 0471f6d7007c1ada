"""The reference model of pairs and rated answers: its log-probabilities, measured once before training with the same engine."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from formats.wording import counted
from megatron_lite.checkpoint.restore import Start, find_reference, load
from megatron_lite.data.batches import GlobalBatches, prefetch
from megatron_lite.data.finetuning.image_dataset import read_at_once
from megatron_lite.data.finetuning.pair_dataset import PairDataset
from megatron_lite.data.samples import Dataset
from megatron_lite.engine import Engine
from megatron_lite.objectives import reference_cache
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.training_data import Setup
from megatron_lite.processes import launch
from megatron_lite.processes.failure import all_or_none
from megatron_lite.processes.node import once_a_node

NAMES = ("training", "validation", "test")
"""Names of the datasets."""
Values = NDArray[np.float64]
"""Log-probabilities [pairs, 2] by the pair's number; NaN for pairs that are not drawn."""


def with_reference(
    engine: Engine, start: Start, datasets: Sequence[Dataset | None], feeder: Feeder, setup: Setup
) -> list[Dataset | None]:
    """Return the same pairs with the reference's log-probabilities of their answers. Collective.

    Afterwards the engine has the weights of `start`. Values from the run's cache are not computed again. If it has all
    values, the reference is not even loaded. Raises CheckpointError.
    """
    reference = reference_of(start, setup)
    named = dict(zip(NAMES, datasets, strict=True))
    pairs = {name: dataset for name, dataset in named.items() if isinstance(dataset, PairDataset)}
    cache = _Cache.of(engine, setup, list(pairs.values()))
    known = {name: cache.read(name, dataset) for name, dataset in pairs.items()}
    unknown = [name for name, values in known.items() if values is None]
    if unknown:
        load(engine, reference)
    for name in unknown:
        known[name] = values = _measured(engine, name, pairs[name], feeder, setup)
        cache.write(name, values)
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
    """--dpo-reference-cache or --kto-reference-cache. Only rank 0 reads and writes it. Without the flag, it has no directory."""

    directory: str | None
    engine: Engine
    setup: Setup
    weights: str = ""
    encoder: str | None = None
    """See reference_cache.made_of."""
    inputs: dict[str, reference_cache.MadeOf] = field(default_factory=dict)
    """The fingerprints of the inputs of each dataset's values. Only rank 0 has them."""

    @classmethod
    def of(cls, engine: Engine, setup: Setup, pairs: Sequence[PairDataset]) -> "_Cache":
        """Open the cache. It reads all weights of the reference for their fingerprint. Collective. Raises CheckpointError."""
        settings = setup.settings
        directory = settings.dpo.dpo_reference_cache or settings.kto.kto_reference_cache
        place = settings.checkpointing.load
        assert place is not None
        if directory is None or not pairs:
            return cls(None, engine, setup)
        if launch.rank() != 0:
            all_or_none(lambda: None)
            return cls(directory, engine, setup)
        weights, encoder = all_or_none(lambda: _fingerprints(place, pairs))
        return cls(directory, engine, setup, weights, encoder)

    def read(self, which: str, dataset: PairDataset) -> Values | None:
        """Return the values of a dataset, or None. Collective. Raises CheckpointError for an image that can't be read."""
        if self.directory is None:
            return None
        answer: list[tuple[Values | None, str | None]] = [(None, None)]
        path, drawn = self._path(which), np.unique(dataset.order)
        all_or_none(lambda: self._note(which, dataset) if launch.rank() == 0 else None)
        if launch.rank() == 0:
            answer = [reference_cache.read(path, self.inputs[which], drawn)]
        if dist.is_initialized():
            dist.broadcast_object_list(answer, 0)
        values, why = answer[0]
        if values is not None:
            subject = _subject(which, dataset)
            self.setup.say(f"{subject}: taken from {path}")
        elif why is not None:
            self.setup.say(f"{path}: {why}; the reference's log-probabilities are computed anew")
        return values

    def write(self, which: str, values: Values) -> None:
        """Write the values of a dataset. Collective. Raises CheckpointError."""
        if self.directory is not None:
            path = self._path(which)
            made_of = self.inputs.get(which, {})
            all_or_none(
                lambda: reference_cache.write(path, made_of, values) if launch.rank() == 0 else None
            )

    def _path(self, which: str) -> Path:
        assert self.directory is not None
        objective = "kto" if self.setup.settings.kto.kto else "dpo"
        return reference_cache.path_of(self.directory, objective, which)

    def _note(self, which: str, dataset: PairDataset) -> None:
        engine = self.engine
        self.inputs[which] = reference_cache.made_of(
            self.weights,
            self.encoder,
            dataset,
            self.setup.sizes,
            engine.options,
            engine.grid.device,
        )


def _fingerprints(place: str, pairs: Sequence[PairDataset]) -> tuple[str, str | None]:
    """Return the fingerprints of the reference's weights and, if there are images, of their encoder."""
    weights = reference_cache.weights_of(place)
    images = [dataset.images for dataset in pairs if dataset.images is not None]
    if not any(each.placed for each in images):
        return weights, None
    directory = images[0].reader.directory
    same = os.path.realpath(directory) == os.path.realpath(place)
    of_model = weights if same else reference_cache.weights_of(str(directory))
    return weights, reference_cache.encoder_of(directory, of_model)


def _subject(which: str, dataset: PairDataset) -> str:
    """Return the beginning of a line about the values of a dataset. which: one of NAMES."""
    noun = "pair" if dataset.pieces.good is None else "rated answer"
    pairs = counted(len(np.unique(dataset.order)), noun)
    return f"the reference's log-probabilities of {pairs} for {which}"


def _measured(
    engine: Engine, which: str, dataset: PairDataset, feeder: Feeder, setup: Setup
) -> Values:
    """Return the log-probabilities of the pairs that are drawn. which: one of NAMES.

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
    batches = GlobalBatches(
        filled,
        setup.sizes.micro_batch,
        grid.dp_rank,
        grid.dp,
        setup.tokenizer.vocab_size,
        threads=read_at_once(filled),
    )
    found = np.full((len(dataset.pieces), 2), np.nan)
    starts = [(step * size, size) for step in range(steps)]
    for consumed, batch in prefetch(batches, starts):
        sums = engine.log_probs(feeder.microbatches(batch)).cpu().numpy()
        # [dp, microbatches, rows] -> pairs in the order of the batch, where the ranks' microbatches alternate
        in_order = np.swapaxes(sums, 0, 1).reshape(-1, 2)
        numbers = order[consumed : consumed + size]
        found[numbers] = in_order
    seconds = time.monotonic() - started
    setup.say(f"{_subject(which, dataset)}: {seconds:.1f} s")
    return found
