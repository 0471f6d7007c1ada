"""Converts: opens a source, plans the output, streams the tensors. The output appears complete or not at all."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from formats.opened import OpenedFiles
from formats.stores.addresses import is_store
from formats.target import Target
from formats.tensor import announce_in_step
from megaconv import registry
from megaconv.engine.fingerprints import Fingerprint, combine, fingerprint_source
from megaconv.engine.gathered import entries_left_to, gather_digests
from megaconv.engine.lineage import patched_places, source_name
from megaconv.engine.opening import open_source
from megaconv.engine.output_check import verify_fingerprint
from megaconv.engine.outputs import output_at, parts_of, remove_failed, say_complete
from megaconv.engine.parts import PartPlan, in_order
from megaconv.engine.plan import block_bytes, default_workers
from megaconv.engine.preparation import prepare, workers_of
from megaconv.engine.ranks import ALONE, Ranks
from megaconv.engine.record import RECORD_NAME, record_json
from megaconv.engine.report import Report
from megaconv.engine.run_identity import revision_of, run_identity, source_digest
from megaconv.engine.shares import Share, share_out
from megaconv.engine.source_check import PATCH, SourceCheck, check_source
from megaconv.engine.stream import MAX_WAITING, Stream, Unit
from megaconv.engine.target import refuse_loss, refuse_place
from megaconv.engine.transfer import Transfer
from megaconv.errors import Cancelled, CheckpointError
from megaconv.hub import Place, resolve
from megaconv.input import find_input, input_at
from megaconv.model.ir import Key, Source
from megaconv.options import ConvertOptions, LoadOptions
from megaconv.saver import Saver

if TYPE_CHECKING:
    from formats.stores.target import StoreTarget

_log = logging.getLogger("megaconv")


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
    # _convert adds save_dir as soon as the output is in place. An error may still follow, for example on another rank.
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
        if complete:
            say_complete(complete[0], error)
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
    _, report = prepare(found, save_dir, registry.saver(saver), options)
    if not is_store(str(save_dir)):
        return report
    manifest = report.header.manifest
    _, waiting = parts_of(report.plan, manifest, options, workers_of(options))
    return replace(report, waiting=waiting)


def _require_kept(place: Place, save_dir: str | Path, options: ConvertOptions) -> None:
    """Raises UsageError or TargetExists if the output would replace an input, or something that isn't a checkpoint."""
    others = (
        options.load.config,
        options.save.base,
        *(each.place for each in options.adapters),
        *(each.place for each in options.averaged),
        *options.upcycling.experts_of,
        options.vocabulary.tokenizer,
        *patched_places(options.all_extra()),
    )
    refuse_loss(save_dir, place, others, RECORD_NAME, overwrite=options.overwrite)


@dataclass(frozen=True)
class _Job:
    """A conversion on one rank, ready to write its first byte."""

    saver: Saver
    options: ConvertOptions
    ranks: Ranks
    staging: Target
    opened: OpenedFiles
    """The source's files, with the state in which they were opened."""
    source: Source
    source_name: str
    report: Report
    """The planned report."""
    identity: Mapping[str, str]
    """Values that must be equal for a run to resume the work of another."""
    shares: Sequence[Share]
    """The shares of all ranks."""
    parts: PartPlan | None
    """The plan of this rank's share in parts; None if the output is not in a store."""

    @property
    def share(self) -> Share:
        """The share of this rank."""
        return self.shares[self.ranks.rank]


def _ready(
    load_dir: str | Path, save_dir: str | Path, saver: Saver, options: ConvertOptions, ranks: Ranks
) -> _Job:
    """Open the source and plan the output. Raises CheckpointError, also if ranks have other sources or options."""
    refuse_place(save_dir)
    staging = output_at(save_dir, options, ranks)
    place = resolve(load_dir, cache=options.load.cache)
    _require_kept(place, save_dir, options)
    opened = OpenedFiles()
    with opened:
        found = input_at(load_dir, place, options.loader, options.load)
        source, report = prepare(found, save_dir, saver, options, ranks.size)
    revision = revision_of(place, source.header, options)
    ranks.agree("source", source_digest(options, opened, revision))
    ranks.agree("options", repr((saver.name, staging.target, options)))
    identity = run_identity(saver.name, options, opened, revision, ranks.size)
    shares = share_out(report.plan, source.header.manifest, ranks.size)
    parts: PartPlan | None = None
    if is_store(str(save_dir)):
        share = shares[ranks.rank].plan
        parts, waiting = parts_of(share, source.header.manifest, options, workers_of(options))
        cast("StoreTarget", staging).expect(waiting)
        report = replace(report, waiting=waiting)
    return _Job(
        saver=saver,
        options=options,
        ranks=ranks,
        staging=staging,
        opened=opened,
        source=source,
        source_name=source_name(found.given),
        report=report,
        identity=identity,
        shares=shares,
        parts=parts,
    )


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
    job = _ready(load_dir, save_dir, saver, options, ranks)
    if not options.resume and not ranks.rank:
        job.staging.require_space(job.report.nbytes)
    planned(job.report)
    try:
        fingerprint = _write(job, ranks.counting(advance))
    except BaseException as error:
        # Keep an interrupted run only for a user who passed --resume.
        interrupted = ranks.fail(error)
        job.opened.abandon()
        if options.resume and interrupted:
            job.staging.keep()
        else:
            remove_failed(job.staging, save_dir, error)
        raise
    finally:
        if job.staging.committed:
            complete.append(str(save_dir))
    seconds = time.monotonic() - started
    return replace(job.report, seconds=seconds, fingerprint=fingerprint, verified=options.verify)


