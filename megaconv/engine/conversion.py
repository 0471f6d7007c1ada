"""The main job: open a source, plan the output, stream one into the other, let it appear complete or not at all."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.entry_check import Entry
from formats.opened import OpenedFiles
from formats.staging import Staging
from megaconv import registry
from megaconv._version import __version__
from megaconv.engine.fingerprints import Fingerprint, combine, fingerprint_source
from megaconv.engine.plan import block_bytes, default_workers
from megaconv.engine.preparation import ConvertOptions, Report, open_source, prepare, workers_of
from megaconv.engine.ranks import ALONE, Ranks
from megaconv.engine.reading_back import as_streamed
from megaconv.engine.record import RECORD_NAME, record_json
from megaconv.engine.shares import Share, share_out
from megaconv.engine.stream import Stream
from megaconv.engine.target import refuse_loss, refuse_place
from megaconv.engine.transfer import Transfer
from megaconv.errors import Cancelled, CheckpointError, Interrupted, ModelsDiffer, UsageError, is_interruption
from megaconv.families import sees_or_hears
from megaconv.hub import Place, resolve
from megaconv.model.beside import BESIDE
from megaconv.model.ir import Header, Key, Source
from megaconv.options import LoadOptions


def convert(
    load_dir: str | Path,
    save_dir: str | Path,
    saver: str,
    options: ConvertOptions,
    advance: Callable[[int], None] = lambda count: None,
    ranks: Ranks = ALONE,
    planned: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Convert. advance is called with the number of bytes of every block that has been moved. Raises CheckpointError.

    planned: called once, before the first byte is written, with what will be done.
    ranks: the processes that do it together; each calls this with the same arguments, and has the same report.
    """
    complete: list[str] = []
    try:
        with ranks:
            return _convert(load_dir, save_dir, saver, options, advance, ranks, planned, complete)
    except BaseException as error:
        if complete and is_interruption(error):
            kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else Interrupted
            raise kind(f"{complete[0]} is complete") from None
        if complete and isinstance(error, CheckpointError):
            raise CheckpointError(f"{error}; {complete[0]} is complete") from error
        raise


def rehearse(load_dir: str | Path, save_dir: str | Path, saver: str, options: ConvertOptions) -> Report:
    """What convert() would write, from metadata alone. Raises what it would raise before its first byte."""
    refuse_place(save_dir)
    Staging(Path(save_dir), overwrite=options.overwrite)
    place = resolve(load_dir, metadata_only=True)
    _require_kept(place, save_dir, options)
    return prepare(load_dir, save_dir, saver, options, place=place)[1]


def _require_kept(place: Place, save_dir: str | Path, options: ConvertOptions) -> None:
    """Raises UsageError or TargetExists where the output would replace what is read, or what is no checkpoint."""
    others = (options.load.config, options.save.base, *(Path(each.place) for each in options.adapters))
    refuse_loss(save_dir, place, others, RECORD_NAME)


def _convert(
    load_dir: str | Path,
    save_dir: str | Path,
    saver: str,
    options: ConvertOptions,
    advance: Callable[[int], None],
    ranks: Ranks,
    planned: Callable[[Report], None],
    complete: list[str],
) -> Report:
    """complete: where save_dir is entered when the output is there, whatever happens then."""
    started = time.monotonic()
    refuse_place(save_dir)
    staging = Staging(Path(save_dir), overwrite=options.overwrite, member=ranks.rank)
    place = resolve(load_dir)
    _require_kept(place, save_dir, options)
    opened = OpenedFiles()
    with opened:
        source, report = prepare(load_dir, save_dir, saver, options, ranks.size, place)
    lossy = sorted(options.save.allow_lossy)  # with it tensors are finished that are an error without
    asked = [options.dtype, lossy, options.adapters, options.all_extra(), _revision(place, source.header, options)]
    ranks.agree("source", _digest(asked, opened.listing()))
    ranks.agree("options", repr((saver, staging.target, options)))
    # What agreed ranks may each have a copy of, a run that is resumed has to find untouched.
    identity = _digest(asked, opened.listing(), opened.inode_changes())
    if not options.resume and not ranks.rank:
        staging.require_space(report.nbytes)
    planned(report)
    shares = share_out(report.plan, source.header.manifest, ranks.size)
    try:
        with opened:
            digests = _transfer(source, shares[ranks.rank], staging, identity, options, ranks.counting(advance), ranks)
        opened.require_as_stored(_left_to(ranks, opened))
        if ranks.rank:
            staging.finish()  # rank 0 does when it commits
        gathered = _gather(ranks, shares, digests)
        fingerprint = combine({key: gathered[key] for key in gathered if key in report.header.manifest})
        if not ranks.rank:
            report.check.compare(fingerprint)
        if options.verify:
            hashed = frozenset(shares[ranks.rank].hashed)
            verify_fingerprint(staging.data, saver, report, fingerprint, hashed, workers_of(options))
            ranks.gather("")
        if ranks.rank:
            staging.keep()
        else:
            record = staging.file(RECORD_NAME, report.record_bytes)
            written = record_json(
                str(load_dir), saver, report.header, report.plan, fingerprint, report.adapters, options.save.quantize
            )
            record.write(0, written)
            staging.commit()
    except BaseException as error:
        # An interrupted run is worth keeping only for somebody who said that they'd resume it.
        interrupted = ranks.fail(error)
        if options.resume and interrupted:
            staging.keep()
        else:
            staging.discard()
        raise
    finally:
        if staging.committed:
            complete.append(str(save_dir))
    return replace(report, seconds=time.monotonic() - started, fingerprint=fingerprint, verified=options.verify)


