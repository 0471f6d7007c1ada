"""Tells whether a model's head is tied to its embedding, for files that hold the head in any case."""

from collections.abc import Mapping
from itertools import chain

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, LazyTensor, row_blocks
from megaconv.engine.plan import BLOCK_BYTES
from megaconv.model.ir import Key
from megaconv.values.scaled import read_bytes

HEAD = Key("head.weight")


def is_tied(tensors: Mapping[Key, LazyTensor], *, sampled: bool) -> bool:
    """True if embedding and head are equal, bit by bit. Three rows are compared first, so that most untied models are
    not read further.

    sampled: compare only these rows.
    """
    embedding, head = tensors[Key("embed.weight")], tensors[HEAD]
    if embedding.dtype != head.dtype:
        return False
    rows, cols = embedding.shape
    samples = [Box(row, row + 1, 0, cols) for row in (0, rows // 2, rows - 1)]
    blocks = () if sampled else row_blocks(embedding.shape, embedding.dtype, BLOCK_BYTES)
    itemsize = ITEMSIZE[embedding.dtype]
    return all(
        np.array_equal(read_bytes(embedding, box, itemsize), read_bytes(head, box, itemsize))
        for box in chain(samples, blocks)
    )
