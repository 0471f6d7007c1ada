"""Made-up files in the formats of MNLI, QQP and RACE, in the words of fixtures/masked; what is right can be learned."""

import json
import random
from pathlib import Path

from tests.trainer.loop.launches import MASKED

VOCABULARY = MASKED / "vocab.txt"
WORDS = [word for word in VOCABULARY.read_text().splitlines() if word.isalpha()]
LABELS = ("contradiction", "entailment", "neutral")


def sentence(drawn: random.Random, length: int) -> str:
    return " ".join(drawn.choice(WORDS[3:]) for _ in range(length))


def write_mnli(path: Path, count: int, seed: int = 1, columns: int = 12) -> None:
    """The second sentence says its label's word four times."""
    drawn, lines = random.Random(seed), ["\t".join(f"column{number}" for number in range(columns))]
    for number in range(count):
        label, row = drawn.randrange(3), ["-"] * columns
        row[0], row[8], row[9] = str(number), sentence(drawn, 3), " ".join([WORDS[label]] * 4)
        row[-1] = LABELS[label]
        lines.append("\t".join(row))
    path.write_text("\n".join(lines) + "\n")


def write_qqp(path: Path, count: int, seed: int = 1) -> None:
    """Line 3 is broken as some of QQP's are."""
    drawn, lines = random.Random(seed), ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"]
    for number in range(count):
        label = drawn.randrange(2)
        second = f"{WORDS[label]} {sentence(drawn, 3)}"
        lines.append(f"{number}\t1\t2\t{sentence(drawn, 4)}\t{second}\t{label}")
    lines.insert(2, "broken")
    path.write_text("\n".join(lines) + "\n")


def write_race(directory: Path, count: int, seed: int = 1) -> None:
    """The right option begins with a word of its own."""
    directory.mkdir(parents=True)
    drawn = random.Random(seed)
    for number in range(count):
        options = [[sentence(drawn, 2) for _ in range(4)] for _ in range(2)]
        right = [drawn.randrange(4) for _ in options]
        for choices, place in zip(options, right, strict=True):
            choices[place] = f"{WORDS[0]} {choices[place]}"
        questions = [f"{sentence(drawn, 2)} _ {sentence(drawn, 1)}", sentence(drawn, 3)]
        document = {
            "article": sentence(drawn, 30),
            "questions": questions,
            "options": options,
            "answers": ["ABCD"[one] for one in right],
        }
        (directory / f"{number}.txt").write_text(json.dumps(document) + "\n")
