"""What is known of a checkpoint that can't be converted: format, tensors, sizes, dtypes; and why it can't."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megaconv.commands.stored import (
    SUFFIXES,
    Contents,
    StoredTensor,
    adapter_facts,
    config_facts,
    read_directory,
    read_file,
)
from megaconv.commands.units import readable, share
from megaconv.errors import CheckpointError

CODES = ("unknown-format", "unknown-family", "config-needed", "not-representable")
"""Errors of an input that may be whole nonetheless: nobody here knows what model it is."""


@dataclass(frozen=True)
class Survey:
    """Of files of known formats that are no model of a known family."""

    path: str
    kind: str
    tensors: tuple[StoredTensor, ...]
    facts: Mapping[str, str]
    reason: str
    """Why it can't be converted, and what could be done."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def elements(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors)

    def dtypes(self) -> dict[str, int]:
        """dtype -> bytes."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.dtype] += tensor.nbytes
        return dict(counts.most_common())

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "format": self.kind,
            "family": None,
            "convertible": False,
            "reason": self.reason,
            "parameters": self.elements,
            "bytes": self.nbytes,
            "dtypes": self.dtypes(),
            "facts": dict(self.facts),
            "tensors": {tensor.name: tensor.to_json() for tensor in self.tensors},
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """(label, text) for people."""
        files = {tensor.file for tensor in self.tensors}
        yield "format", self.kind
        yield (
            "elements",
            f"{self.elements:,} in {len(self.tensors)} tensors, {len(files)} file{'s' * (len(files) != 1)}",
        )
        shares = ", ".join(f"{dtype} {share(size, self.nbytes)}" for dtype, size in self.dtypes().items())
        yield "size", readable(self.nbytes) + (f", {shares}" if shares else "")
        yield from self.facts.items()
        yield "convertible", f"no: {self.reason}"


def survey(path: Path, error: CheckpointError) -> Survey | None:
    """What can be known of an input that a loader refused with this error; None where there is nothing to look at.

    Raises CheckpointError for files that are damaged.
    """
    if path.is_file():
        return _of(path, read_file(path), {}, _file_reason(path)) if _may_hold_tensors(path) else None
    if not path.is_dir():
        return None
    adapter = adapter_facts(path)
    contents = read_directory(path)
    if contents is None:
        return None
    if adapter is not None:
        reason = "an adapter is not a model; merge it into its base (megaconv merge BASE ADAPTER)"
        return _of(path, contents, adapter, reason, "an adapter (PEFT), ")
    return _of(path, contents, config_facts(path), _reason(path, error))


def _of(path: Path, contents: Contents, facts: Mapping[str, str], reason: str, kind: str = "") -> Survey:
    return Survey(str(path), kind + contents.kind, contents.tensors, {**facts, **contents.facts}, reason)


def _may_hold_tensors(path: Path) -> bool:
    return path.suffix in SUFFIXES


def _reason(path: Path, error: CheckpointError) -> str:
    if error.code == "unknown-format":
        return "nothing beside these tensors says what model they are of; a Hugging Face directory has a config.json"
    return str(error).removeprefix(f"{path}: ")


def _file_reason(path: Path) -> str:
    if path.suffix == ".gguf":
        return "GGUF isn't read; convert what it was made of"
    return "a single file doesn't say what model it is of; give the directory that it belongs to, with its config.json or all its ranks"
