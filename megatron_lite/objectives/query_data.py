"""Files of queries with documents, as training data of an embedding model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from formats.wording import are, counted
from megaconv.errors import UsageError
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.corpora import parse_split, part_of
from megatron_lite.data.finetuning.forms import listed
from megatron_lite.data.finetuning.queries import Queries
from megatron_lite.data.finetuning.query_dataset import NO_DOCUMENT, QueryDataset, query_dataset
from megatron_lite.data.index_cache import cache_key
from megatron_lite.data.samples import Dataset
from megatron_lite.objectives.epochs import epochs_shown, evaluations, training_length
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes


@dataclass(frozen=True)
class QueryData(TrainingData):
    """Queries for training and, optionally, for evaluation."""

    train: Queries
    valid: Queries | None
    negatives: int
    """Hard negatives of a sample."""
    ending: int
    """Special tokens at the end of each text."""

    @property
    def longest(self) -> int:
        found = [self.train, *([] if self.valid is None else [self.valid])]
        return max(queries.texts.longest for queries in found)

    def fitted(
        self, settings: Settings, sizes: Sizes, progress: Progress, say: Say
    ) -> tuple[Settings, "QueryData"]:
        """See TrainingData.fitted. It converts --epochs to steps, and lets an evaluation cover all queries for evaluation."""
        if settings.data.split is not None and self.valid is not None:
            raise UsageError(
                "--split divides --finetune-data; with --valid-finetune-data there is nothing to divide"
            )
        if sizes.batch.full == 1 and not self.negatives:
            raise UsageError(
                "--global-batch-size 1 has nothing to compare: a query is compared with the documents of all queries of its step; "
                "give it more, such as 32, or hard negatives (--embedding-negatives)"
            )
        if sizes.seq <= self.ending:
            raise UsageError(
                f"--seq-length {sizes.seq} must be more than {self.ending}, the special tokens that end each text"
            )
        epoch, valid = self._members(settings, 0), self.valid
        length = training_length(settings, sizes, lambda epochs: epochs * len(epoch), progress)
        measured = None if valid is None else lambda epochs: epochs * len(valid)
        chosen = evaluations(settings, sizes, lambda epochs: epochs * len(epoch), measured, say)
        training = replace(settings.training, **length, **chosen)
        return replace(settings, training=training), self

    def _members(self, settings: Settings, place: int) -> NDArray[np.int64]:
        """Return the numbers of the records of a part: training, evaluation, test."""
        part = parse_split(settings.data.split or "1")[place]
        if part is None:
            return np.empty(0, np.int64)
        return part_of(part, len(self.train)).astype(np.int64)

    def datasets(self, setup: Setup, samples: Sequence[int]) -> list[Dataset | None]:
        settings, found = setup.settings, list[Dataset | None]()
        for place, count in enumerate(samples):
            queries, members = self.train, self._members(settings, place)
            if place == 1 and self.valid is not None:
                queries, members = self.valid, np.arange(len(self.valid))
            if not len(members) or count == 0:
                found.append(None)
                continue
            length, seed = setup.sizes.seq, settings.training.seed
            found.append(
                query_dataset(queries, members, length, count, seed, self.negatives, self.ending)
            )
        return found

    def identity(self, setup: Setup) -> str:
        """See TrainingData.identity. It is a hash of all texts, and of what is compared with what."""
        queries = self.train
        return cache_key(
            tokens=queries.texts.values,
            bounds=queries.texts.bounds,
            queries=queries.queries,
            answers=queries.answers.values,
            others=queries.others.values,
        )

    def introduction(self, setup: Setup, dataset: Dataset | None) -> Iterator[str]:
        """Yield a summary of the data, and what of it isn't used."""
        assert isinstance(dataset, QueryDataset)
        train, seq = self.train, setup.sizes.seq
        steps = dataset.epoch_samples / setup.sizes.batch.full
        yield (
            f"{counted(len(train), 'query', 'queries')}, {counted(len(train.answers.values), 'document')} that answer them, "
            f"{counted(len(train.others.values), 'hard negative')}; a sample is {counted(2 + self.negatives, 'text')} of up to {seq} "
            f"tokens; {steps:,.4g} step{'' if steps == 1 else 's'} an epoch"
        )
        yield from epochs_shown(setup.settings.training)
        for what, queries in (("", train), (" for evaluation", self.valid)):
            if queries is not None:
                yield from self._remarks(queries, seq, what)
        if setup.settings.data.show_sample:
            yield from _preview(dataset, setup)

    def _remarks(self, queries: Queries, seq: int, what: str) -> Iterator[str]:
        """Yield a line for each property of the data that a user may not expect. what: its purpose."""
        cut = int((np.diff(queries.texts.bounds) > seq).sum())
        if cut:
            texts = f"{counted(cut, 'text')}{what}"
            yield f"warning: {texts} {are(cut)} longer than --seq-length {seq} and shortened"
        fewer = int((np.diff(queries.others.bounds) < self.negatives).sum())
        if fewer:
            verb = "has" if fewer == 1 else "have"
            short = f"{counted(fewer, 'query', 'queries')}{what} {verb}"
            yield f"{short} fewer hard negatives than --embedding-negatives {self.negatives}"
        if queries.unread:
            yield f"fields that are not read{what}: {listed(sorted(queries.unread))}"


def _preview(dataset: QueryDataset, setup: Setup) -> Iterator[str]:
    """Yield the texts of the first sample. Special tokens are spelled out."""
    sample = dataset[0]
    yield "the first sample:"
    names = ("query", "its document", *["hard negative"] * (len(sample.documents) - 1))
    numbers = (0, *sample.documents.tolist())
    for name, number, row, length in zip(
        names, numbers, sample.tokens, sample.lengths, strict=True
    ):
        if number != NO_DOCUMENT:
            yield f"  {name}: {setup.tokenizer.spelled(row[:length].tolist())!r}"
