"""The settings of a Retro project: its config.json, with Megatron's keys.

Megatron writes `retro_gpt_*`, `retro_bert_*`, `retro_block_size` and `retro_neighbor_dirs`. Ours adds one key, `megatron_lite`, which
Megatron ignores: the format of the arrays, the embedder, the numbers of samples, and the sizes and checksums of the datasets.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_small
from megaconv.errors import UsageError
from megatron_lite.data.tokenizer import TokenizerOptions
from megatron_lite.retrieval.array_files import FORMATS

CONFIG = "config.json"
OWN = "megatron_lite"
_TOKENIZER_PATHS = ("tokenizer_model", "vocab_file", "merge_file")


@dataclass(frozen=True)
class ProjectSettings:
    """The settings that decide the samples, chunks and neighbours of a project."""

    seq_length: int
    chunk_length: int
    data_path: tuple[str, ...]
    """Alternating weights and prefixes below `data`."""
    split: str
    seed: int = 1234
    block_size: int = 100_000
    """Chunks of each file of neighbours."""
    global_batch_size: int = 1
    train_samples: int = 0
    eval_interval: int = 1
    eval_iters: int = 0
    neighbor_dirs: Mapping[str, str | None] = field(default_factory=dict)
    """The directory below `query` of each split; None for a split without samples."""
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """`tokenizer_type`, `tokenizer_model`, `vocab_file`, `merge_file` and `vocab_size`, as in the file."""
    bert: Mapping[str, Any] = field(default_factory=dict)
    """Megatron's `retro_bert_*`."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """The values of ours; empty in a project of Megatron."""

    @property
    def chunks_per_sample(self) -> int:
        return self.seq_length // self.chunk_length

    @property
    def format(self) -> str:
        """The name of the array files."""
        return str(self.own.get("format", "megatron"))

    def samples(self, split: str) -> int:
        """Return the number of samples whose chunks are queried, by Megatron's arithmetic."""
        if split == "train":
            return self.train_samples
        iterations = self.train_samples // self.global_batch_size
        evaluations = iterations // self.eval_interval + 1
        batches = self.eval_iters * (evaluations if split == "valid" else 1)
        return batches * self.global_batch_size

    def tokenizer_options(self, project: Path) -> TokenizerOptions:
        """Return the GPT tokenizer. Its files are given relative to the project, or absolute."""
        kind = self.tokenizer.get("tokenizer_type")
        if not isinstance(kind, str):
            raise UsageError(f"{project / CONFIG}: names no tokenizer; --tokenizer-type gives it")
        model, vocab, merges = (
            _beside(project, self.tokenizer.get(key)) for key in _TOKENIZER_PATHS
        )
        return TokenizerOptions(
            kind,
            model,
            None if vocab is None else Path(vocab),
            None if merges is None else Path(merges),
            self.tokenizer.get("vocab_size"),
        )


def read_settings(project: Path) -> ProjectSettings:
    """Read config.json. Raises CorruptCheckpoint."""
    path = project / CONFIG
    if not path.is_file():
        raise CorruptCheckpoint(
            f"{path}: no such file; a Retro project has one, made by `megatron-lite retro build` or by Megatron"
        )
    try:
        found = json.loads(read_small(path, SIDECAR_BYTES))
    except ValueError as error:
        raise CorruptCheckpoint(f"{path}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{path}: is not a JSON object")
    return _settings(_Reader(path, found))


