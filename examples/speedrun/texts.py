"""What the speedrun learns from: documentation as text, its table of flags as conversations, right and wrong answers as pairs.

python texts.py PROJECT DIRECTORY      writes text.jsonl, held-out.wiki.txt, chats.jsonl, pairs.jsonl
"""

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

HELD_OUT = ("reliability.md", "troubleshooting.md")
ROW = re.compile(r"^\| `--([\w-]+)`[^|]*\| (.+?) \| ")


def main(project: Path, target: Path) -> None:
    pages = [project / "README.md", *sorted((project / "docs").glob("*.md"))]
    learned = [page for page in pages if page.name not in HELD_OUT]
    sections = [
        section for page in learned for section in page.read_text(encoding="utf-8").split("\n## ")
    ]
    write(target / "text.jsonl", [{"text": section} for section in sections])
    held_out = "\n".join(
        page.read_text(encoding="utf-8") for page in pages if page.name in HELD_OUT
    )
    (target / "held-out.wiki.txt").write_text(held_out, encoding="utf-8")
    flags = list(flags_of(project / "docs" / "trainer-flags.md"))
    write(
        target / "chats.jsonl",
        [{"messages": [*asked(name), assistant(text)]} for name, text in flags],
    )
    wrong = random.Random(1).sample(flags, len(flags))
    pairs = [
        {"prompt": asked(name), "chosen": [assistant(text)], "rejected": [assistant(other)]}
        for (name, text), (_, other) in zip(flags, wrong, strict=True)
        if text != other
    ]
    write(target / "pairs.jsonl", pairs)
    print(
        f"{len(sections)} texts of {len(learned)} pages, {len(flags)} conversations, {len(pairs)} pairs of answers"
    )


def flags_of(page: Path) -> Iterator[tuple[str, str]]:
    """(name, what it does) of every row of the table."""
    for line in page.read_text(encoding="utf-8").splitlines():
        found = ROW.match(line)
        if found:
            yield found[1], found[2]


def asked(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What does --{name} do?"}]


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
