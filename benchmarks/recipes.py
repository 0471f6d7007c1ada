"""Measures the recipes that prepare a corpus: their speed, and the near-duplicates that `dedup` finds.

    python -m benchmarks.recipes [--documents 4000] [--workers 2]

Needs the extra data-recipes. The corpus is made up: documents of 500 words, of which 120 have a copy for each share of
changed words. A line gives MB of text per second of a recipe, and per second of processor time, its start included, or the
copies that were removed. Processor time hardly depends on other programs of the machine. It is complete with --workers 1
only, because datatrove's workers are not children of this process.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.data.recipes.command import main as recipe

SHARES = (0.0, 0.01, 0.03, 0.1)
COPIES = 120
WORDS = 500


def corpus(directory: Path, documents: int, files: int) -> list[Path]:
    """Write the files of the corpus. The id of a copy is `copy SHARE NUMBER`."""
    drawn = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(drawn.choices(letters, k=drawn.randrange(2, 10))) for _ in range(20000)]
    texts = [drawn.choices(vocabulary, k=WORDS) for _ in range(documents)]
    rows = [
        {"id": f"original {number}", "text": " ".join(text)} for number, text in enumerate(texts)
    ]
    place = iter(drawn.sample(range(documents), COPIES * len(SHARES)))
    for share in SHARES:
        for _ in range(COPIES):
            number = next(place)
            words = list(texts[number])
            for changed in drawn.sample(range(WORDS), int(share * WORDS)):
                words[changed] = drawn.choice(vocabulary)
            rows.append({"id": f"copy {share} {number}", "text": " ".join(words) + " caf\u00e9"})
    paths = [directory / f"{number}.jsonl" for number in range(files)]
    size = -(-len(rows) // files)  # copies come last, because the first document of a group stays
    for number, path in enumerate(paths):
        lines = [json.dumps(row) for row in rows[number * size : (number + 1) * size]]
        path.write_text("".join(f"{line}\n" for line in lines))
    return paths


def seconds(words: Sequence[object]) -> tuple[float, float]:
    """(the time of a recipe, its processor time). Ends the program if it fails."""
    before, processor_before = time.perf_counter(), processor_seconds()
    status = recipe([str(word) for word in words])
    if status:
        sys.exit(status)
    return time.perf_counter() - before, processor_seconds() - processor_before


def processor_seconds() -> float:
    """The processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        paths = corpus(directory, given.documents, files=2 * given.workers)
        megabytes = sum(path.stat().st_size for path in paths) / 1e6
        task = directory / "task.jsonl"
        task.write_text(json.dumps({"text": " ".join(["words"] * 20)}) + "\n")
        common = ("--input", *paths)
        runs = {
            "clean": ("--recipe", "openwebtext", "--language", "any", "--min-tokens", 0),
            "dedup": ("--threshold", 0.8),
            "decontaminate": ("--against", task),
        }
        for name, words in runs.items():
            workers = () if name == "decontaminate" else ("--workers", given.workers)
            output = directory / name
            took, processor = seconds((name, *common, "--output", output, *words, *workers))
            print(
                f"{name:14}{megabytes / took:8.2f} MB/s, {megabytes / processor:.2f} MB per second of a "
                f"processor, of {megabytes:.1f} MB"
            )
        report_copies(directory / "dedup-removed")


def report_copies(removed: Path) -> None:
    """Print the copies that were removed, for each share of changed words, and the other documents."""
    ids = [json.loads(line)["id"] for path in removed.glob("*.jsonl") for line in path.open()]
    for share in SHARES:
        count = sum(each.startswith(f"copy {share} ") for each in ids)
        print(f"changed words {share:4.0%}: {count} of {COPIES} copies removed")
    print(f"other documents: {sum(each.startswith('original') for each in ids)} removed")


if __name__ == "__main__":
    main()
