"""`--mock-data`: artificial documents, the numbers 1, 2, 3 … and an end token, equal to megatron-core's mock dataset."""

import numpy as np

from megatron_lite.data.tokens import Documents, Tokens

DOCUMENTS = 100_000
LONGEST = 4096
SPLIT = "1,1,1"


class MockDocuments(Documents):
    """Artificial documents with random lengths."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self._vocab_size, self._eod = vocab_size, eod
        self.lengths = np.random.default_rng(0).integers(1, LONGEST, DOCUMENTS, dtype=np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Tokens:
        whole = int(self.lengths[index])
        stop = whole if length is None else offset + length
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self._vocab_size
        if stop == whole and stop > offset:
            tokens[-1] = self._eod
        return tokens
