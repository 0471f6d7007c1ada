"""`megatron_lite data questions`: prompts and answers from questions with passages, as InstructRetro is tuned on them.

[{"question": …, "answers": […], "ctxs": [{"title": …, "text": …}, …]}, …]   ->   {"prompt": …, "completion": …, "answers": […]}

The wording is data: a JSON file with the texts of QuestionForm. Retrieved passages stand in the prompt. If a prompt is too
long, its passages are cut, and never its question.
"""

import argparse
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from formats.whole_file import write_whole
from megaconv.errors import TargetExists, UsageError
from megaconv.local_paths import local_path
from megatron_lite.data.recipes.documents import json_line

DESCRIPTION = (
    "Make prompts and answers of questions with retrieved passages, for InstructRetro's tuning."
)
LETTERS = string.ascii_uppercase


@dataclass(frozen=True)
class QuestionForm:
    """The wording of a prompt. The texts are formats with the fields in braces."""

    system: str = "System: The assistant answers the user's question with the help of the context."
    passage: str = "title: {title}, source: {text}"
    turn: str = "User: {question}\n\nAssistant:"
    choices: str = "{question} Choose one based on the following options: {options}"
    option: str = "({letter}) {text}"
    answer: str = " {answer}"
    between: str = "\n\n"
    """The text between the parts of a prompt."""


_FIELDS = {
    "passage": ("title", "text"), "turn": ("question",), "choices": ("question", "options"),
    "option": ("letter", "text"), "answer": ("answer",),
}  # fmt: skip
"""Text of QuestionForm -> the fields that it may have in braces."""


@dataclass(frozen=True)
class Asked:
    """A question with its answers and passages."""

    question: str
    answers: tuple[str, ...]
    passages: tuple[Mapping[str, str], ...]
    """`title` and `text` of each."""
    options: tuple[str, ...] = ()
    """The choices of a multiple-choice question."""


@dataclass
class QuestionReport:
    """The numbers of questions."""

    questions: int = 0
    cut: int = 0
    """Prompts whose passages were cut."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {"questions": self.questions, "cut": self.cut}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report's table."""
        for name, value in self.as_json().items():
            yield f"{name:24} {value:14,}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add("--input", type=local_path, required=True, metavar="FILE", help="a JSON list of questions")
    add("--output", type=local_path, required=True, metavar="FILE", help="JSON lines for finetune")
    add("--form", type=local_path, metavar="FILE", help="JSON with the wording (InstructRetro's)")
    add("--neighbors", type=int, default=5, metavar="N", help="the most passages of a prompt (5)")
    add("--max-words", type=int, metavar="N", help="cut passages where a prompt has more words")
    add("--overwrite", action="store_true", help="replace an existing --output")
    add("--report", type=local_path, metavar="FILE", help="write the report as JSON too")


def run(given: argparse.Namespace) -> QuestionReport:
    """Write the prompts. Raises CorruptCheckpoint, UsageError, TargetExists."""
    if given.output.exists() and not given.overwrite:
        raise TargetExists(f"{given.output}: exists; pass --overwrite, or choose another")
    form = QuestionForm() if given.form is None else read_form(given.form)
    if given.neighbors < 0:
        raise UsageError(f"--neighbors {given.neighbors} must be 0 or more")
    report, lines = QuestionReport(), list[bytes]()
    for asked in read_questions(given.input):
        prompt, is_cut = prompt_of(asked, form, given.neighbors, given.max_words)
        completion = form.answer.format(answer=asked.answers[0])
        record = {"prompt": prompt, "completion": completion, "answers": list(asked.answers)}
        lines.append(json_line(record, f"{given.input}, question {report.questions + 1}"))
        report.questions += 1
        report.cut += is_cut
    write_whole(given.output, b"".join(lines))
    return report


