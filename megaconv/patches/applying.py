"""Applies patches: checks base and patches before anything is written, and says what to convert."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megaconv import registry
from megaconv.commands.same_format import as_stored
from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.opening import open_source
from megaconv.engine.preparation import workers_of
from megaconv.errors import UsageError
from megaconv.input import Input, find_input
from megaconv.model.ir import Header
from megaconv.options import ConvertOptions
from megaconv.patches.patch import open_patch, patch_at, require_chain, require_sound


@dataclass(frozen=True)
class Application:
    """A conversion that applies patches: `convert(load_dir, …, saver, options)`."""

    load_dir: str
    saver: str
    options: ConvertOptions


def prepare(
    old: str | Path,
    patches: Sequence[str | Path],
    saver: str | None,
    options: ConvertOptions,
    advance: Callable[[int], None] = lambda count: None,
) -> Application:
    """Check the base and all patches, reading them completely.

    patches: directories or URIs of a store, in the order in which they apply. saver: None for the base's own format.
    advance: called with the bytes of the base that were read. Raises ModelsDiffer for a wrong base or order,
    CorruptCheckpoint for a damaged patch, and UsageError if no saver writes the base's format.
    """
    opened = [open_patch(patch_at(patch)) for patch in patches]
    for patch in opened:
        require_sound(patch)
    require_chain(opened)
    read = opened[0].options
    found = find_input(old, options.loader, read)
    source = open_source(found, read)
    opened[0].require_base(fingerprint_source(source, workers_of(options), advance), str(old))
    extra = dict(options.load.extra) | {
        "base": str(found.place),
        "earlier": os.pathsep.join(str(patch.path) for patch in opened[:-1]),
    }
    completed = replace(options, loader="delta", load=replace(options.load, extra=extra))
    if saver is None:
        saver, completed = _own_format(found, source.header, completed)
    return Application(str(opened[-1].path), saver, completed.for_saver(saver))


def _own_format(
    found: Input, header: Header, options: ConvertOptions
) -> tuple[str, ConvertOptions]:
    """(the saver of an input's format, the options completed with that format)."""
    name = found.loader.name
    if name not in registry.SAVERS:
        raise UsageError(
            f"--saver is missing: no saver writes the format of {found.given} ({header.source}); choose one of "
            f"{', '.join(registry.SAVERS)}"
        )
    if name != "core":
        return name, options
    return name, replace(options, save=as_stored(options.save, header, found))