def write_settings(project: Path, settings: ProjectSettings) -> None:
    """Write config.json. It appears complete."""
    content: dict[str, Any] = {
        "retro_gpt_seq_length": settings.seq_length,
        "retro_gpt_chunk_length": settings.chunk_length,
        "retro_gpt_data_path": list(settings.data_path),
        "retro_gpt_data_cache_path": None,
        "retro_gpt_split": settings.split,
        "retro_gpt_seed": settings.seed,
        "retro_gpt_global_batch_size": settings.global_batch_size,
        "retro_gpt_train_samples": settings.train_samples,
        "retro_gpt_eval_interval": settings.eval_interval,
        "retro_gpt_eval_iters": settings.eval_iters,
        "retro_block_size": settings.block_size,
        "retro_neighbor_dirs": dict(settings.neighbor_dirs),
        OWN: dict(settings.own),
    }
    for key in ("tokenizer_type", *_TOKENIZER_PATHS, "vocab_size"):
        content[f"retro_gpt_{key}"] = settings.tokenizer.get(key)
    for key in ("tokenizer_type", "vocab_file"):
        content[f"retro_bert_{key}"] = settings.bert.get(key)
    path = project / CONFIG
    unfinished = path.with_name(f".{CONFIG}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=4, sort_keys=True) + "\n", encoding="utf-8")
    unfinished.replace(path)


@dataclass(frozen=True)
class _Reader:
    """The values of config.json, checked."""

    path: Path
    values: Mapping[str, Any]

    def count(self, key: str, least: int, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CorruptCheckpoint(
                f"{self.path}: {key} is {value!r}; a number of at least {least} was expected"
            )
        return value

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise CorruptCheckpoint(f"{self.path}: {key} is {value!r}; a text was expected")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise CorruptCheckpoint(f"{self.path}: {key} is {value!r}; an object was expected")
        return value

    def starting(self, prefix: str) -> dict[str, Any]:
        return {
            key.removeprefix(prefix): value
            for key, value in self.values.items()
            if key.startswith(prefix)
        }


def _settings(read: _Reader) -> ProjectSettings:
    seq_length = read.count("retro_gpt_seq_length", 1)
    chunk_length = read.count("retro_gpt_chunk_length", 1, 64)
    require_whole_chunks(seq_length, chunk_length, str(read.path))
    own = read.table(OWN)
    if own and own.get("format") not in FORMATS:
        raise CorruptCheckpoint(
            f"{read.path}: the format of its arrays is {own.get('format')!r}; there are {', '.join(FORMATS)}"
        )
    gpt = read.starting("retro_gpt_")
    return ProjectSettings(
        seq_length=seq_length,
        chunk_length=chunk_length,
        data_path=_data_path(read),
        split=read.text("retro_gpt_split"),
        seed=read.count("retro_gpt_seed", 0, 1234),
        block_size=read.count("retro_block_size", 1, 100_000),
        global_batch_size=read.count("retro_gpt_global_batch_size", 1, 1),
        train_samples=read.count("retro_gpt_train_samples", 0),
        eval_interval=read.count("retro_gpt_eval_interval", 1, 1),
        eval_iters=read.count("retro_gpt_eval_iters", 0, 0),
        neighbor_dirs=_neighbor_dirs(read),
        tokenizer={key: gpt.get(key) for key in ("tokenizer_type", *_TOKENIZER_PATHS, "vocab_size")},
        bert=read.starting("retro_bert_"),
        own=own,
    )  # fmt: skip


def require_whole_chunks(seq_length: int, chunk_length: int, where: str) -> None:
    """Raise UsageError if a sample is not a whole number of chunks."""
    if seq_length % chunk_length:
        raise UsageError(
            f"{where}: a sequence of {seq_length} tokens is not a whole number of chunks of {chunk_length}; change one of them"
        )


def _data_path(read: _Reader) -> tuple[str, ...]:
    words = read.values.get("retro_gpt_data_path")
    items: Sequence[Any] = words.split() if isinstance(words, str) else words or ()
    if not isinstance(items, Sequence) or not items:
        raise CorruptCheckpoint(
            f"{read.path}: retro_gpt_data_path is {words!r}; a list was expected"
        )
    return tuple(str(item) for item in items)


def _neighbor_dirs(read: _Reader) -> dict[str, str | None]:
    found = read.table("retro_neighbor_dirs")
    for split, name in found.items():
        is_inside = name is None or (isinstance(name, str) and Path(name).name == name)
        if not is_inside:
            raise CorruptCheckpoint(
                f"{read.path}: retro_neighbor_dirs has {name!r} for {split}; a name below query/ was expected"
            )
    return found


def _beside(project: Path, name: Any) -> str | None:
    """Return a path of config.json: relative to the project if a file is there, else as it is."""
    if name is None:
        return None
    inside = project / str(name)
    return str(inside) if inside.exists() else str(name)
