"""Describes a checkpoint that can't be converted: format, tensors, sizes, dtypes, and the reason."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from formats import rank_files
from formats.tensor import byte_count
from formats.wording import counted
from megaconv.adapters.peft_files import adapter_directory
from megaconv.commands.stored import (
    SUFFIXES,
    Contents,
    StoredTensor,
    adapter_facts,
    config_facts,
    facts_of,
    read_directory,
    read_file,
)
from megaconv.commands.units import readable, share
from megaconv.errors import CheckpointError, UnsafeContent
from megaconv.model.ir import Header

CODES = (
    "unknown-format",
    "unknown-family",
    "unsupported-input",
    "config-needed",
    "option-needed",
    "not-representable",
)
"""Codes of errors for an input that may be undamaged, but whose model megaconv doesn't know."""


@dataclass(frozen=True)
class Survey:
    """A description of files of known formats that are no model of a known family."""

    path: str
    kind: str
    tensors: tuple[StoredTensor, ...]
    facts: Mapping[str, str]
    reason: str
    """The reason why it can't be converted, and what the user can do."""
    keeps_names: bool = False
    """True if it can be converted to formats that keep the names of its tensors."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def elements(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors)

    def dtypes(self) -> dict[str, int]:
        """Bytes by dtype."""
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
            "keeps_names": self.keeps_names,
            "parameters": self.elements,
            "bytes": self.nbytes,
            "dtypes": self.dtypes(),
            "facts": dict(self.facts),
            "tensors": {tensor.name: tensor.to_json() for tensor in self.tensors},
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """(label, text) lines for people."""
        count = len({tensor.file for tensor in self.tensors})
        files = counted(count, "file")
        yield "format", self.kind
        yield "elements", f"{self.elements:,} in {counted(len(self.tensors), 'tensor')}, {files}"
        yield "size", ", ".join(self._sizes())
        yield from self.facts.items()
        possible = "only by its own names, to hf and dcp" if self.keeps_names else "no"
        yield "convertible", f"{possible}: {self.reason}"

    def _sizes(self) -> Iterator[str]:
        """The size of all tensors, then the share of each dtype."""
        yield readable(self.nbytes)
        for dtype, size in self.dtypes().items():
            yield f"{dtype} {share(size, self.nbytes)}"


def _about(path: Path, error: CheckpointError) -> str:
    """The message of an error, with `it` in place of the path: `it is an adapter`."""
    said = str(error).removeprefix(f"{path}: ")
    without_subject = said.startswith(("is ", "has ", "holds "))
    return f"it {said}" if without_subject else said


def survey(path: Path, error: CheckpointError) -> Survey | None:
    """A description of an input that a loader refused with this error; None if nothing is known.

    The description of a run that trains an adapter is that of the newest one.

    Raises UnsafeContent for files that ask for code to be run.
    """
    if error.code not in CODES and not (
        error.code == "missing-file" and _lacks_its_description(path)
    ):
        return None
    try:
        place = adapter_directory(path) if path.is_dir() else path
        contents = _contents(place)
        facts = {**(adapter_facts(place) or {}), **config_facts(place)} if place.is_dir() else {}
    except UnsafeContent:
        raise
    except CheckpointError:
        if path.is_file():  # the user asked for this very file
            raise
        return None  # the loader's message is better
    if contents is None or not contents.tensors:
        return None
    kind = "an adapter (PEFT), " if "peft_type" in facts else ""
    reason = _about(path, error)
    return Survey(
        str(path), kind + contents.kind, contents.tensors, {**facts, **contents.facts}, reason
    )


def survey_of(path: Path, header: Header | None, error: CheckpointError) -> Survey | None:
    """A description of a model that has a header, and that no family describes; None for other inputs.

    error: that of the loader without the model's own names.
    """
    if header is None or header.config.own_names is None:
        return None
    tensors = tuple(
        StoredTensor(str(key), info.shape, info.dtype, byte_count(info.shape, info.dtype), "", None)
        for key, info in header.manifest.items()
    )
    facts = facts_of(header.config.own_names.config)
    reason = _about(path, error)
    return Survey(str(path), header.source, tensors, facts, reason)


def _contents(path: Path) -> Contents | None:
    if path.is_dir():
        return read_directory(path)
    return read_file(path) if path.suffix in SUFFIXES else None


def _lacks_its_description(path: Path) -> bool:
    """True if the weights are complete, and only the file that describes their model is missing."""
    if path.is_file():
        return True
    files = [entry.name for entry in path.iterdir()]
    described = {"config.json", "params.json", rank_files.TRACKER}
    return described.isdisjoint(files) and any(name.endswith(SUFFIXES) for name in files)
