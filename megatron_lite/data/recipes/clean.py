"""`megatron_lite data clean`: cleans texts of web pages or of Wikipedia, as the corpora of GPT-2 and BERT were cleaned.

| recipe | steps |
|---|---|
| openwebtext | repair of broken characters (ftfy); other languages are removed, then texts of few tokens |
| wikipedia | texts without content are removed; repair of broken characters; punctuation to ASCII |
| html | the main text of a page (trafilatura), then openwebtext |
"""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.local_paths import local_word
from megatron_lite.data.packages import package
from megatron_lite.data.recipes.flags import add_common, recipe_places
from megatron_lite.data.recipes.pipeline import (
    PipelineReport,
    Run,
    Stage,
    add_run_flags,
    first_and_last,
    is_marked,
    mark,
    perform,
    require_datatrove,
)
from megatron_lite.data.tokenizer import (
    TYPES,
    Tokenizer,
    TokenizerOptions,
    build_tokenizer,
    type_of_files,
)

DESCRIPTION = "Clean the texts of web pages or of Wikipedia."
EMPTY, LANGUAGE, SHORT, NO_TEXT = "empty", "language", "short", "no-main-text"
COUNTED_CHARACTERS = 1024
"""Texts with at least as many characters aren't tokenized: Megatron takes them for long enough."""
_PUNCTUATION = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "…": "..."})
_SPACES = re.compile(r"  +|\b\n+ |\b\n+")
_NEEDS_REPAIR = re.compile(r"[^\x20-\x7e\t\n]|&")


@dataclass(frozen=True)
class Change:
    """Changes the text of each document."""

    change: Callable[[str], str]

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        for document in data:
            if not is_marked(document):
                document.text = self.change(document.text)
            yield document


@dataclass(frozen=True)
class Require:
    """Marks the documents that a test refuses."""

    accepts: Callable[[Any], bool]
    reason: str

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        for document in data:
            if not is_marked(document) and not self.accepts(document):
                mark(document, self.reason)
            yield document


class Repair:
    """Repairs broken characters with the settings of datatrove's FTFYFormatter."""

    @cached_property
    def _formatter(self) -> Any:
        return package("datatrove.pipeline.formatters", "data clean").FTFYFormatter()

    def __call__(self, text: str) -> str:
        # ftfy takes nearly all of the time, and changes no text of plain ASCII without an entity.
        return str(self._formatter.format(text)) if _NEEDS_REPAIR.search(text) else text


@dataclass
class MainText:
    """Takes the main text out of a page of HTML."""

    def __call__(self, text: str) -> str:
        extracted = package("trafilatura", "data clean --recipe html", "data-recipes").extract(text)
        return extracted or ""


@dataclass(frozen=True)
class InLanguage:
    """Accepts texts that are in a language with some probability, by lingua."""

    language: str
    probability: float

    @cached_property
    def _detector(self) -> tuple[Any, Any]:
        lingua = package("lingua", "data clean --language", "data-recipes")
        code = getattr(lingua.IsoCode639_1, self.language.upper(), None)
        if code is None:
            raise UsageError(f"--language {self.language}: lingua doesn't know this code")
        built = lingua.LanguageDetectorBuilder.from_all_languages().build()
        return built, lingua.Language.from_iso_code_639_1(code)

    def __call__(self, document: Any) -> bool:
        detector, language = self._detector
        confidence: float = detector.compute_language_confidence(document.text, language)
        return confidence >= self.probability


@dataclass(frozen=True)
class LongEnough:
    """Accepts texts with a number of tokens."""

    tokens: int
    options: TokenizerOptions

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.options)

    def __call__(self, document: Any) -> bool:
        text = document.text
        return len(text) >= COUNTED_CHARACTERS or len(self._tokenizer.tokenize(text)) >= self.tokens


@dataclass(frozen=True)
class HasContent:
    """Accepts texts that are neither blank nor just the title."""

    def __call__(self, document: Any) -> bool:
        title = document.metadata["fields"].get("title")
        return document.text.strip() not in ("", title.strip() if isinstance(title, str) else "")


def to_ascii_punctuation(text: str) -> str:
    """Return the text with quotation marks, dashes and ellipses of ASCII."""
    return text.translate(_PUNCTUATION)


