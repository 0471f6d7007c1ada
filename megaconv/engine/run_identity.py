"""The identity of a conversion: digests of its options and of its source's files.

Ranks compare them before they write together. A resumed run compares them with those of the interrupted run.
"""

import hashlib
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

from formats.opened import OpenedFiles
from megaconv._version import __version__
from megaconv.errors import UsageError
from megaconv.hub import Place
from megaconv.model.ir import Header
from megaconv.options import ConvertOptions

_NAMED_FILES = 256
"""The largest number of source files that are compared one by one, so that a message can name the changed one."""


def run_identity(
    saver: str, options: ConvertOptions, opened: OpenedFiles, revision: list[str], processes: int
) -> dict[str, str]:
    """Values that must be equal for a run to resume another run's work, together with the plan.

    The keys are names for messages. processes: they decide which rank computes the fingerprint of a tensor.
    """
    lossy = sorted(options.save.allow_lossy)
    adapters = [f"{each.place}:{each.weight}" for each in options.adapters]
    averaged = [f"{each.place}:{each.share}" for each in options.averaged]
    method = options.average_method
    extra = [f"{key}={value}" for key, value in sorted(options.all_extra().items())]
    return {
        "megaconv": __version__,
        "the number of processes": str(processes),
        "--saver": saver,
        "--dtype": str(options.dtype),
        "--allow-lossy": ", ".join(lossy) or "none",
        "--adapter": ", ".join(adapters) or "none",
        "--average": ", ".join(averaged) or "none",
        **_derived(options),
        "--method": f"{method.method}, density {method.density}, seed {method.seed}",
        "--option": ", ".join(extra) or "none",
        "the source's revision": _digest(revision),
        **source_files(opened),
    }


def _derived(options: ConvertOptions) -> dict[str, str]:
    """The options that make another model of the input."""
    vocabulary, upcycling = options.vocabulary, options.upcycling
    return {
        "--layers": "all" if options.layers is None else ",".join(map(str, options.layers)),
        "--keep-experts": json.dumps(options.keep_experts),
        "--keep-channels": str(options.keep_channels),
        "--num-experts": str(upcycling.experts),
        "--moe-router-topk": str(upcycling.topk),
        "--moe-upcycling-granularity": str(upcycling.granularity),
        "--experts-of": ", ".join(upcycling.experts_of) or "none",
        "--vocab-size": str(vocabulary.size),
        "--pad-to-multiple-of": str(vocabulary.multiple),
        "--tokenizer": str(vocabulary.tokenizer),
        "--new-rows": str(vocabulary.new_rows),
    }


def source_digest(options: ConvertOptions, opened: OpenedFiles, revision: list[str]) -> str:
    """A digest of the source's files, and of the options that decide what is read from them. Equal on all ranks."""
    # Without --allow-lossy, some tensors would be errors instead of being converted.
    lossy = sorted(options.save.allow_lossy)
    asked = [
        options.dtype,
        lossy,
        options.adapters,
        options.averaged,
        astuple(options.average_method),
        _derived(options),
        options.all_extra(),
        revision,
    ]
    return _digest(asked, opened.listing())


def source_files(opened: OpenedFiles) -> dict[str, str]:
    """A digest of each source file's state, by its path; of many files, one digest of all.

    Ranks may each read a copy of a file, but a resumed run must find the files themselves untouched.
    """
    states = zip(opened.listing(), opened.inode_changes(), strict=True)
    files = {path: _digest(size, written, changed) for (path, size, written), changed in states}
    if len(files) <= _NAMED_FILES:
        return files
    return {"the source's files": _digest(sorted(files.items()))}


def revision_of(place: Place, header: Header, options: ConvertOptions) -> list[str]:
    """The revision that a URI's loader reports. megaconv can't look at the files of a URI itself.

    Raises UsageError if a run is to be resumed and the loader reports no revision.
    """
    if isinstance(place, Path):
        return []
    if options.resume and header.revision is None:
        raise UsageError(
            f"--resume: the loader of {place} can't detect whether it has changed since; leave it out"
        )
    return [place, header.revision or ""]


def _digest(*what: Any) -> str:
    return hashlib.sha256(json.dumps([__version__, *what]).encode()).hexdigest()
