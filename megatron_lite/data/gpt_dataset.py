"""Samples of consecutive tokens, across the bounds of documents, in Megatron's order (see `gpt_index`)."""

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.gpt_index import Indices
from megatron_lite.data.samples import Sample, SampleForm
from megatron_lite.data.tokens import Documents


class GPTDataset:
    """One split of one indexed dataset. Thread-safe: reading changes nothing."""

    def __init__(self, documents: Documents, indices: Indices, form: SampleForm) -> None:
        self._documents, self._indices, self._form = documents, indices, form

    def __len__(self) -> int:
        return len(self._indices.shuffle)

    def __getitem__(self, index: int) -> Sample:
        return self._form.sample(self.window(index))

    def window(self, index: int) -> NDArray[np.int64]:
        """int64[seq_length + 1]: the tokens of a sample and the one behind."""
        order, starts, shuffle = self._indices
        row = int(shuffle[index])
        (first, start), (last, end) = starts[row].tolist(), starts[row + 1].tolist()
        bounds = [
            (start if entry == first else 0, end + 1 if entry == last else None) for entry in range(first, last + 1)
        ]
        parts = [
            self._documents.get(int(order[first + place]), begin, None if stop is None else stop - begin)
            for place, (begin, stop) in enumerate(bounds)
        ]
        return np.concatenate(parts, dtype=np.int64)
