"""Reads text, has it encoded by worker processes, and writes one indexed dataset for each key: in the order of the input."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass

from formats.errors import CheckpointError, CorruptCheckpoint
from megatron_lite.data.encoding import Encoded, EncodingOptions, encode, encoder
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.data.text_files import Batch, find_inputs, read_batches

QUEUED = 4
"""Batches for each worker that wait to be encoded or written."""


@dataclass(frozen=True)
class PreprocessOptions:
    inputs: tuple[str, ...]
    """Files, patterns, or - for standard input."""
    output_prefix: str
    encoding: EncodingOptions
    workers: int = 1
    """Processes; the output is the same for any number."""
    skip_bad_lines: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Written:
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
    """Write OUTPUT_PREFIX_KEY_document.bin and .idx for each key; `_sentence` when sentences are split.

    advance: gets the documents and bytes of text that were done. warn: gets each bad line that is skipped.
    Raises CorruptCheckpoint for a bad line, naming file and line, and for damaged files, UsageError, TargetExists;
    nothing is left behind then.
    """
    inputs = find_inputs(options.inputs)
    level = "sentence" if options.encoding.split_sentences else "document"
    dtype = encoder(options.encoding).dtype
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                IndexedWriter(f"{options.output_prefix}_{key}_{level}", dtype, overwrite=options.overwrite)
            )
            for key in options.encoding.keys
        ]
        batches = stack.enter_context(closing(_encoded(read_batches(inputs, options.encoding.keys), options)))
        for batch, done in batches:
            for number, what in done.bad:
                message = f"{batch.source}:{number}: {what}"
                if not options.skip_bad_lines:
                    raise CorruptCheckpoint(f"{message}; --skip-bad-lines leaves such lines out")
                warn(message)
            for writer, data, lengths in zip(writers, done.data, done.lengths, strict=True):
                writer.add_encoded(data, lengths)
            advance(done.records, done.size)
    return [Written(writer.prefix, writer.documents, writer.sequences, writer.tokens, dtype.name) for writer in writers]


def _encoded(batches: Iterable[Batch], options: PreprocessOptions) -> Generator[tuple[Batch, Encoded], None, None]:
    if options.workers <= 1:
        for batch in batches:
            yield batch, encode(options.encoding, batch)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context, initializer=_start_worker) as pool:
        waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(encode, options.encoding, batch)))
                if len(waiting) >= QUEUED * options.workers:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        except BrokenProcessPool:
            raise CheckpointError(
                "a worker process was killed, perhaps for want of memory; give fewer --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _next(waiting: deque[tuple[Batch, "Future[Encoded]"]]) -> tuple[Batch, Encoded]:
    batch, future = waiting.popleft()
    return batch, future.result()


def _start_worker() -> None:
    """A worker leaves interruptions to its parent, and ends when that is no more. Its own tokenizer needs no threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
