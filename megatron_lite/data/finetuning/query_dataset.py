"""`--finetune-data` of queries: each sample is a query, a document that answers it, and hard negatives, as rows."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.finetuning.packing import shuffled_epochs
from megatron_lite.data.finetuning.queries import Queries

NO_DOCUMENT = -1


class QuerySample(NamedTuple):
    """The query in the first row, its own document in the second, hard negatives in the others."""

    tokens: NDArray[np.int64]
    """[2 + negatives, seq_length], filled up with 0."""
    lengths: NDArray[np.int64]
    """[2 + negatives]: tokens of each row. A row without a document has one."""
    query: NDArray[np.int64]
    """[]: the number of the query's text."""
    documents: NDArray[np.int64]
    """[1 + negatives]: the numbers of the documents' texts; NO_DOCUMENT for a row without a document."""


@dataclass(frozen=True)
class QueryDataset:
    """`--finetune-data` of queries.

    If several documents answer a query, each epoch takes the next one. Each epoch takes the next hard negatives, too.
    """

    queries: Queries
    order: NDArray[np.int64]
    """The number of each sample's record."""
    epoch_samples: int
    seq_length: int
    negatives: int
    """Hard negatives of a sample."""
    ending: int
    """Special tokens at the end of each text, which a shortened text keeps."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> QuerySample:
        record = int(self.order[index])
        query = self.queries.queries[record]
        documents = self._documents(record, index // self.epoch_samples)
        tokens = np.zeros((2 + self.negatives, self.seq_length), np.int64)
        lengths = np.ones(2 + self.negatives, np.int64)
        for row, number in enumerate((query, *documents)):
            if number == NO_DOCUMENT:
                continue
            text = shortened(self.queries.texts[number], self.seq_length, self.ending)
            tokens[row, : len(text)] = text
            lengths[row] = len(text)
        return QuerySample(tokens, lengths, np.asarray(query), documents)

    def _documents(self, record: int, epoch: int) -> NDArray[np.int64]:
        """Return [1 + negatives], the numbers of a sample's documents."""
        own, others = self.queries.answers[record], self.queries.others[record]
        documents = np.full(1 + self.negatives, NO_DOCUMENT)
        documents[0] = own[epoch % len(own)]
        count = min(self.negatives, len(others))
        if count:
            places = epoch * count + np.arange(count)
            documents[1 : 1 + count] = others[places % len(others)]
        return documents


def shortened(tokens: NDArray[np.int64], length: int, ending: int) -> NDArray[np.int64]:
    """Return at most `length` tokens of a text. It keeps its last special tokens. ending: their number."""
    if len(tokens) <= length:
        return tokens
    return np.concatenate((tokens[: length - ending], tokens[len(tokens) - ending :]))


def query_dataset(
    queries: Queries,
    members: NDArray[np.int64],
    seq_length: int,
    samples: int | None,
    seed: int,
    negatives: int,
    ending: int,
) -> QueryDataset:
    """Return a dataset of queries, shuffled anew in each epoch. members: the numbers of its records. samples: its length."""
    order = shuffled_epochs(members, samples, seed)
    return QueryDataset(queries, order, len(members), seq_length, negatives, ending)
