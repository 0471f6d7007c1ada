"""Reads a finished output back for `--verify`, and compares its tensors with the streamed ones."""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from megaconv.engine.fingerprints import Fingerprint, fingerprint_source
from megaconv.engine.opening import open_source
from megaconv.engine.reading_back import as_streamed
from megaconv.engine.report import Report
from megaconv.errors import ModelsDiffer
from megaconv.families import has_text_only
from megaconv.input import find_input
from megaconv.model.beside import BESIDE
from megaconv.model.ir import Key, Source
from megaconv.options import LoadOptions
from megaconv.saver import Saver


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
    source = _finished_output(path, saver, report, expected)
    held, written = source.header.manifest.keys(), expected.tensors.keys()
    # --base adds tensors of the original, and all parts of a multimodal model beside its language model.
    has_more = bool(report.plan.from_base) and held > written
    if held != written and not has_more:
        raise ModelsDiffer(f"{path}: reads back with other tensors than were written")
    for key, digest in fingerprint_source(source, workers, only=keys).tensors.items():
        if expected.tensors[key] != digest:
            raise ModelsDiffer(
                f"{key}: reads back differently from what was written; is the disk faulty?"
            )


def _finished_output(path: Path, saver: Saver, report: Report, expected: Fingerprint) -> Source:
    """The output as a source of the tensors that were streamed into it."""
    read_back = report.plan.read_back or saver.read_back
    if read_back is not None:
        return as_streamed(path, read_back(path), report.header, report.plan)
    is_language_model = not any(key.name.startswith(BESIDE) for key in expected.tensors)
    is_inside_original = is_language_model and bool(report.plan.from_base) and has_text_only(path)
    # DCP holds a multimodal model by the names of its files, whatever family its language model has.
    by_own_names = report.header.config.own_names is not None
    read = LoadOptions(text_only=is_inside_original, whole=not by_own_names, own_names=True)
    with _without_warnings():
        return open_source(find_input(path), read)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide warnings: those about an output repeat the source's, or describe the form that the user asked for.

    A reader of FP8 says that it leaves out scales of activations, for example. The output has them.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
