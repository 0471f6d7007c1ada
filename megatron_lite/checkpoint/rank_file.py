"""Streams a rank's file of a `torch` checkpoint: tensors come block by block from the ranks that hold them, straight into the file.

The file is laid out before its first tensor is there (formats/torch_zip.py). The ranks that share an optimizer go through the same
tensors in the same order, and each sends what it has to those that write it: nobody holds more than a block beside its own part.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from formats import torch_zip
from formats.pickle_writer import Placeholder
from formats.tensor import ITEMSIZE, Bytes
from megatron_lite.parallel import comm

BLOCK_BYTES = 16 << 20
"""What is passed on and written at one time."""


class Part(NamedTuple):
    """A run of a flattened tensor's elements."""

    rank: int
    """Of all ranks the one that has them."""
    start: int
    end: int
    values: Tensor | None
    """[end - start] on that rank, on any device; None on others."""


@dataclass(frozen=True)
class SharedTensor:
    """Of the files of one or more ranks. These list it, and all that have a part of it, in the same order among others."""

    placeholder: Placeholder
    """In the content of a file."""
    parts: tuple[Part, ...]
    """In order, without gaps."""
    writers: tuple[int, ...]
    """The ranks whose files hold it."""

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.placeholder.dtype]

    def blocks(self) -> Iterator[Part]:
        """The parts in pieces of BLOCK_BYTES."""
        most = BLOCK_BYTES // self.itemsize
        for rank, first, last, values in self.parts:
            for start in range(first, last, most):
                end = min(start + most, last)
                yield Part(rank, start, end, None if values is None else values[start - first : end - first])


@dataclass(frozen=True)
class RankFile:
    """What a rank writes, and what it has of others' files."""

    path: str | None
    """Below the iteration; None on a rank that writes none."""
    content: Any
    """What torch_zip.plan lays out, with a Placeholder for each tensor."""
    tensors: tuple[SharedTensor, ...]

    def copied(self, copy: Callable[[Tensor], Tensor]) -> "RankFile":
        """With copies of the values that are here."""
        tensors = (
            replace(tensor, parts=tuple(_copied(part, copy) for part in tensor.parts)) for tensor in self.tensors
        )
        return replace(self, tensors=tuple(tensors))


def _copied(part: Part, copy: Callable[[Tensor], Tensor]) -> Part:
    return part if part.values is None else part._replace(values=copy(part.values))


def write(directory: Path, file: RankFile, rank: int, group: comm.Group) -> None:
    """Everything is on disk when it returns. Collective over the ranks that list the same tensors. Raises OSError.

    rank: this one. group: of all ranks, on gloo; None in a single process.
    """
    arriving = _arriving(file, rank, group)
    if file.path is None:
        for _ in arriving:
            raise AssertionError("a rank without a file is no tensor's writer")
        return
    path = directory / file.path
    layout = torch_zip.plan(file.content, path.stem)
    checksums = dict.fromkeys(layout.records, 0)
    with path.open("xb") as out:
        out.truncate(layout.size)
        for tensor, first, content in arriving:
            out.seek(layout.records[tensor.placeholder.key].offset + first * tensor.itemsize)
            out.write(content.data)
            checksums[tensor.placeholder.key] = crc32(content, checksums[tensor.placeholder.key])
        for offset, header in layout.headers(checksums):
            out.seek(offset)
            out.write(header)
        out.flush()
        os.fsync(out.fileno())


def _arriving(file: RankFile, rank: int, group: comm.Group) -> Iterator[tuple[SharedTensor, int, Bytes]]:
    """What this rank writes, tensor by tensor from the first element on: (tensor, first element, bytes that stay until the next).

    On the way it sends what others write.
    """
    received = torch.empty(BLOCK_BYTES, dtype=torch.uint8)  # takes no memory before it is used
    for tensor in file.tensors:
        writes = rank in tensor.writers
        for block in tensor.blocks():
            if block.values is not None:
                content = block.values.cpu().view(torch.uint8)
                sent = [comm.send(content, other, group, 0) for other in tensor.writers if other != rank]
                if writes:
                    yield tensor, block.start, content.numpy()
                for work in sent:
                    work.wait()
            elif writes:
                content = received[: (block.end - block.start) * tensor.itemsize]
                comm.receive(content, block.rank, group, 0).wait()
                yield tensor, block.start, content.numpy()
