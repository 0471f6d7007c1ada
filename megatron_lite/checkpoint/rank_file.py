"""Streams one rank's file of a `torch` checkpoint: blocks of tensors arrive from the ranks that hold them and go into the file.

The layout of the file is planned before the first tensor arrives (formats/torch_zip.py). The ranks that share an
optimizer visit the same tensors in the same order. Each rank sends its parts to the writing ranks. No rank holds more
than one block in addition to its own parts.
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
"""Size of one block that is sent and written."""


class Part(NamedTuple):
    """A range of elements of a flattened tensor."""

    rank: int
    """The global rank that holds the range."""
    start: int
    end: int
    values: Tensor | None
    """[end - start] on that rank, on any device; None on other ranks."""


@dataclass(frozen=True)
class SharedTensor:
    """A tensor that one or more ranks write to their files.

    All ranks that write it or hold a part of it list it, in the same order relative to other tensors.
    """

    placeholder: Placeholder
    """Stands for the tensor in the content of the file."""
    parts: tuple[Part, ...]
    """Ordered and without gaps."""
    writers: tuple[int, ...]
    """The ranks whose files contain the tensor."""

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.placeholder.dtype]

    def blocks(self) -> Iterator[Part]:
        """Yield the parts in pieces of at most BLOCK_BYTES."""
        most = BLOCK_BYTES // self.itemsize
        for rank, first, last, values in self.parts:
            for start in range(first, last, most):
                end = min(start + most, last)
                yield Part(
                    rank,
                    start,
                    end,
                    None if values is None else values[start - first : end - first],
                )


@dataclass(frozen=True)
class RankFile:
    """The file that a rank writes, and the tensors of which it holds parts for other ranks' files."""

    path: str | None
    """Path relative to the iteration's directory; None on a rank that writes no file."""
    content: Any
    """The content for torch_zip.plan, with a Placeholder for each tensor."""
    tensors: tuple[SharedTensor, ...]

    @property
    def size(self) -> int:
        """Size of the file in bytes; 0 on a rank that writes no file."""
        return 0 if self.path is None else torch_zip.plan(self.content, Path(self.path).stem).size

    def copied(self, copy: Callable[[Tensor], Tensor]) -> "RankFile":
        """Return the same file with `copy` applied to the values that this rank holds."""
        tensors = (
            replace(tensor, parts=tuple(_copied(part, copy) for part in tensor.parts))
            for tensor in self.tensors
        )
        return replace(self, tensors=tuple(tensors))


def _copied(part: Part, copy: Callable[[Tensor], Tensor]) -> Part:
    return part if part.values is None else part._replace(values=copy(part.values))


def write(directory: Path, file: RankFile, rank: int, group: comm.Group) -> None:
    """Write this rank's file and send the parts that other ranks write. All data is on disk when the function returns.

    Collective over the ranks that list the same tensors. Raises OSError.
    rank: this rank. group: all ranks, on gloo; None in a single process.
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
            key = tensor.placeholder.key
            start = layout.records[key].offset
            skipped = first * tensor.itemsize
            out.seek(start + skipped)
            out.write(content.data)
            checksums[key] = crc32(content, checksums[key])
        for offset, header in layout.headers(checksums):
            out.seek(offset)
            out.write(header)
        out.flush()
        os.fsync(out.fileno())


def _arriving(
    file: RankFile, rank: int, group: comm.Group
) -> Iterator[tuple[SharedTensor, int, Bytes]]:
    """Yield the blocks that this rank writes: (tensor, first element, bytes). Each tensor starts at its first element.

    The bytes are valid until the next block. Between blocks, the function sends the parts that other ranks write.
    """
    # The buffer uses no physical memory until it is written to.
    received = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    for tensor in file.tensors:
        writes = rank in tensor.writers
        for block in tensor.blocks():
            if block.values is not None:
                content = block.values.cpu().view(torch.uint8)
                sent = [
                    comm.send(content, other, group, 0) for other in tensor.writers if other != rank
                ]
                if writes:
                    yield tensor, block.start, content.numpy()
                for work in sent:
                    work.wait()
            elif writes:
                content = received[: (block.end - block.start) * tensor.itemsize]
                comm.receive(content, block.rank, group, 0).wait()
                yield tensor, block.start, content.numpy()
