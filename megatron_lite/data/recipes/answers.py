"""`megatron_lite data answers`: F1 and exact match of generated answers, as InstructRetro and SQuAD count them.

answers      JSON lines of `generate --output`: {"prompt": …, "text": …}
references   JSON lines of `data questions`: {"prompt": …, "answers": […]}, in the same order

F1 compares the tokens of a text with the first answer's. A text matches exactly if it equals any answer. Both ignore case,
punctuation and articles.
"""

import argparse
import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megaconv.local_paths import local_path
from megaconv.terminal import reason_of

DESCRIPTION = "Measure generated answers by F1 and exact match."
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass
class AnswerReport:
    """Sums over all answers."""

    answers: int = 0
    f1: float = 0.0
    exact: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the means as one JSON object."""
        count = max(self.answers, 1)
        return {
            "answers": self.answers,
            "f1": self.f1 / count,
            "exact_match": self.exact / count,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report's table."""
        for name, value in self.as_json().items():
            yield f"{name:24} {value:14,}" if isinstance(value, int) else f"{name:24} {value:14.4f}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add("--input", type=local_path, required=True, metavar="FILE", help="JSON lines of `generate`")
    add("--references", type=local_path, required=True, metavar="FILE", help="of `data questions`")
    add("--n-gram", type=int, default=1, metavar="N", help="tokens that F1 compares together (1)")
    add("--report", type=local_path, metavar="FILE", help="write the report as JSON too")


def run(given: argparse.Namespace) -> AnswerReport:
    """Measure the answers. Raises CorruptCheckpoint, UsageError."""
    if given.n_gram < 1:
        raise UsageError(f"--n-gram {given.n_gram} must be 1 or more")
    report = AnswerReport()
    lines = zip_longest(_records(given.input), _records(given.references))
    for number, (answered, wanted) in enumerate(lines, 1):
        text, answers = _pair(answered, wanted, f"{given.input}:{number}")
        report.answers += 1
        report.f1 += f1(text, answers[0], given.n_gram)
        report.exact += exact_match(text, answers)
    return report


def _records(path: Path) -> Iterator[Any]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {reason_of(error)}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{path}:{number}: is not JSON: {error}") from error


def _pair(answered: Any, wanted: Any, where: str) -> tuple[str, Sequence[str]]:
    """Return (the text, the answers). Raises CorruptCheckpoint if the files are not of the same questions."""
    if not isinstance(answered, dict) or not isinstance(wanted, dict):
        raise CorruptCheckpoint(f"{where}: the files have different numbers of lines")
    text, answers = answered.get("text"), wanted.get("answers")
    are_texts = isinstance(answers, list) and all(isinstance(one, str) for one in answers)
    if not isinstance(text, str) or not are_texts or not answers:
        raise CorruptCheckpoint(
            f'{where}: expected "text" here, and a list of texts in "answers" of the references'
        )
    if answered.get("prompt") != wanted.get("prompt"):
        raise CorruptCheckpoint(f"{where}: the reference is of another prompt")
    return text, answers


def normalized(text: str) -> str:
    """Return a text as SQuAD compares it: in lower case, without punctuation and articles."""
    plain = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text equals any answer."""
    return normalized(text) in {normalized(answer) for answer in answers}


def f1(text: str, answer: str, n_gram: int = 1) -> float:
    """Return the harmonic mean of precision and recall of a text's tokens. Punctuation separates tokens."""
    ours, theirs = (_n_grams(each, n_gram) for each in (text, answer))
    common = sum((ours & theirs).values())
    if not common:
        return 0.0
    precision, recall = common / sum(ours.values()), common / sum(theirs.values())
    return 2 * precision * recall / (precision + recall)


def _n_grams(text: str, size: int) -> Counter[tuple[str, ...]]:
    tokens = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
    return Counter(tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1))
