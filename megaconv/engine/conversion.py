"""Converts: opens a source, plans the output, streams the tensors. The output appears complete or not at all."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from formats.entry_check import Entry
from formats.opened import OpenedFiles
from formats.stores.addresses import is_store
from formats.target import Target
from formats.tensor import announce
from megaconv import registry
from megaconv._version import __version__
from megaconv.engine.fingerprints import Fingerprint, combine, fingerprint_source
from megaconv.engine.lineage import source_name
from megaconv.engine.outputs import output_at, parts_of
from megaconv.engine.parts import PartPlan, in_order
from megaconv.engine.plan import block_bytes, default_workers
from megaconv.engine.preparation import open_source, prepare, workers_of
from megaconv.engine.ranks import ALONE, Ranks
from megaconv.engine.reading_back import as_streamed
from megaconv.engine.record import RECORD_NAME, record_json
from megaconv.engine.report import Report
from megaconv.engine.shares import Share, share_out
from megaconv.engine.stream import MAX_WAITING, Stream
from megaconv.engine.target import refuse_loss, refuse_place
from megaconv.engine.transfer import Transfer
from megaconv.errors import (
    Cancelled,
    CheckpointError,
    Interrupted,
    ModelsDiffer,
    UsageError,
    is_interruption,
)
from megaconv.families import is_multimodal
from megaconv.hub import Place, resolve
from megaconv.input import find_input, input_at
from megaconv.model.beside import BESIDE
from megaconv.model.ir import Header, Key, Source
from megaconv.options import ConvertOptions, LoadOptions
from megaconv.saver import Saver

if TYPE_CHECKING:
    from formats.stores.target import StoreTarget


def convert(
    load_dir: str | Path,
    save_dir: str | Path,
    saver: str,
    options: ConvertOptions,
    advance: Callable[[int], None] = lambda count: None,
    ranks: Ranks = ALONE,
    planned: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Convert load_dir into save_dir. Raises CheckpointError.

    advance: called with the number of bytes of every block that has been moved.
    planned: called once, before the first byte is written, with the planned report.
    ranks: the processes that convert together. Each calls this with the same arguments and gets the same report.
    """
    complete: list[str] = []
    try:
        with ranks:
            return _convert(
                load_dir,
                save_dir,
                registry.saver(saver),
                options,
                advance,
                ranks,
                planned,
                complete,
            )
    except BaseException as error:
        if complete and is_interruption(error):
            kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else Interrupted
            raise kind(f"{complete[0]} is complete") from None
        if complete and isinstance(error, CheckpointError):
            raise CheckpointError(f"{error}; {complete[0]} is complete") from error
        raise


def rehearse(
    load_dir: str | Path, save_dir: str | Path, saver: str, options: ConvertOptions
) -> Report:
    """The report of the output that convert() would write, from metadata alone.

    Raises the errors that convert() would raise before it writes its first byte.
    """
    refuse_place(save_dir)
    output_at(save_dir, options)
    place = resolve(load_dir, cache=options.load.cache)
    _require_kept(place, save_dir, options)
    found = input_at(load_dir, place, options.loader, options.load)
    report = prepare(found, save_dir, registry.saver(saver), options)[1]
    if not is_store(str(save_dir)):
        return report
    return replace(report, waiting=parts_of(report.plan, options, workers_of(options))[1])


def _require_kept(place: Place, save_dir: str | Path, options: ConvertOptions) -> None:
    """Raises UsageError or TargetExists if the output would replace an input, or something that isn't a checkpoint."""
    others = (
        options.load.config,
        options.save.base,
        *(Path(each.place) for each in options.adapters),
    )
    refuse_loss(save_dir, place, others, RECORD_NAME, overwrite=options.overwrite)


