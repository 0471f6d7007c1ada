"""The passages that were found for each question, whether they contain an answer, and the accuracies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from megaconv.json_text import json_text
from megatron_lite.retrieval.answers import Matches
from megatron_lite.retrieval.embedder import Passage
from megatron_lite.retrieval.questions import Question
from megatron_lite.retrieval.vector_search import Found


@dataclass
class Hit:
    """One passage of one question."""

    id: int
    score: float
    title: str = ""
    has_answer: bool = False


@dataclass
class Hits:
    """The passages of all questions, best first."""

    questions: Sequence[Question]
    rows: list[list[Hit]]

    def judge(self, passages: Iterable[Passage], contains: Matches) -> None:
        """Read all passages once; set the title of each hit, and whether its text has an answer.

        Titles are not searched. Raises CorruptCheckpoint if a hit is not among the passages.
        """
        places: dict[int, list[tuple[int, Hit]]] = {}
        for number, row in enumerate(self.rows):
            for hit in row:
                places.setdefault(hit.id, []).append((number, hit))
        for passage in passages:
            for number, hit in places.pop(passage.id, ()):
                hit.title = passage.title
                hit.has_answer = contains(self.questions[number].answers, passage.text)
        if places:
            raise CorruptCheckpoint(
                f"passage {min(places)} of the index is not in the evidence; give the evidence that was embedded"
            )

    def accuracy(self, count: int) -> float:
        """Return the fraction of the questions with an answer in the first `count` passages."""
        found = sum(any(hit.has_answer for hit in row[:count]) for row in self.rows)
        return found / len(self.rows)

    def write(self, path: Path) -> None:
        """Write a JSON object for each question. The file appears complete."""
        unfinished = path.with_name(f".{path.name}.unfinished")
        with unfinished.open("w", encoding="utf-8") as file:
            for question, row in zip(self.questions, self.rows, strict=True):
                content: dict[str, Any] = {
                    "question": question.text,
                    "answers": list(question.answers),
                    "hits": [vars(hit) for hit in row],
                }
                file.write(json_text(content, ensure_ascii=False) + "\n")
        unfinished.replace(path)


def hits_of(questions: Sequence[Question], found: Found) -> Hits:
    """Return the hits before they are judged."""
    scores, ids = found
    rows = [
        [Hit(number, score) for number, score in zip(*row, strict=True) if number >= 0]
        for row in zip(ids.tolist(), scores.tolist(), strict=True)
    ]
    return Hits(questions, rows)
