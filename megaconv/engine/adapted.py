"""A source with the adapters of --adapter merged, and with the tokenizer of an adapter that has another number of tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megaconv.engine.sidecars import find_sidecars
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
    directory = merged.resized_by
    return merged if directory is None else replace(merged, tokenizer=find_sidecars(directory))
