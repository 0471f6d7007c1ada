"""Reads text, encodes it in worker processes, and writes one indexed dataset for each key in the order of the input."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain, islice

from formats.errors import CheckpointError, CorruptCheckpoint
from formats.wording import counted
from megatron_lite.data.encoding import Encoded, EncodingOptions, encode, encoder
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.data.input_files import TEXT_SUFFIXES, find_inputs, is_plain_text, read_text
from megatron_lite.data.text_files import STDIN, Batch, read_batches
from megatron_lite.processes.interrupts import delayed_interrupts

QUEUED = 4
"""Batches per worker that wait to be encoded or written."""


@dataclass(frozen=True)
class PreprocessOptions:
    """Options of preprocess."""

    inputs: tuple[str, ...]
    """Files, patterns, directories, or - for standard input."""
    output_prefix: str
    encoding: EncodingOptions
    workers: int = 1
    """Number of processes. The output is the same for any number."""
    skip_bad_lines: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Written:
    """A written dataset and its size."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str


def preprocess(
    options: PreprocessOptions,
    advance: Callable[[int, int], None] = lambda documents, size: None,
    warn: Callable[[str], None] = lambda message: None,
) -> list[Written]:
    """Write OUTPUT_PREFIX_KEY_document.bin and .idx for each key; `_sentence` if sentences are split.

    advance: receives the number of encoded documents and the bytes of their text. warn: receives a message for each
    skipped line.
    Raises CorruptCheckpoint for a bad line, with file and line, for damaged files, and for inputs without a token;
    UsageError, TargetExists. After an error, no partial files remain.
    """
    inputs = find_inputs(options.inputs)
    level = "sentence" if options.encoding.in_sentences else "document"
    dtype = encoder(options.encoding).dtype
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                IndexedWriter(
                    f"{options.output_prefix}_{key}_{level}", dtype, overwrite=options.overwrite
                )
            )
            for key in options.encoding.keys
        ]
        batches = stack.enter_context(
            closing(_encoded(_batches(inputs, options.encoding.keys), options))
        )
        skipped = 0
        for batch, done in batches:
            for number, what in done.bad:
                message = f"{batch.source}:{number}: {what}"
                if not options.skip_bad_lines:
                    raise CorruptCheckpoint(f"{message}; --skip-bad-lines leaves such lines out")
                warn(message)
                skipped += 1
            for writer, data, lengths in zip(writers, done.data, done.lengths, strict=True):
                writer.add_encoded(data, lengths)
            advance(done.records, done.size)
        _require_tokens(writers, options, skipped)
    return [
        Written(writer.prefix, writer.documents, writer.sequences, writer.tokens, dtype.name)
        for writer in writers
    ]


def _batches(inputs: Iterable[str], keys: Sequence[str]) -> Iterator[Batch]:
    """Yield all records, in order. A plain text file is one record, with its text in the field `text`."""
    for name in inputs:
        if name != STDIN and is_plain_text(name):
            text = read_text(name)
            yield Batch(name, 1, [{"text": text}], len(text.encode()))
        else:
            yield from read_batches([name], keys)


def _require_tokens(
    writers: Sequence[IndexedWriter], options: PreprocessOptions, skipped: int
) -> None:
    """Raise CorruptCheckpoint for a dataset without tokens, because nothing can be trained on it."""
    empty: list[str] = []
    for key, writer in zip(options.encoding.keys, writers, strict=True):
        if not writer.tokens:
            empty.append(repr(key))
    if not empty:
        return
    place = ", ".join(options.inputs)
    documents = writers[0].documents
    if documents:
        keys = ", ".join(empty)
        raise CorruptCheckpoint(
            f"{place}: none of {counted(documents, 'document')} has a token of {keys}"
        )
    if skipped:
        plain_text = ", ".join(TEXT_SUFFIXES)
        raise CorruptCheckpoint(
            f"{place}: none of {counted(skipped, 'record')} can be read; records are JSON lines or parquet, "
            f"plain text is read from {plain_text}"
        )
    raise CorruptCheckpoint(f"{place}: there are no records")


def _encoded(
    batches: Iterable[Batch], options: PreprocessOptions
) -> Generator[tuple[Batch, Encoded], None, None]:
    ahead = iter(batches)
    # A worker process imports the tokenizer's packages, which takes seconds. One batch is encoded here in less.
    first = list(islice(ahead, 2)) if options.workers > 1 else []
    batches = chain(first, ahead)
    if len(first) < 2:
        for batch in batches:
            yield batch, encode(options.encoding, batch)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.workers, context, initializer=start_worker)
    waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, _submit(pool, options.encoding, batch)))
            if len(waiting) >= QUEUED * options.workers:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    except BrokenProcessPool:
        raise CheckpointError(
            "a worker process was killed, perhaps for want of memory; give fewer --workers"
        ) from None
    finally:
        # A second interruption waits for the batches that the workers encode.
        with delayed_interrupts():
            pool.shutdown(cancel_futures=True)


def _submit(
    pool: ProcessPoolExecutor, encoding: EncodingOptions, batch: Batch
) -> "Future[Encoded]":
    """Submit a batch. It may start a worker, which an interruption in between would leave half started."""
    with delayed_interrupts():
        return pool.submit(encode, encoding, batch)


def _next(waiting: deque[tuple[Batch, "Future[Encoded]"]]) -> tuple[Batch, Encoded]:
    batch, future = waiting.popleft()
    return batch, future.result()


def start_worker() -> None:
    """Set up a worker: it ignores interrupts, which its parent handles, and ends with its parent.

    Its tokenizer needs no threads.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
