"""Further models of a conversion, whose weights are used beside those of the input."""

import logging
from dataclasses import replace

from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.engine.source_check import require_own_base
from megaconv.errors import UnsupportedInput, UsageError
from megaconv.input import Input, find_input
from megaconv.model.fields import NOT_COMPUTED
from megaconv.model.ir import Header, Source
from megaconv.model.meaning import config_differences
from megaconv.options import ConvertOptions, LoadOptions

_log = logging.getLogger("megaconv")


def open_other(place: str, load: LoadOptions, options: ConvertOptions) -> Source:
    """Another model, of any format. load: the options that the input was opened with. Raises CheckpointError."""
    found = find_input(place, options.loader, load)
    if options.resume and isinstance(found.place, str):
        raise UsageError(f"--resume: can't detect whether {place} has changed since; leave it out")
    known = {key: value for key, value in load.extra.items() if key in found.loader.options}
    source = open_source(found, replace(load, extra=known))
    require_checked_patch(found, source, options)
    return source


def require_checked_patch(found: Input, source: Source, options: ConvertOptions) -> None:
    """Compare a patch with its record, unless the user has switched it off. Raises ModelsDiffer for another base."""
    if options.check_source:
        require_own_base(found, source, options.workers or default_workers(writing=False))


def require_weights(place: str, header: Header, what: str) -> None:
    """Raise UnsupportedInput for a source without whole weights. what: what can't be done with it, such as `averaged`."""
    if header.adapter is not None:
        raise UnsupportedInput(
            f"{place}: is an adapter; whole models are {what}. Merge it first: megaconv merge BASE {place} --save-dir OUT"
        )
    unknown = header.config.own_names
    if unknown is not None and unknown.stays_quantized:
        raise UnsupportedInput(f"{place}: can't be {what}; {unknown.reason}")


def tell_of_settings(given: str, ours: Header, place: str, theirs: Header) -> None:
    """Warn of each setting in which another model differs from the input, whose settings the output has."""
    for name, kept, other in config_differences(ours.config, theirs.config):
        if name not in NOT_COMPUTED:
            _log.warning(
                "%s says %s = %s, %s says %s; the output has the former",
                given,
                name,
                kept,
                place,
                other,
            )
