"""Patches of `megaconv delta`, together with the checkpoint that they change: the newer checkpoint."""

from dataclasses import replace
from pathlib import Path

from megaconv.engine.fingerprints import fingerprint_source
from megaconv.engine.lineage import places_in
from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.engine.record import find_record
from megaconv.errors import UnknownFamily, UsageError
from megaconv.input import Input, find_input
from megaconv.loader import Loader
from megaconv.model.ir import Header, OpenedSource, Source
from megaconv.options import LoadOptions
from megaconv.patches.patch import (
    Patch,
    PatchedSource,
    WeightsAlone,
    is_patch,
    open_patch,
    patch_at,
    require_chain,
)

BASE, EARLIER = "base", "earlier"


def open_patched(path: Path, options: LoadOptions) -> Source:
    """The newer checkpoint; without the base its header alone, if the weights are not needed.

    Raises UsageError without the base, ModelsDiffer for another one, CorruptCheckpoint.
    """
    source = _patched(path, options)
    return source if options.optimizer else WeightsAlone(source)


def _patched(path: Path, options: LoadOptions) -> Source:
    """The newer checkpoint with all that the patches and the base hold."""
    base = options.extra.get(BASE)
    if not base and options.needs_weights:
        raise UsageError(
            f"{path}: is a patch; --option base=OLD names the checkpoint that it changes",
            code="option-needed",
        )
    earlier = [patch_at(each) for each in places_in(options.extra.get(EARLIER, ""))]
    patches = [open_patch(each) for each in (*earlier, path)]
    unknown = patches[-1].header.config.own_names
    if unknown is not None and not options.own_names:
        raise UnknownFamily(f"{path}: {unknown.reason}")
    require_chain(patches)
    if not base:
        return OpenedSource(_named(patches[0]), {})
    read = patches[0].options
    found = find_input(base, None, read)
    source = open_source(found, read)
    _require_recorded(patches[0], found, source)
    for patch in patches:
        source = PatchedSource(source, patch)
    return source


def _named(patch: Patch) -> Header:
    """The header of the newer checkpoint. Its source names the base."""
    source = f"{patch.header.source}, for the base with the fingerprint {patch.base['weights']}"
    return replace(patch.header, source=source)


def _require_recorded(patch: Patch, found: Input, source: Source) -> None:
    """Raises ModelsDiffer for a base that its own record shows to be another checkpoint than that of the patch.

    The fingerprint of a base without a record costs a whole read. `apply` and commands that compare the result with the
    record of the patch find another base too.
    """
    record = find_record(found.place)
    if record is not None and record.fingerprint != patch.base["weights"]:
        # The base may have changed since its record was written: its tensors decide.
        workers = default_workers(writing=False)
        patch.require_base(fingerprint_source(source, workers), found.given)


LOADER = Loader(
    name="delta",
    description="a patch of `megaconv delta`, with the checkpoint that it changes",
    detect=is_patch,
    open=open_patched,
    options={
        BASE: "the checkpoint that the first patch changes",
        EARLIER: "patches to apply before, separated by `:`",
    },
    reads_files=False,
    keeps_names=True,
)
