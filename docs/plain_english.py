"""Checks that prose is plain: few inverted sentences and few long ones, in documentation, docstrings and messages.

    python docs/plain_english.py [--show 20] [--area docs]

A sentence is inverted if it begins with a clause or a preposition in place of a subject ("What the file holds is read ...").
It is long if it has more than 30 words. Each area has limits, in per cent of its sentences. The check fails if an area is over
its limit, and also if it has become so much better that its limit should be lowered: limits only go down.
"""

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("formats", "loaders", "savers", "megaconv", "megatron_lite")
LONGEST = 30
SLACK = 0.5
"""Per cent by which an area may be better than its limit."""

INVERTED = re.compile(
    r"(What|Whatever|Whether|Which|Who|Whose|Wherever|How|By how much|Of|Otherwise than|Neither|Nor|Likewise|So (do|does|may|is|are))\b"
)
SENTENCE_END = re.compile(r"(?<=[.:;!?])\s+(?=[A-Z`*])")
SHORTEST = 4
"""Words of a sentence that is counted; what has fewer is a label."""


class Limit(NamedTuple):
    """The most that an area may have, in per cent of its sentences."""

    inverted: float
    long: float


LIMITS = {
    "docs": Limit(inverted=0.2, long=0.5),
    "docstrings": Limit(inverted=0.2, long=1.3),
    "messages": Limit(inverted=0.2, long=1.4),
}


@dataclass
class Found:
    """The sentences of one area."""

    total: int = 0
    inverted: list[str] = field(default_factory=list)
    long: list[str] = field(default_factory=list)

    def add(self, path: Path, sentence: str) -> None:
        """Count one sentence of a file."""
        self.total += 1
        shown = f"{path.relative_to(ROOT)}: {sentence[:160]}"
        if INVERTED.match(sentence) and not sentence.endswith("?"):
            self.inverted.append(shown)
        if len(sentence.split()) > LONGEST:
            self.long.append(shown)

    def share(self, sentences: list[str]) -> float:
        """Per cent of all sentences."""
        return 100 * len(sentences) / max(self.total, 1)


def sentences(paragraph: str) -> Iterator[str]:
    """Sentences of a paragraph; code in backticks counts as one word."""
    plain = re.sub(r"`[^`]*`", "X", " ".join(paragraph.split()))
    for sentence in SENTENCE_END.split(plain):
        if len(sentence.split()) >= SHORTEST:
            yield sentence.strip()


def of_markdown(path: Path) -> Iterator[str]:
    """Paragraphs and list items of a page, without code, tables and headings."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(\||#|    ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*(?:[*+-]|\d+\.)\s+", "\n\n", text, flags=re.MULTILINE)
    yield from re.split(r"\n\s*\n", text)


def of_docstrings(path: Path) -> Iterator[str]:
    """Paragraphs of the docstrings of modules, classes, functions and fields, without indented examples."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                text = re.sub(r"^ {8,}.*$", "", value.value, flags=re.MULTILINE)
                yield from re.split(r"\n\s*\n", text)


def of_messages(path: Path) -> Iterator[str]:
    """Texts of errors, warnings and help: strings that are raised, logged, or passed as `help`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _texts(node.exc.args[:1])
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "warning"
        ):
            yield from _texts(node.args[:1])
        elif isinstance(node, ast.keyword) and node.arg == "help":
            yield from _texts([node.value])


def _texts(arguments: list[ast.expr]) -> Iterator[str]:
    """String arguments; what an f-string fills in counts as one word."""
    for argument in arguments:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value
        elif isinstance(argument, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else "X" for part in argument.values
            ]
            yield "".join(map(str, parts))


def python_files() -> Iterator[Path]:
    """Sources of the installed packages."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def pages() -> Iterator[Path]:
    """Documentation for people, but for the list of changes."""
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    yield from sorted((ROOT / "docs").rglob("*.md"))


AREAS: dict[str, tuple[Callable[[], Iterator[Path]], Callable[[Path], Iterator[str]]]] = {
    "docs": (pages, of_markdown),
    "docstrings": (python_files, of_docstrings),
    "messages": (python_files, of_messages),
}


def measure(area: str) -> Found:
    """All sentences of an area."""
    files, paragraphs_of = AREAS[area]
    found = Found()
    for path in files():
        for paragraph in paragraphs_of(path):
            for sentence in sentences(paragraph):
                found.add(path, sentence)
    return found


def faults(area: str, found: Found) -> Iterator[str]:
    """The faults of an area's shares."""
    for kind, limit in LIMITS[area]._asdict().items():
        share = found.share(getattr(found, kind))
        if share > limit:
            yield f"{area}: {share:.1f}% of the sentences are {kind}, the limit is {limit}%; --area {area} --show 20 lists some"
        elif share < limit - SLACK:
            yield f"{area}: {share:.1f}% of the sentences are {kind}; lower the limit from {limit}% in docs/plain_english.py"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", choices=list(AREAS), help="this area alone")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print this many sentences of each kind"
    )
    options = parser.parse_args()
    wrong: list[str] = []
    for area in [options.area] if options.area else AREAS:
        found = measure(area)
        for sentence in (*found.inverted[: options.show], *found.long[: options.show]):
            print(f"  {sentence}")
        inverted, long = found.share(found.inverted), found.share(found.long)
        print(
            f"{area}: {found.total} sentences, {inverted:.1f}% inverted, {long:.1f}% over {LONGEST} words"
        )
        wrong += faults(area, found)
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
