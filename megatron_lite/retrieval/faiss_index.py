"""FAISS indexes by their strings: training, adding, searching."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.packages import package
from megatron_lite.retrieval.embedder import Vectors

_PLACE = re.compile(r"^Error in .* at \S+:\d+: (Error: )?('.*' failed: )?")
"""faiss' messages begin with a function, a file and a condition."""


def faiss_module() -> Any:
    """Return the package. Raises UsageError if it is not installed."""
    return package("faiss", "the index", "retrieval")


def make_index(text: str, width: int, *, inner_product: bool = False) -> Any:
    """Return an empty index. text: faiss' index string. Raises UsageError with faiss' message."""
    faiss = faiss_module()
    metric = faiss.METRIC_INNER_PRODUCT if inner_product else faiss.METRIC_L2
    with explained(text):
        return faiss.index_factory(width, text, metric)


def train(index: Any, text: str, vectors: Vectors) -> None:
    """Train an index, if it needs training. Raises UsageError if there are too few vectors."""
    if index.is_trained:
        return
    with explained(f"{text}, trained with {len(vectors):,} vectors"):
        index.train(np.ascontiguousarray(vectors))


def inverted_lists(index: Any) -> Any | None:
    """Return the IVF inside an index; None if there is none."""
    faiss = faiss_module()
    try:
        return faiss.extract_index_ivf(index)
    except RuntimeError:
        return None


def set_effort(index: Any, nprobe: int, ef_search: int) -> None:
    """Set the effort of the search. nprobe: lists of an IVF, at most all of them. ef_search: candidates in an HNSW graph."""
    faiss = faiss_module()
    lists = inverted_lists(index)
    if lists is not None:
        lists.nprobe = min(nprobe, lists.nlist)
    for parameter in ("efSearch", "quantizer_efSearch"):
        try:
            faiss.ParameterSpace().set_index_parameter(index, parameter, ef_search)
        except RuntimeError:  # the index has no such graph
            continue


def search(index: Any, vectors: Vectors, count: int) -> tuple[Vectors, NDArray[np.int64]]:
    """Return the scores and the ids of the nearest, each [rows, count]. Ids are -1 behind the last one found."""
    scores, ids = index.search(np.ascontiguousarray(vectors), count)
    return scores, ids


def write_index(index: Any, path: Path) -> None:
    """Write an index. The file appears complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    faiss_module().write_index(index, str(unfinished))
    unfinished.replace(path)


def read_index(path: Path, *, mapped: bool = False) -> Any:
    """Read an index. mapped: leave inverted lists on disk. Raises CorruptCheckpoint."""
    faiss = faiss_module()
    if not path.is_file():
        raise CorruptCheckpoint(f"{path}: no such file; build the index first")
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP if mapped else 0)
    except RuntimeError as error:
        raise CorruptCheckpoint(f"{path}: faiss can't read it: {_message(error)}") from error


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise UsageError instead of an error of faiss."""
    try:
        yield
    except RuntimeError as error:
        raise UsageError(f"index {what}: faiss refuses it: {_message(error)}") from error


def _message(error: Exception) -> str:
    """Return faiss' message without the names of its functions and files."""
    text = " ".join(str(error).split())
    return _PLACE.sub("", text)
