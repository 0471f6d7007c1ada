"""The place of --save: a directory, or a prefix of an object store."""

from pathlib import Path

from megaconv.hub import resolve
from megaconv.store_inputs import is_store, parsed, writable_store
from megatron_lite.checkpoint.saver import has_checkpoint
from megatron_lite.checkpoint.store_saver import has_stored_checkpoint


def holds_checkpoint(place: str) -> bool:
    """Return whether a run has saved a complete checkpoint at a path or a URI. Raises CheckpointError."""
    if not is_store(place):
        return has_checkpoint(Path(place))
    return has_stored_checkpoint(writable_store(place), parsed(place).prefix)


def readable(place: str) -> str:
    """Return the local path by which a checkpoint in a store is read; any other place unchanged."""
    return str(resolve(place)) if is_store(place) else place