def _write(job: _Job, advance: Callable[[int], None]) -> Fingerprint:
    """Write the output, check it, and put it in its place. Returns its fingerprint. Waits for all ranks."""
    ranks, staging, report = job.ranks, job.staging, job.report
    is_first = ranks.rank == 0
    with job.opened:
        digests = _transfer(job, advance)
    job.opened.require_as_stored(entries_left_to(ranks, job.opened))
    if not is_first:
        # The first rank does this in commit().
        staging.finish()
    gathered = gather_digests(ranks, job.shares, digests)
    manifest = report.header.manifest
    fingerprint = combine({key: digest for key, digest in gathered.items() if key in manifest})
    if is_first:
        report.check.compare(fingerprint)
    if job.options.verify:
        _verify(job, fingerprint)
    if is_first:
        _commit(job, fingerprint)
    else:
        staging.keep()
    return fingerprint


def _verify(job: _Job, fingerprint: Fingerprint) -> None:
    """Read this rank's tensors of the finished output back. Waits for all ranks."""
    ranks = job.ranks
    with ranks.in_turn():
        readable = job.staging.readable()
    hashed = frozenset(job.share.hashed)
    workers = workers_of(job.options)
    verify_fingerprint(readable, job.saver, job.report, fingerprint, hashed, workers)
    ranks.gather("")


def _commit(job: _Job, fingerprint: Fingerprint) -> None:
    """Write the record of the conversion, and put the output in its place."""
    report = job.report
    written = record_json(
        job.source_name,
        job.saver.name,
        report.header,
        report.plan,
        fingerprint,
        report.adapters,
        job.options.save.quantize,
        report.lineage.provenance,
    )
    job.staging.file(RECORD_NAME, report.record_bytes).write(0, written)
    job.staging.commit()


def _transfer(job: _Job, advance: Callable[[int], None]) -> dict[Key, str]:
    """Write this rank's share. Returns the fingerprints of the tensors that the share hashes."""
    options, parts = job.options, job.parts
    workers = workers_of(options)
    stream = Stream(options.max_memory // 2, None if parts is None else parts.ahead)
    # The sender may fetch tensors of a store ahead. With --resume, the journal decides which tensors are read.
    fetches_early = parts is not None and not options.resume
    early = frozenset(job.share.hashed if fetches_early else ())
    order = None if parts is None else parts.order
    # Run in a copy of the context, so that files which the source opens only now are recorded too.
    sender = threading.Thread(
        target=copy_context().run,
        args=(_send, job.source, stream, order, early),
        name="loader",
        daemon=True,
    )
    if early:
        sender.start()
    try:
        with job.ranks.first_goes_first():
            transfer = Transfer(
                job.share,
                job.staging,
                source=job.identity,
                resume=options.resume,
                block_bytes=block_bytes(options.max_memory, workers),
                advance=advance,
                parts=parts,
            )
    except BaseException as error:
        stream.fail(error)
        raise
    if not early:
        sender.start()
    digests = transfer.run(stream, workers)
    sender.join()
    return digests


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
        if order is None:
            units: Iterable[Unit] = ([found] for found in source.tensors())
        else:
            units = in_order(source, order)
        for unit in units:
            if count < MAX_WAITING and all(key in early for key, _ in unit):
                announce_in_step([tensor for _, tensor in unit])
            stream.put_unit(unit)
            count += len(unit)
        stream.end(count)
    except Cancelled:
        pass
    except BaseException as error:
        stream.fail(error)


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
    number of bytes to read. Raises ModelsDiffer for a patch that is read on another base than its own.
    """
    opened = OpenedFiles()
    with opened:
        read = replace(options or LoadOptions(), own_names=True)
        given = find_input(path, loader, read)
        source = open_source(given, read)
        # Anybody may change a checkpoint, but a patch on another base is no model at all.
        is_patch = given.loader.name == PATCH
        check = check_source(given.place, source) if is_patch else SourceCheck()
        unknown = source.header.config.own_names
        if unknown is not None and unknown.stays_quantized:
            _log.warning("the fingerprint is of the stored words, not of weights: %s", unknown.why)
        expect(source.header.nbytes)
        found = fingerprint_source(source, workers or default_workers(writing=False), advance)
    opened.require_as_stored()
    check.compare(found)
    return found