def _transfer(
    source: Source,
    share: Share,
    staging: Staging,
    identity: str,
    options: ConvertOptions,
    advance: Callable[[int], None],
    ranks: Ranks,
) -> dict[Key, str]:
    """Write one share; returns the fingerprints of the tensors that it hashes."""
    workers = workers_of(options)
    with ranks.first_goes_first():
        transfer = Transfer(
            share, staging, source=identity, resume=options.resume,
            block_bytes=block_bytes(options.max_memory, workers), advance=advance,
        )  # fmt: skip
    stream = Stream(options.max_memory // 2)
    # In a copy of the context, so that files which a source opens no sooner than here are noted too.
    sender = threading.Thread(target=copy_context().run, args=(_send, source, stream), name="loader", daemon=True)
    sender.start()
    digests = transfer.run(stream, workers)
    sender.join()
    return digests


def _left_to(ranks: Ranks, opened: OpenedFiles) -> set[Entry] | None:
    """Zip entries that no rank has read all of, and this one is the first to have read a part of; None: all, of one rank alone."""
    if ranks.size == 1:
        return None
    begun, compared = opened.begun_entries(), opened.compared_entries()
    gathered = ranks.gather(json.dumps([[_placed(entry) for entry in entries] for entries in (begun, compared)]))
    found = [json.loads(text) for text in gathered]
    done = {name for _, theirs in found for name in theirs}
    first: dict[str, int] = {}
    for rank, (theirs, _) in enumerate(found):
        for name in theirs:
            first.setdefault(name, rank)
    return {entry for entry in begun if _placed(entry) not in done and first[_placed(entry)] == ranks.rank}


def _placed(entry: Entry) -> str:
    """The same for all ranks, which may have mounted the source at different places."""
    return f"{'/'.join(Path(entry.path).parts[-3:])}:{entry.start}"


def _gather(ranks: Ranks, shares: Sequence[Share], digests: Mapping[Key, str]) -> dict[Key, str]:
    """The fingerprints of all tensors, in the manifest's order of each share; waits for all ranks."""
    gathered = ranks.gather("".join(digests[key] for key in shares[ranks.rank].hashed))
    return {
        key: text[64 * index : 64 * (index + 1)]
        for share, text in zip(shares, gathered, strict=True)
        for index, key in enumerate(share.hashed)
    }


def _send(source: Source, stream: Stream) -> None:
    """The loader's side of the stream."""
    try:
        stream.put_header(source.header)
        count = 0
        for key, tensor in source.tensors():
            stream.put(key, tensor)
            count += 1
        stream.end(count)
    except Cancelled:
        pass
    except BaseException as error:
        stream.fail(error)


def verify_fingerprint(
    path: Path, saver: str, report: Report, expected: Fingerprint, keys: Collection[Key], workers: int
) -> None:
    """Read tensors of a finished output back. Raises ModelsDiffer unless they are what was streamed."""
    read_back = getattr(registry.saver(saver), "read_back", None)
    completed = bool(report.plan.from_base)  # by more tensors of the original, and everything beside a language model
    source: Source
    if read_back is not None:
        source = as_streamed(path, read_back(path), report.header, report.plan)
    else:
        alone = not any(key.name.startswith(BESIDE) for key in expected.tensors)
        _, source = open_source(path, options=LoadOptions(text_only=completed and alone and sees_or_hears(path)))
    held = source.header.manifest.keys()
    if held != expected.tensors.keys() and not (completed and held >= expected.tensors.keys()):
        raise ModelsDiffer(f"{path}: reads back with other tensors than were written")
    for key, digest in fingerprint_source(source, workers, only=keys).tensors.items():
        if expected.tensors[key] != digest:
            raise ModelsDiffer(f"{key}: reads back differently from what was written; is the disk faulty?")


def _digest(*what: Any) -> str:
    return hashlib.sha256(json.dumps([__version__, *what]).encode()).hexdigest()


def _revision(place: Place, header: Header, options: ConvertOptions) -> list[str]:
    """What the loader of a URI says about it, whose files nobody here can look at.

    Raises UsageError where a run of a URI is to be resumed of which nobody knows whether it has changed.
    """
    if isinstance(place, Path):
        return []
    if options.resume and header.revision is None:
        raise UsageError(f"--resume: the loader of {place} can't detect whether it has changed since; leave it out")
    return [place, header.revision or ""]


def fingerprint(
    path: str | Path,
    options: LoadOptions | None = None,
    workers: int = 0,
    advance: Callable[[int], None] | None = None,
    loader: str | None = None,
) -> Fingerprint:
    """The fingerprint of any checkpoint; reads all of it. loader: None: the one that recognises it."""
    opened = OpenedFiles()
    with opened:
        _, source = open_source(path, loader, options)
        found = fingerprint_source(source, workers or default_workers(writing=False), advance)
    opened.require_as_stored()
    return found
