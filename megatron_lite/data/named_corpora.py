"""Names of corpora, which stand for the prefixes of indexed data sets in --data-path and the other data flags.

    wikipedia:
      path: /data/wikipedia_text_document
      weight: 0.3
    books:
      path: books_text_document            beside the file

The file is YAML (`--corpora FILE`, or MEGATRON_LITE_CORPORA in the environment). If a data flag has only names, and each
of them has a weight, the weights blend them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.stores.addresses import is_store
from formats.yaml_file import read_yaml
from megaconv.errors import UsageError
from megatron_lite.data.corpora import number_of

VARIABLE = "MEGATRON_LITE_CORPORA"


@dataclass(frozen=True)
class NamedCorpus:
    """One entry of the file."""

    prefix: str
    weight: float | None


def read_names(file: str | None) -> dict[str, NamedCorpus]:
    """The corpora of a file by name; none if there is no file. Raises UsageError."""
    chosen = file or os.environ.get(VARIABLE)
    if not chosen:
        return {}
    path = Path(chosen)
    if not path.is_file():
        raise UsageError(f"--corpora {path}: no such file", code="no-such-input")
    found = read_yaml(path)
    if not isinstance(found, Mapping):
        raise UsageError(f"{path}: expected names of corpora, each with a path")
    return {str(name): _corpus(path, str(name), entry) for name, entry in found.items()}


def _corpus(file: Path, name: str, entry: Any) -> NamedCorpus:
    """One entry. A relative path counts from the file's directory."""
    has_path = isinstance(entry, Mapping) and isinstance(entry.get("path"), str)
    if not has_path or set(entry) - {"path", "weight"}:
        raise UsageError(
            f"{file}: {name}: expected `path`, and perhaps `weight`; found {entry!r:.60}"
        )
    weight = entry.get("weight")
    if weight is not None and not _is_positive(weight):
        raise UsageError(f"{file}: {name}: weight {weight!r:.40} is not a positive number")
    place = entry["path"]
    prefix = place if is_store(place) else str(file.parent / place)
    return NamedCorpus(prefix, None if weight is None else float(weight))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value > 0


def with_prefixes(
    words: Sequence[str], names: Mapping[str, NamedCorpus], flag: str
) -> tuple[str, ...]:
    """The words of a data flag, with prefixes in place of names. Raises UsageError for an unknown name."""
    if not names:
        return tuple(words)
    corpora = [names[word] for word in words if word in names]
    weights = [corpus.weight for corpus in corpora]
    if len(corpora) == len(words) and None not in weights:
        pairs = [(str(corpus.weight), corpus.prefix) for corpus in corpora]
        return tuple(word for pair in pairs for word in pair)
    return tuple(
        names[word].prefix if word in names else _known(word, names, flag) for word in words
    )


def _known(word: str, names: Mapping[str, NamedCorpus], flag: str) -> str:
    """A weight or a prefix as it is. Raises UsageError for a word that is neither, nor a name."""
    if number_of(word) is not None or "/" in word or Path(f"{word}.idx").is_file():
        return word
    raise UsageError(
        f"{flag}: {word} is not the prefix of a data set, nor a name of --corpora; known names: {', '.join(sorted(names))}"
    )
