"""The task db-build, second half: the chunks of all datasets in one file for each of `sampled`, `train` and `valid`.

train     chunks of the first documents of each dataset, by the first share of the split
valid     all other chunks
sampled   the first chunks of `train` of each dataset, which train the index
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megaconv.errors import UsageError
from megatron_lite.data.corpora import parse_corpora, parse_split
from megatron_lite.retrieval.array_files import Array, Planned, whole
from megatron_lite.retrieval.retro.blocks import Block, found_blocks
from megatron_lite.retrieval.retro.plan import BuildPlan
from megatron_lite.retrieval.retro.project import INFOS, Project

MOST_UNASKED = 1_000_000
PARTS = ("sampled", "train", "valid")


@dataclass(frozen=True)
class DatasetInfo:
    """The counts of one dataset, with the names of Megatron's file."""

    ratio: float
    prefix: str
    n_docs: int
    n_docs_train: int
    n_chunks: int
    n_chunks_train: int
    n_chunks_invalid: int
    n_chunks_sampled: int

    def part(self, name: str) -> slice:
        """Return the place of a part among the chunks of the dataset."""
        if name == "sampled":
            return slice(0, self.n_chunks_sampled)
        if name == "train":
            return slice(0, self.n_chunks_train)
        return slice(self.n_chunks_train, self.n_chunks)


def merge(plan: BuildPlan) -> None:
    """Count the chunks and write the merged files, in one process. Raises UsageError."""
    project, files = plan.project, plan.project.files
    infos = count_chunks(project, plan.index.train_chunks)
    content = json.dumps([asdict(info) for info in infos], indent=4)
    (project.path / "db" / INFOS).write_text(content, encoding="utf-8")
    for name in PARTS:
        stem = project.path / "db" / "merged" / name
        if not files.has(stem, "n_written"):
            files.write(stem, _merged(project, infos, name))


def count_chunks(project: Project, sampled: int | None) -> list[DatasetInfo]:
    """Return the counts of all datasets. sampled: chunks that train the index; see IndexPlan. Raises UsageError."""
    part = parse_split(project.settings.split)[0]
    if part is None:
        raise UsageError(
            f"--retro-gpt-split {project.settings.split}: its first share is 0, so that nothing can be retrieved"
        )
    counted = [
        _counts(project, number, ratio, part[1])
        for number, ratio in enumerate(_ratios(project))
    ]  # fmt: skip
    total = sum(info.ratio for info in counted)
    if sampled is None:
        allowed = min(int(info.n_chunks_train * total / info.ratio) for info in counted)
        sampled = min(allowed, MOST_UNASKED)
    return [_with_sampled(info, int(sampled * info.ratio / total)) for info in counted]


def _with_sampled(info: DatasetInfo, sampled: int) -> DatasetInfo:
    if sampled > info.n_chunks_train:
        raise UsageError(
            f"--retro-index-ntrain: takes {sampled:,} chunks of {info.prefix}, which has {info.n_chunks_train:,} for training; "
            "give a smaller number"
        )
    return DatasetInfo(**asdict(info) | {"n_chunks_sampled": sampled})


def _ratios(project: Project) -> Sequence[float]:
    corpora = parse_corpora(project.settings.data_path, "--retro-gpt-data-path")
    return corpora.weights or [1.0] * len(corpora.prefixes)


def _counts(project: Project, number: int, ratio: float, fraction: float) -> DatasetInfo:
    """Return the counts of a dataset. fraction: of its documents, those that can be retrieved."""
    documents = len(project.datasets[number])
    train_documents = int(fraction * documents)
    chunks = train = invalid = 0
    for stem, _ in _blocks(project, number):
        valid = project.files.read(stem, "chunks_valid")
        chunks += len(valid)
        train += int(np.count_nonzero(valid[:, 0] < train_documents))
        invalid += len(project.files.read(stem, "chunks_invalid"))
    name = project.names[number]
    return DatasetInfo(ratio, name, documents, train_documents, chunks, train, invalid, 0)


def _blocks(project: Project, number: int) -> Iterator[tuple[Path, Block]]:
    """Yield the files of a dataset's blocks of documents."""
    directory = project.path / "db" / "individual" / project.names[number]
    for block in found_blocks(directory, project.files, "doc_offsets"):
        yield block.stem(directory), block


def _merged(project: Project, infos: Sequence[DatasetInfo], name: str) -> dict[str, Planned]:
    """Return the arrays of a part."""
    rows = sum(len(range(*info.part(name).indices(info.n_chunks))) for info in infos)
    arrays = {"chunks": Planned((rows, 5), "<u4", _chunks(project, infos, name))}
    if name == "train":
        documents = sum(info.n_docs_train for info in infos)
        arrays["doc_offsets"] = Planned((documents, 3), "<u8", _offsets(project, infos))
    return arrays | {"n_written": whole(np.array([rows], np.uint64))}


def _chunks(project: Project, infos: Sequence[DatasetInfo], name: str) -> Iterator[Array]:
    """Yield uint32 [n, 5] of each block: the dataset and its chunk, if it is of the part."""
    for number, info in enumerate(infos):
        wanted, first = info.part(name), 0
        for stem, _ in _blocks(project, number):
            valid = project.files.read(stem, "chunks_valid")
            start = max(0, wanted.start - first)
            end = max(start, min(len(valid), wanted.stop - first))
            yield _numbered(number, valid[start:end], np.uint32)
            first += len(valid)


def _offsets(project: Project, infos: Sequence[DatasetInfo]) -> Iterator[Array]:
    """Yield uint64 [documents, 3] of each block: dataset, document, and the chunks up to its end in `train`."""
    before = 0
    for number, info in enumerate(infos):
        for stem, block in _blocks(project, number):
            kept = max(0, min(block.end, info.n_docs_train) - block.start)
            offsets = project.files.read(stem, "doc_offsets")
            rows = _numbered(number, offsets[:kept], np.uint64)
            rows[:, 2] += np.uint64(before)
            yield rows
            before += int(offsets[kept - 1, 1]) if kept else 0


def _numbered(number: int, rows: Array, dtype: type[np.uint32 | np.uint64]) -> Array:
    """Return the rows with the dataset's number before them."""
    made = np.empty((len(rows), rows.shape[1] + 1), dtype)
    made[:, 0] = number
    made[:, 1:] = rows
    return made
