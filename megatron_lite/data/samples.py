"""A training sample: tokens, labels and loss mask, as megatron-core's GPTDataset makes them."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1


class Sample(NamedTuple):
    """Arrays of shape [seq_length]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    position_ids: NDArray[np.int64]
    documents: NDArray[np.int32]
    """Index of each token's document in the sample; a token attends to earlier tokens of its document. All 0 without resets."""


class Arrays(Protocol):
    """A sample of any kind: a NamedTuple of arrays and numbers. All samples of a dataset have the same shapes."""

    def _asdict(self) -> dict[str, Any]: ...


class Dataset(Protocol):
    """Samples by number. The same number gives the same sample in every process and every run."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Arrays: ...


@dataclass(frozen=True)
class SampleForm:
    """Converts tokens to a sample. Fields have the names of Megatron's flags."""

    eod: int
    """Token that ends a document; NO_TOKEN if there is none."""
    pad: int = NO_TOKEN
    """Token that never counts as a label. The model receives 0 in its place."""
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def sample(self, window: NDArray[np.int64]) -> Sample:
        """Return a sample. window: int64[seq_length + 1], the inputs and one more token for the last label."""
        tokens, labels = window[:-1].copy(), window[1:].copy()
        ends = tokens == self.eod
        loss_mask = np.ones(len(tokens), np.float32)
        if self.eod_mask_loss:
            loss_mask[ends] = 0
        loss_mask[labels == self.pad] = 0
        documents = np.zeros(len(tokens), np.int32)
        # The end token belongs to the document that it ends.
        np.cumsum(ends[:-1], out=documents[1:])
        position_ids = np.arange(len(tokens), dtype=np.int64)
        if self.reset_position_ids:
            starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(ends[:-1]) + 1))
            position_ids -= starts[documents]
        if not self.reset_attention_mask:
            documents[:] = 0
        tokens[tokens == self.pad] = 0
        labels[labels == self.pad] = 0
        return Sample(tokens, labels, loss_mask, position_ids, documents)