def _convert(
    load_dir: str | Path,
    save_dir: str | Path,
    saver: Saver,
    options: ConvertOptions,
    advance: Callable[[int], None],
    ranks: Ranks,
    planned: Callable[[Report], None],
    complete: list[str],
) -> Report:
    """Convert. complete: receives save_dir as soon as the output is in place, even if an error follows."""
    started = time.monotonic()
    refuse_place(save_dir)
    staging = output_at(save_dir, options, ranks)
    place = resolve(load_dir, cache=options.load.cache)
    _require_kept(place, save_dir, options)
    opened = OpenedFiles()
    with opened:
        found = input_at(load_dir, place, options.loader, options.load)
        source, report = prepare(found, save_dir, saver, options, ranks.size)
    # Part of the digest: with --allow-lossy, tensors are converted that would be errors without it.
    lossy = sorted(options.save.allow_lossy)
    asked = [
        options.dtype,
        lossy,
        options.adapters,
        options.all_extra(),
        _revision(place, source.header, options),
    ]
    ranks.agree("source", _digest(asked, opened.listing()))
    ranks.agree("options", repr((saver.name, staging.target, options)))
    identity = _identity(saver.name, options, opened, _revision(place, source.header, options))
    shares = share_out(report.plan, source.header.manifest, ranks.size)
    parts: PartPlan | None = None
    if is_store(str(save_dir)):
        parts, waiting = parts_of(shares[ranks.rank].plan, options, workers_of(options))
        cast("StoreTarget", staging).expect(waiting)
        report = replace(report, waiting=waiting)
    if not options.resume and not ranks.rank:
        staging.require_space(report.nbytes)
    planned(report)
    try:
        with opened:
            digests = _transfer(
                source,
                shares[ranks.rank],
                staging,
                identity,
                options,
                ranks.counting(advance),
                ranks,
                parts,
            )
        opened.require_as_stored(_left_to(ranks, opened))
        if ranks.rank:
            staging.finish()  # rank 0 does this in commit()
        gathered = _gather(ranks, shares, digests)
        fingerprint = combine(
            {key: gathered[key] for key in gathered if key in report.header.manifest}
        )
        if not ranks.rank:
            report.check.compare(fingerprint)
        if options.verify:
            hashed = frozenset(shares[ranks.rank].hashed)
            with ranks.in_turn():
                readable = staging.readable()
            verify_fingerprint(readable, saver, report, fingerprint, hashed, workers_of(options))
            ranks.gather("")
        if ranks.rank:
            staging.keep()
        else:
            record = staging.file(RECORD_NAME, report.record_bytes)
            written = record_json(
                source_name(found.given),
                saver.name,
                report.header,
                report.plan,
                fingerprint,
                report.adapters,
                options.save.quantize,
                report.lineage.provenance,
            )
            record.write(0, written)
            staging.commit()
    except BaseException as error:
        # Keep an interrupted run only for a user who passed --resume.
        interrupted = ranks.fail(error)
        opened.abandon()
        if options.resume and interrupted:
            staging.keep()
        else:
            staging.discard()
        raise
    finally:
        if staging.committed:
            complete.append(str(save_dir))
    return replace(
        report, seconds=time.monotonic() - started, fingerprint=fingerprint, verified=options.verify
    )


