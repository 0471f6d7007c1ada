"""Patches of `megaconv delta`, together with the checkpoint that they change: the newer checkpoint."""

from pathlib import Path

from megaconv.engine.lineage import places_in
from megaconv.engine.preparation import open_source
from megaconv.errors import UnknownFamily, UsageError
from megaconv.input import find_input
from megaconv.loader import Loader
from megaconv.model.ir import Source
from megaconv.options import LoadOptions
from megaconv.patches.patch import PatchedSource, is_patch, open_patch, patch_at

BASE, EARLIER = "base", "earlier"


def open_patched(path: Path, options: LoadOptions) -> Source:
    """The newer checkpoint. Raises UsageError without the base, ModelsDiffer for another one, CorruptCheckpoint."""
    base = options.extra.get(BASE)
    if not base:
        raise UsageError(
            f"{path}: is a patch; --option base=OLD names the checkpoint that it changes",
            code="option-needed",
        )
    earlier = [patch_at(each) for each in places_in(options.extra.get(EARLIER, ""))]
    patches = [open_patch(each) for each in (*earlier, path)]
    unknown = patches[-1].header.config.own_names
    if unknown is not None and not options.own_names:
        raise UnknownFamily(f"{path}: {unknown.reason}")
    read = patches[0].options
    source = open_source(find_input(base, None, read), read)
    for patch in patches:
        source = PatchedSource(source, patch)
    return source


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