def with_single_spaces(text: str) -> str:
    """Return the text with one space in place of each run of spaces or of newlines: Megatron's general cleaning."""
    return _SPACES.sub(" ", text)


@dataclass(frozen=True)
class Cleaning:
    """The options of a recipe; the fields are flags of the command."""

    recipe: str
    language: str
    language_probability: float
    min_tokens: int
    general_cleaning: bool
    tokenizer: TokenizerOptions | None = field(default=None)

    def steps(self) -> Iterator[Change | Require]:
        """Yield the steps in order."""
        if self.recipe == "html":
            yield Change(MainText())
            yield Require(HasContent(), NO_TEXT)
        yield Require(HasContent(), EMPTY)
        yield Change(Repair())
        if self.recipe == "wikipedia":
            yield Change(to_ascii_punctuation)
        elif self.language != "any":
            yield Require(InLanguage(self.language, self.language_probability), LANGUAGE)
        if self.tokenizer is not None and self.min_tokens:
            yield Require(LongEnough(self.min_tokens, self.tokenizer), SHORT)
        if self.general_cleaning:
            yield Change(with_single_spaces)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_common(parser)
    add_run_flags(parser)
    add = parser.add_argument_group("cleaning").add_argument
    add(
        "--recipe", choices=("openwebtext", "wikipedia", "html"), required=True,
        help="steps, see docs/data.md",
    )  # fmt: skip
    add(
        "--language", default="en", metavar="CODE",
        help="language of web pages, by its code; any: all languages (en)",
    )  # fmt: skip
    add(
        "--language-probability", type=float, default=0.65, metavar="X",
        help="a text is in the language with at least this probability (0.65)",
    )  # fmt: skip
    add(
        "--min-tokens", type=int, metavar="N",
        help="tokens of the shortest text; 0: any (128; wikipedia: 0)",
    )  # fmt: skip
    add("--general-cleaning", action="store_true", help="one space for runs of spaces or newlines")
    add = parser.add_argument_group("tokenizer that counts").add_argument
    add("--tokenizer-type", choices=TYPES, metavar="TYPE", help="kind of tokenizer")
    add("--tokenizer-model", type=local_word, metavar="PATH", help="its file or directory")
    add("--vocab-file", type=local_word, metavar="PATH", help="vocabulary of a GPT-2 tokenizer")
    add("--merge-file", type=local_word, metavar="PATH", help="merges of a GPT-2 tokenizer")


def run(given: argparse.Namespace) -> PipelineReport:
    """Clean the corpus. Raises CorruptCheckpoint, UsageError, TargetExists."""
    require_datatrove()
    cleaning = _cleaning(given)
    if given.workers < 1:
        raise UsageError(f"--workers {given.workers} must be 1 or more")
    task = Run(recipe_places(given), given.workers, given.resume, {"cleaning": cleaning})
    read, write = first_and_last(task)
    steps = [read, *cleaning.steps(), write]
    return perform(task, lambda place: [Stage(steps, len(task.places.files))])


def _cleaning(given: argparse.Namespace) -> Cleaning:
    """Return the options, checked before any text is read. Raises UsageError, CorruptCheckpoint."""
    unasked = 0 if given.recipe == "wikipedia" else 128
    minimum = unasked if given.min_tokens is None else given.min_tokens
    options = None
    if minimum:
        found = type_of_files(given.tokenizer_model, given.vocab_file, given.merge_file)
        kind = given.tokenizer_type or found
        if kind is None:
            raise UsageError(
                f"--min-tokens {minimum} needs --tokenizer-model, the directory of a tokenizer; --min-tokens 0 keeps short texts"
            )
        vocabulary, merges = (
            Path(path) if path else None for path in (given.vocab_file, given.merge_file)
        )
        options = TokenizerOptions(kind, given.tokenizer_model, vocabulary, merges)
        build_tokenizer(options)
    cleaning = Cleaning(
        given.recipe,
        given.language,
        given.language_probability,
        minimum,
        given.general_cleaning,
        options,
    )
    if given.recipe != "wikipedia" and given.language != "any":
        package(
            "lingua",
            f"--language {given.language} (--language any keeps all languages)",
            "data-recipes",
        )
    return cleaning
