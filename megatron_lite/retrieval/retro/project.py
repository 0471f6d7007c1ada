"""A Retro project directory, Megatron's or ours.

    config.json                              settings (project_settings.py)
    data/NAME.bin, .idx                      the datasets of the blend
    db/indexed_dataset_infos.json            documents and chunks of each dataset
    db/individual/NAME/START-END             blocks of documents: chunks_valid, chunks_invalid, doc_offsets
    db/merged/sampled, train, valid          chunks, n_written; train also doc_offsets
    index/faiss-par-add/STRING/…             the index
    query/NAME/START-END                     neighbours of a split

The ending of array files depends on the format (array_files.py). As megatron-core 0.15.3 has it, the last release with Retro.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_small
from megaconv.errors import UsageError
from megatron_lite.data.corpora import parse_corpora
from megatron_lite.data.datasets import DataOptions
from megatron_lite.data.index_cache import cache_key
from megatron_lite.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.retrieval.array_files import FORMATS, ArrayFiles
from megatron_lite.retrieval.retro.database import ChunkDatabase
from megatron_lite.retrieval.retro.neighbors import Neighbors, open_neighbors
from megatron_lite.retrieval.retro.project_settings import CONFIG, ProjectSettings, read_settings
from megatron_lite.retrieval.retro.windows import Windows, windows_of

INFOS = "indexed_dataset_infos.json"
_BLOCK = 1 << 20
_SEEN = 64
"""Rows of a large array that its hash depends on."""


@dataclass(frozen=True)
class Project:
    """An opened project. Everything is read when it is asked for, and mapped."""

    path: Path
    settings: ProjectSettings

    @property
    def files(self) -> ArrayFiles:
        return FORMATS[self.settings.format]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the datasets below `data`, in the order of the blend."""
        return parse_corpora(self.settings.data_path, "retro_gpt_data_path").prefixes

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """The paths of the datasets without .bin or .idx, in the order of the blend."""
        return tuple(str(self.path / "data" / name) for name in self.names)

    @cached_property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        return tuple(IndexedDataset(prefix) for prefix in self.prefixes)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The GPT tokenizer. Raises UsageError, CorruptCheckpoint."""
        return build_tokenizer(self.settings.tokenizer_options(self.path))

    def eod(self, tokenizer: Tokenizer | None = None) -> int:
        """Return the token that ends documents and pads chunks. tokenizer: None for the project's own."""
        found = (tokenizer or self.tokenizer).eod
        if found is None:
            raise UsageError(f"{self.path}: the tokenizer has no token that ends a document")
        return found

    def infos(self) -> list[Mapping[str, Any]]:
        """Return the numbers of documents and chunks of each dataset. Raises CorruptCheckpoint."""
        path = self.path / "db" / INFOS
        if not path.is_file():
            raise CorruptCheckpoint(f"{path}: no such file; the task db-build writes it")
        try:
            found = json.loads(read_small(path, SIDECAR_BYTES))
        except ValueError as error:
            raise CorruptCheckpoint(f"{path}: is not JSON: {error}") from error
        is_table = isinstance(found, list) and all(isinstance(info, dict) for info in found)
        if not is_table:
            raise CorruptCheckpoint(f"{path}: is not a list of datasets")
        return list(found)

    def database(self, eod: int, part: str = "train") -> ChunkDatabase:
        """Return the chunks of `sampled`, `train` or `valid`. Neighbours are always of `train`. Raises CorruptCheckpoint."""
        stem = self.path / "db" / "merged" / part
        chunks = self.files.read(stem, "chunks")
        if chunks.ndim != 2 or chunks.shape[1] != 5:
            raise CorruptCheckpoint(
                f"{stem}: chunks have shape {chunks.shape}; five columns were expected"
            )
        return ChunkDatabase(str(stem), chunks, self.datasets, self.settings.chunk_length, eod)

    def query_directory(self, split: str) -> Path | None:
        """Return the directory of a split's neighbours; None if the split has no samples."""
        name = self.settings.neighbor_dirs.get(split)
        return None if name is None else self.path / "query" / name

    def neighbors(self, split: str) -> Neighbors | None:
        """Return the neighbours of a split; None if it was not queried. Raises UsageError if they are of another run."""
        directory = self.query_directory(split)
        if directory is None:
            return None
        settings = self.settings
        found = open_neighbors(directory, self.files, settings.chunks_per_sample)
        wanted = settings.samples(split) * settings.chunks_per_sample
        if found.chunks != wanted:
            raise UsageError(
                f"{directory}: the query made {found.chunks:,} chunks, the run needs {wanted:,}; build the project again"
            )
        return found

    def windows(self, split: str, cache: Path | None = None) -> Windows | None:
        """Return the samples of a split; None if there are none. cache: directory for their indices."""
        settings = self.settings
        weights = parse_corpora(settings.data_path, "retro_gpt_data_path").weights
        words: Sequence[str] = self.prefixes
        if weights is not None:
            pairs = zip(weights, self.prefixes, strict=True)
            words = [word for weight, prefix in pairs for word in (str(weight), prefix)]
        options = DataOptions(
            settings.seq_length, settings.seed, words, settings.split, data_cache_path=cache
        )
        return windows_of(options, self.prefixes, split, settings.samples(split), cache)

    def identity(self, split: str, *, with_neighbors: bool) -> str:
        """Return a hash of a split's samples: settings, lengths of documents, some of its neighbours and some chunks."""
        parts: dict[str, object] = {
            "settings": read_small(self.path / CONFIG, SIDECAR_BYTES).decode("utf-8", "replace"),
            "lengths": [cache_key(lengths=dataset.lengths) for dataset in self.datasets],
        }
        neighbors = self.neighbors(split) if with_neighbors else None
        if neighbors is not None:
            chunks = self.database(eod=0).chunks
            parts["chunks"] = [len(chunks), chunks[_spread(len(chunks))].tolist()]
            parts["neighbors"] = [
                neighbors.of_sample(sample, neighbors.saved).tolist()
                for sample in _spread(len(neighbors)).tolist()
            ]
        return cache_key(**parts)

    def check_data(self) -> None:
        """Raise UsageError if a dataset isn't the one of the build. Megatron's projects don't record their datasets."""
        recorded = self.settings.own.get("data", {})
        for prefix, name in zip(self.prefixes, self.names, strict=True):
            if name in recorded and recorded[name] != data_record(prefix):
                raise UsageError(
                    f"{prefix}: changed since the project was built; build it again in another directory"
                )


def open_project(path: Path | str) -> Project:
    """Open a project. Raises CorruptCheckpoint if it is none."""
    project = Path(path)
    if not project.is_dir():
        raise CorruptCheckpoint(
            f"{project}: no such directory; --retro-project-dir names a Retro project"
        )
    return Project(project, read_settings(project))


def _spread(count: int) -> NDArray[np.int64]:
    """Return at most 64 of `count` numbers, spread evenly from the first to the last."""
    return np.linspace(0, max(0, count - 1), min(count, _SEEN)).astype(np.int64)


def data_record(prefix: str) -> dict[str, int]:
    """Return the sizes of a dataset's files and the CRC-32 of its index, read in blocks."""
    crc = 0
    with idx_path(prefix).open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return {
        "bin_bytes": bin_path(prefix).stat().st_size,
        "idx_bytes": idx_path(prefix).stat().st_size,
        "idx_crc32": crc,
    }
