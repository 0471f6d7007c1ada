"""The patch, or the sparse update, between two checkpoints: opens both and writes it to a directory or a store."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from formats.opened import OpenedFiles
from formats.stores.addresses import is_store
from formats.target import Target
from megaconv.commands.comparison import find_both, open_both, source_checks
from megaconv.engine.lineage import lineage_of_patch, patched_places
from megaconv.engine.outputs import output_at, say_complete
from megaconv.engine.plan import default_workers
from megaconv.engine.target import refuse_loss, refuse_place
from megaconv.input import Input
from megaconv.options import ConvertOptions
from megaconv.patches.making import PatchReport, make_patch
from megaconv.patches.patch import INDEX, SPARSE_INDEX
from megaconv.patches.sparse import make_sparse, refuse_resume, require_engine


@dataclass(frozen=True)
class Watcher:
    """Follows the progress."""

    expect: Callable[[int], None] = lambda nbytes: None
    """Called once, with the number of bytes to read."""
    advance: Callable[[int], None] = lambda nbytes: None
    """Called with the number of bytes of each block that was read."""


def make_between(
    old: str | Path,
    new: str | Path,
    save_dir: str | Path,
    options: ConvertOptions,
    sparse: str | None = None,
    watcher: Watcher | None = None,
) -> PatchReport:
    """Write what changed between two checkpoints. It appears complete or not at all.

    sparse: the engine whose sparse update is written in place of a patch. Raises CheckpointError.
    """
    refuse_place(save_dir)
    if sparse is not None:
        require_engine(sparse)
        refuse_resume(resume=options.resume)
    staging = output_at(save_dir, options)
    try:
        made = _make(old, new, save_dir, staging, options, sparse, watcher or Watcher())
    except BaseException as error:
        if staging.committed:
            say_complete(save_dir, error)
        raise
    return _placed(made, save_dir)


def _make(
    old: str | Path,
    new: str | Path,
    save_dir: str | Path,
    staging: Target,
    options: ConvertOptions,
    sparse: str | None,
    watcher: Watcher,
) -> PatchReport:
    """See make_between. staging: the output at save_dir."""
    load = options.load if sparse is None else replace(options.load, optimizer=False)
    inputs = find_both(old, new, load, (options.loader, options.loader))
    _require_kept(inputs, save_dir, options, INDEX if sparse is None else SPARSE_INDEX)
    opened = OpenedFiles()
    with opened:
        left, right = open_both(inputs, load)
    checks = source_checks(inputs, (left, right)) if options.check_source else None
    nbytes = left.header.nbytes + right.header.nbytes
    workers = options.workers or default_workers(writing=False)
    if sparse is not None:
        watcher.expect(2 * nbytes)
        return make_sparse(
            left,
            right,
            staging,
            engine=sparse,
            workers=workers,
            advance=watcher.advance,
            checks=checks,
        )
    watcher.expect(nbytes)
    return make_patch(
        left,
        right,
        staging,
        options=load,
        workers=workers,
        resume=options.resume,
        opened=opened,
        advance=watcher.advance,
        lineage=lineage_of_patch(*inputs),
        checks=checks,
    )


def _placed(report: PatchReport, save_dir: str | Path) -> PatchReport:
    """Return the report with the target as the caller wrote it, as in the reports of conversions."""
    return replace(report, target=str(save_dir) if is_store(str(save_dir)) else Path(save_dir))


def _require_kept(
    inputs: tuple[Input, Input], save_dir: str | Path, options: ConvertOptions, index: str
) -> None:
    """Raises UsageError or TargetExists if the output would replace an input, or something that is neither a patch nor a
    checkpoint.

    index: the file by which an output of this kind is known.
    """
    old, new = inputs
    others = (new.place, options.load.config, *patched_places(options.all_extra()))
    refuse_loss(save_dir, old.place, others, index, overwrite=options.overwrite)
