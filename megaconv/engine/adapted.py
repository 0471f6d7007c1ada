"""A source with the adapters of --adapter merged, and with the files beside them that the merged model needs.

These are the tokenizer of an adapter that has another number of tokens, and sentence-transformers' files of one that was trained
for vectors of texts.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from formats.rank_files import run_of
from megaconv.engine.sidecars import SIDECAR_DIRECTORY, find_sidecars, is_of_vectors
from megaconv.model.ir import Source
from megaconv.options.values import AdapterChoice

if TYPE_CHECKING:
    from megaconv.adapters.merging import MergedSource


def adapted(
    source: Source, adapters: Sequence[AdapterChoice], *, overflow: bool = False
) -> "MergedSource":
    """Open the adapters and merge them, one after the other. Raises CheckpointError.

    overflow: True to accept weights that become infinite.
    """
    from megaconv.adapters.merging import merge

    merged = merge(source, adapters, overflow=overflow)
    vectors: dict[str, Path] = {}
    for each in merged.merged:
        vectors |= files_of_vectors(each.adapter.directory)
    directory = merged.resized_by
    tokenizer = {} if directory is None else find_sidecars(directory)
    return replace(merged, tokenizer=tokenizer, vectors=vectors)


def files_of_vectors(directory: Path) -> dict[str, Path]:
    """Return sentence-transformers' files beside an adapter, by name. A run of megatron_lite has them in hf/."""
    found: dict[str, Path] = {}
    for place in (run_of(directory) / SIDECAR_DIRECTORY, directory):
        found |= {name: path for name, path in find_sidecars(place).items() if is_of_vectors(name)}
    return found