def _transfer(
    source: Source,
    share: Share,
    staging: Target,
    identity: Mapping[str, str],
    options: ConvertOptions,
    advance: Callable[[int], None],
    ranks: Ranks,
    parts: PartPlan | None,
) -> dict[Key, str]:
    """Write one share. parts: its plan in parts, for a store. Returns the fingerprints of the tensors that this share hashes."""
    workers = workers_of(options)
    stream = Stream(options.max_memory // 2, None if parts is None else parts.ahead)
    order = None if parts is None else parts.order
    # With --resume, the journal decides which tensors are read.
    early = () if parts is None or options.resume else share.hashed
    # Run in a copy of the context, so that files which the source opens only now are recorded too.
    sender = threading.Thread(
        target=copy_context().run, args=(_send, source, stream, order, frozenset(early)), name="loader", daemon=True
    )  # fmt: skip
    if early:
        sender.start()
    try:
        with ranks.first_goes_first():
            transfer = Transfer(
                share, staging, source=identity, resume=options.resume,
                block_bytes=block_bytes(options.max_memory, workers), advance=advance, parts=parts,
            )  # fmt: skip
    except BaseException as error:
        stream.fail(error)
        raise
    if not early:
        sender.start()
    digests = transfer.run(stream, workers)
    sender.join()
    return digests


def _left_to(ranks: Ranks, opened: OpenedFiles) -> set[Entry] | None:
    """Zip entries whose checksum this rank has to compare; None if there is only one rank, which compares all.

    These are entries that no rank has read completely, and that this rank is the first to have read in part.
    """
    if ranks.size == 1:
        return None
    begun, compared = opened.begun_entries(), opened.compared_entries()
    gathered = ranks.gather(
        json.dumps([[_placed(entry) for entry in entries] for entries in (begun, compared)])
    )
    found = [json.loads(text) for text in gathered]
    done = {name for _, theirs in found for name in theirs}
    first: dict[str, int] = {}
    for rank, (theirs, _) in enumerate(found):
        for name in theirs:
            first.setdefault(name, rank)
    return {
        entry
        for entry in begun
        if _placed(entry) not in done and first[_placed(entry)] == ranks.rank
    }


def _placed(entry: Entry) -> str:
    """A name of the entry that is equal on all ranks, even if they mounted the source at different paths."""
    return f"{'/'.join(Path(entry.path).parts[-3:])}:{entry.start}"


def _gather(ranks: Ranks, shares: Sequence[Share], digests: Mapping[Key, str]) -> dict[Key, str]:
    """The fingerprints of all tensors, share by share, each share in the manifest's order. Waits for all ranks."""
    gathered = ranks.gather("".join(digests[key] for key in shares[ranks.rank].hashed))
    return {
        key: text[64 * index : 64 * (index + 1)]
        for share, text in zip(shares, gathered, strict=True)
        for index, key in enumerate(share.hashed)
    }


def _send(
    source: Source, stream: Stream, order: Mapping[Key, int] | None, early: frozenset[Key]
) -> None:
    """The loader's side of the stream: sends the header, all tensors, and the end marker.

    order: the places of tensors in the order of sending; None: the source's order. early: tensors that are fetched ahead
    while the output begins, if they are among the first.
    """
    try:
        stream.put_header(source.header)
        count = 0
        for key, tensor in source.tensors() if order is None else in_order(source, order):
            if count < MAX_WAITING and key in early:
                announce(tensor)
            stream.put(key, tensor)
            count += 1
        stream.end(count)
    except Cancelled:
        pass
    except BaseException as error:
        stream.fail(error)


def verify_fingerprint(
    path: Path,
    saver: Saver,
    report: Report,
    expected: Fingerprint,
    keys: Collection[Key],
    workers: int,
) -> None:
    """Read tensors of a finished output back. Raises ModelsDiffer unless they equal the streamed tensors.

    keys: the tensors to compare.
    """
    # --base adds tensors of the original, and all parts of a multimodal model beside its language model.
    completed = bool(report.plan.from_base)
    source: Source
    read_back = report.plan.read_back or saver.read_back
    if read_back is not None:
        source = as_streamed(path, read_back(path), report.header, report.plan)
    else:
        is_alone = not any(key.name.startswith(BESIDE) for key in expected.tensors)
        is_inside_original = completed and is_alone and is_multimodal(path)
        # DCP holds a multimodal model by the names of its files, whatever family its language model has.
        by_own_names = report.header.config.own_names is not None
        read = LoadOptions(text_only=is_inside_original, whole=not by_own_names, own_names=True)
        source = open_source(find_input(path), read)
    held = source.header.manifest.keys()
    if held != expected.tensors.keys() and not (completed and held >= expected.tensors.keys()):
        raise ModelsDiffer(f"{path}: reads back with other tensors than were written")
    for key, digest in fingerprint_source(source, workers, only=keys).tensors.items():
        if expected.tensors[key] != digest:
            raise ModelsDiffer(
                f"{key}: reads back differently from what was written; is the disk faulty?"
            )


def _identity(
    saver: str, options: ConvertOptions, opened: OpenedFiles, revision: list[str]
) -> dict[str, str]:
    """Values that must be equal for a run to resume another run's work, together with the plan.

    The keys are names for messages.
    """
    return {
        "megaconv": __version__,
        "--saver": saver,
        "--dtype": str(options.dtype),
        "--allow-lossy": ", ".join(sorted(options.save.allow_lossy)) or "none",
        "--adapter": ", ".join(f"{each.place}:{each.weight}" for each in options.adapters)
        or "none",
        "--option": ", ".join(
            f"{key}={value}" for key, value in sorted(options.all_extra().items())
        )
        or "none",
        "the source's revision": _digest(revision),
        **source_files(opened),
    }


def source_files(opened: OpenedFiles) -> dict[str, str]:
    """A digest of each source file's state, by its path; of many files, one digest of all.

    Ranks may each read a copy of a file, but a resumed run must find the files themselves untouched.
    """
    states = zip(opened.listing(), opened.inode_changes(), strict=True)
    files = {path: _digest(size, written, changed) for (path, size, written), changed in states}
    if len(files) <= _NAMED_FILES:
        return files
    return {"the source's files": _digest(sorted(files.items()))}


_NAMED_FILES = 256
"""The largest number of source files that are compared one by one, so that a message can name the changed one."""


def _digest(*what: Any) -> str:
    return hashlib.sha256(json.dumps([__version__, *what]).encode()).hexdigest()


def _revision(place: Place, header: Header, options: ConvertOptions) -> list[str]:
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


def fingerprint(
    path: str | Path,
    options: LoadOptions | None = None,
    workers: int = 0,
    advance: Callable[[int], None] | None = None,
    loader: str | None = None,
    expect: Callable[[int], None] = lambda total: None,
) -> Fingerprint:
    """The fingerprint of any checkpoint.

    Reads all of it. loader: a loader's name; None: the loader that recognises the input. expect: called once with the
    number of bytes to read.
    """
    opened = OpenedFiles()
    with opened:
        read = replace(options or LoadOptions(), own_names=True)
        source = open_source(find_input(path, loader, read), read)
        expect(source.header.nbytes)
        found = fingerprint_source(source, workers or default_workers(writing=False), advance)
    opened.require_as_stored()
    return found
