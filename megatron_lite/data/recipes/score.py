"""`megatron_lite data score`: adds scores to each text of a file, such as its toxicity.

{"text": "fine words"}     ->     {"text": "fine words", "score": {"toxicity": 0.02}}
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megaconv.local_paths import local_path, local_word
from megatron_lite.data.finetuning.records import find_files
from megatron_lite.data.recipes.documents import Document, Reader
from megatron_lite.data.recipes.outputs import GZIP, ZSTANDARD
from megatron_lite.data.recipes.scorers import Scorer, ScorerOptions, make_scorer
from megatron_lite.data.resumable_lines import ResumableLines

DESCRIPTION = "Add scores to texts, such as their toxicity: a classifier's, a function's, or those of Perspective."
SCORE = "score"
"""The field that each record gets."""


@dataclass
class ScoreReport:
    """The numbers of texts."""

    texts: int = 0
    without_score: int = 0
    """Blank texts, and texts that the scorer refuses."""
    resumed: int = 0
    """Texts that an earlier run has scored."""
    sums: Counter[str] = field(default_factory=Counter)

    def add(self, scores: Mapping[str, float] | None) -> None:
        """Count one more text."""
        self.texts += 1
        if scores is None:
            self.without_score += 1
        else:
            self.sums.update(scores)

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        scored = self.texts - self.without_score
        means = {name: total / scored for name, total in self.sums.items()} if scored else {}
        return {
            "texts": self.texts, "without_score": self.without_score, "resumed": self.resumed, "means": means,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report's table."""
        for name, value in self.as_json().items():
            if isinstance(value, int):
                yield f"{name:24} {value:14,}"
        for name, mean in self.as_json()["means"].items():
            yield f"{'mean of ' + name:24} {mean:14.6f}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add(
        "--input", type=local_word, nargs="+", required=True, metavar="FILE",
        help="JSON lines, parquet, also .gz, .zst; directories and patterns",
    )  # fmt: skip
    add("--output", type=local_path, required=True, metavar="FILE", help="JSON lines with scores")
    add(
        "--scorer", required=True, metavar="SCORER",
        help="transformers:MODEL[#LABEL], MODULE:FUNCTION (texts -> a dict of floats for each), or perspective",
    )  # fmt: skip
    add("--text-key", default="text", metavar="KEY", help="field with the text (text)")
    add("--resume", action="store_true", help="continue an interrupted --output")
    add("--overwrite", action="store_true", help="replace an existing --output")
    add(
        "--skip-bad-lines",
        action="store_true",
        help="leave out, and report, lines that can't be read",
    )
    add("--report", type=local_path, metavar="FILE", help="write the report as JSON too")
    defaults = ScorerOptions()
    add(
        "--batch-size", type=int, default=defaults.batch_size, metavar="N",
        help=f"texts that are scored together ({defaults.batch_size})",
    )  # fmt: skip
    add = parser.add_argument_group("classifiers of transformers").add_argument
    add(
        "--activation", choices=("sigmoid", "softmax"),
        help="of the logits (sigmoid for one label and for multi-label models, else softmax)",
    )  # fmt: skip
    add(
        "--max-tokens", type=int, default=defaults.max_tokens, metavar="N",
        help=f"tokens of a window; of a longer text the highest scores count ({defaults.max_tokens})",
    )  # fmt: skip
    add = parser.add_argument_group("Perspective").add_argument
    add(
        "--attributes", nargs="+", default=defaults.attributes, metavar="NAME",
        help="requested attributes (TOXICITY)",
    )  # fmt: skip
    add(
        "--requests-per-second", type=float, default=defaults.requests_per_second, metavar="X",
        help=f"({defaults.requests_per_second:g})",
    )  # fmt: skip
    add(
        "--perspective-url", default=defaults.perspective_url, metavar="URL",
        help="address of the service; the key is in $PERSPECTIVE_API_KEY",
    )  # fmt: skip


def run(given: argparse.Namespace) -> ScoreReport:
    """Score the texts. Raises CorruptCheckpoint, UsageError, TargetExists."""
    options = ScorerOptions(
        given.batch_size, given.activation, given.max_tokens, tuple(given.attributes),
        given.requests_per_second, given.perspective_url,
    )  # fmt: skip
    files = find_files(given.input, "--input")
    if any(Path(file).resolve() == given.output.resolve() for file in files):
        raise UsageError(f"--output {given.output}: is an input too; choose another file")
    if given.output.suffix in (GZIP, ZSTANDARD):
        raise UsageError(
            f"--output {given.output}: lines are written uncompressed; choose a name without {given.output.suffix}"
        )
    reader = Reader(given.text_key, given.skip_bad_lines, _warn)
    documents = (document for file in files for document in reader.documents(file))
    lines = ResumableLines(
        given.output, resume=given.resume, overwrite=given.overwrite, block=options.batch_size
    )
    scorer = make_scorer(given.scorer, options)
    with lines:
        return _score(documents, scorer, lines, options.batch_size)


def _score(
    documents: Iterator[Document], scorer: Scorer, lines: ResumableLines, size: int
) -> ScoreReport:
    report = ScoreReport()
    passed: list[Document] = []  # documents of the first block, which may have scores already

    def check(number: int, line: Mapping[str, Any]) -> None:
        if number % size == 0:
            passed.clear()
        document = next(documents, None)
        if document is None or {**document.fields, SCORE: line.get(SCORE)} != line:
            raise UsageError(
                f"{lines.path}:{number + 1}: is not the input's record; resume with the same input"
            )
        passed.append(document)
        report.add(line[SCORE])

    lines.start(None, check)
    report.resumed = lines.complete
    rest = passed[: lines.complete - lines.first]
    scored_before = len(rest)
    for batch in _batches(_chained(rest, documents), size):
        for document, scores in zip(batch, _scores(scorer, batch), strict=True):
            lines.write({**document.fields, SCORE: scores})
            if scored_before:
                scored_before -= 1
            else:
                report.add(scores)
    if not report.texts:
        raise CorruptCheckpoint(f"{lines.path}: the input has no texts")
    return report


def _chained(first: Sequence[Document], rest: Iterable[Document]) -> Iterator[Document]:
    yield from first
    yield from rest


def _batches(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    while batch := list(islice(documents, size)):
        yield batch


def _scores(scorer: Scorer, batch: Sequence[Document]) -> list[dict[str, float] | None]:
    """Return the scores of each text; None for a blank text, and for one that the scorer refuses."""
    written = [document for document in batch if document.text.strip()]
    found = scorer([document.text for document in written]) if written else []
    if len(found) != len(written):
        raise UsageError(
            f"--scorer returned {len(found)} scores for {len(written)} texts; return one for each"
        )
    places = [document.where for document in written]
    scored = iter(map(_as_floats, found, places))
    return [next(scored) if document.text.strip() else None for document in batch]


def _as_floats(scores: Any, where: str) -> dict[str, float] | None:
    """Return the scores as Python's floats. Raises UsageError for anything but a dict of finite numbers, and None."""
    if scores is None:
        return None
    if not isinstance(scores, dict) or not scores:
        raise UsageError(f"{where}: --scorer returned {scores!r:.60} instead of a dict of floats")
    for name, value in scores.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise UsageError(f"{where}: --scorer returned {value!r:.40} as {name}; return a float")
    return {name: float(value) for name, value in scores.items()}


def _warn(message: str) -> None:
    print(f"megatron-lite: warning: {message}: left out", file=sys.stderr)