def read_form(path: Path) -> QuestionForm:
    """Read the wording. Raises UsageError for unknown fields, and for fields that aren't text or have wrong braces."""
    found = _json(path)
    names = {item.name for item in fields(QuestionForm)}
    is_form = isinstance(found, dict) and found.keys() <= names
    if not is_form or not all(isinstance(text, str) for text in found.values()):
        raise UsageError(
            f"{path}: expected an object with texts for some of {', '.join(sorted(names))}"
        )
    form = QuestionForm(**found)
    for name, known in _FIELDS.items():
        try:
            getattr(form, name).format(**dict.fromkeys(known, ""))
        except (LookupError, ValueError, AttributeError) as error:
            braces = ", ".join(f"{{{field}}}" for field in known)
            raise UsageError(
                f"{path}: {name!r} may have {braces}, and other braces doubled, found {getattr(form, name)!r:.60}"
            ) from error
    return form


def read_questions(path: Path) -> Iterator[Asked]:
    """Yield the questions of a file. Raises CorruptCheckpoint with the number of a bad one."""
    found = _json(path)
    if not isinstance(found, list):
        raise CorruptCheckpoint(f"{path}: expected a JSON list of questions")
    for number, record in enumerate(found, 1):
        yield _asked(record, f"{path}, question {number}")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: is not JSON: {error}") from error


def _asked(record: Any, where: str) -> Asked:
    if not isinstance(record, dict) or not isinstance(record.get("question"), str):
        raise CorruptCheckpoint(f'{where}: expected an object with "question"')
    answers = record.get("answers", record.get("answer"))
    answers = [answers] if isinstance(answers, str) else answers
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(one, str) for one in answers)
    ):
        raise CorruptCheckpoint(f'{where}: expected "answers" with a list of texts, or "answer"')
    options = record.get("choices") or [] if record.get("qa_type") == "multi_choice_qa" else []
    if not isinstance(options, list):
        raise CorruptCheckpoint(f'{where}: expected "choices" with a list')
    if len(options) > len(LETTERS):
        raise CorruptCheckpoint(f"{where}: has {len(options)} choices, more than there are letters")
    return Asked(
        record["question"], tuple(answers), tuple(_passages(record, where)), tuple(options)
    )


def _passages(record: Mapping[str, Any], where: str) -> Iterator[Mapping[str, str]]:
    """Yield the passages: `ctxs`, or the text `sub-paragraphs`."""
    if isinstance(record.get("sub-paragraphs"), str):
        yield {"title": "", "text": record["sub-paragraphs"]}
        return
    passages = record.get("ctxs") or []
    for passage in passages if isinstance(passages, list) else [passages]:
        if not isinstance(passage, dict) or not isinstance(passage.get("text"), str):
            raise CorruptCheckpoint(f'{where}: expected "ctxs" of objects with "title" and "text"')
        yield {"title": str(passage.get("title", "")), "text": passage["text"]}


def prompt_of(
    asked: Asked, form: QuestionForm, neighbors: int, max_words: int | None = None
) -> tuple[str, bool]:
    """Return (the prompt, whether its passages were cut)."""
    question = asked.question
    if asked.options:
        options = " ".join(
            form.option.format(letter=letter, text=text)
            for letter, text in zip(LETTERS, asked.options, strict=False)
        )
        question = form.choices.format(question=question, options=options)
    turn = form.turn.format(question=question)
    passages = [form.passage.format(**each) for each in asked.passages[:neighbors]]
    left = None
    if max_words is not None:
        left = max(0, max_words - len(form.system.split()) - len(turn.split()))
    kept, is_cut = _fitting(passages, left)
    return form.between.join(part for part in (form.system, *kept, turn) if part), is_cut


def _fitting(passages: Sequence[str], words: int | None) -> tuple[list[str], bool]:
    """Return (the passages with at most so many words together, whether any was cut)."""
    if words is None:
        return list(passages), False
    kept, left = [], words
    for passage in passages:
        split = passage.split()
        kept.append(passage if len(split) <= left else " ".join(split[:left]))
        left = max(0, left - len(split))
    return [passage for passage in kept if passage], kept != list(passages)
