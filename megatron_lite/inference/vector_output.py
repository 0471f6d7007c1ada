"""The output of vectors: JSON lines, or an array of numpy that appears by one rename.

{"embedding": [0.25, ...], "tokens": 7}         a line of JSON
FILE.npy                                        float32 [texts, numbers]
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

import numpy as np
from torch import Tensor

from formats.whole_file import whole_file
from megaconv.errors import CheckpointError, UsageError
from megaconv.terminal import reason_of
from megatron_lite.inference.generating import open_output


class NotFiniteVector(CheckpointError):
    """A vector has NaN or infinity."""

    def __init__(self) -> None:
        super().__init__(
            "a vector has NaN or infinity: the model's weights are damaged, or too large for the dtype of the computation "
            "(try --dtype fp32)"
        )


class Vectors(Protocol):
    """An output."""

    def write(self, vectors: Tensor, tokens: Sequence[int]) -> None:
        """Write the next vectors, float32 [texts, numbers]. tokens: those of each text."""
        ...


@contextmanager
def open_vectors(path: str, count: int, width: int) -> Iterator[Vectors]:
    """Open the output of `count` vectors of `width` numbers.

    Raises UsageError if it can't be written, NotFiniteVector if a vector has NaN or infinity: JSON lines at their end, where such
    vectors have an error in place of numbers; an array at once, which leaves the file as it was.
    """
    if path.endswith(".npy"):
        try:
            with whole_file(Path(path)) as file:
                yield _Array(file, count, width)
        except OSError as error:
            raise UsageError(f"{path}: can't be written: {reason_of(error)}") from error
        return
    with open_output(path) as lines:
        output = _Lines(lines)
        yield output
    if output.failed:
        raise NotFiniteVector


class _Lines:
    def __init__(self, file: TextIO) -> None:
        self._file, self.failed = file, False

    def write(self, vectors: Tensor, tokens: Sequence[int]) -> None:
        for vector, count in zip(vectors, tokens, strict=True):
            line: dict[str, object] = {"embedding": vector.tolist(), "tokens": count}
            if not bool(vector.isfinite().all()):  # JSON can't represent NaN and infinity
                line = {"error": str(NotFiniteVector()), "tokens": count}
                self.failed = True
            print(json.dumps(line), file=self._file, flush=True)


class _Array:
    def __init__(self, file: BinaryIO, count: int, width: int) -> None:
        self._file = file
        header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
        np.lib.format.write_array_header_1_0(file, header)

    def write(self, vectors: Tensor, tokens: Sequence[int]) -> None:
        if not bool(vectors.isfinite().all()):
            raise NotFiniteVector
        self._file.write(vectors.numpy().astype(np.dtype("<f4")).tobytes())
