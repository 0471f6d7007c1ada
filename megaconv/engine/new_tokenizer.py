"""--tokenizer: the output's tokenizer, compared with the input's."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from formats.wording import counted
from megaconv.engine.completeness import GENERATION
from megaconv.engine.sidecars import find_sidecars, is_of_tokenizer
from megaconv.engine.special_tokens import Ids, generation_config, new_special_tokens
from megaconv.engine.token_lists import TokenList, kinds_of, pieces_of, texts_of, token_list
from megaconv.errors import UsageError
from megaconv.hub import nothing_at
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header

F = TypeVar("F")

_log = logging.getLogger("megaconv")


@dataclass(frozen=True)
class NewTokenizer:
    """The tokenizer of an output."""

    directory: Path
    files: Mapping[str, Path]
    tokens: TokenList
    earlier: Mapping[str, Path | bytes]
    """The files of the input's tokenizer."""
    special: Ids
    """The tokens that begin, end or pad a text and didn't do so before."""
    place: str
    """The input, for messages."""

    @classmethod
    def of(cls, directory: Path, header: Header, place: str) -> "NewTokenizer":
        """The tokenizer in a directory. Raises UsageError if it isn't one, or gives tokens of the model other numbers."""
        if directory.is_file():
            raise UsageError(
                f"--tokenizer {directory}: is a file; give the directory of the tokenizer, {directory.parent}"
            )
        if not directory.is_dir():
            raise UsageError(f"--tokenizer {nothing_at(directory)}", code="no-such-input")
        files = {
            name: path for name, path in find_sidecars(directory).items() if is_of_tokenizer(name)
        }
        earlier = tokenizer_files(header)
        kinds = kinds_of(files)
        if not kinds:
            raise UsageError(
                f"--tokenizer {directory}: has no tokenizer.json, tokenizer.model, vocab.json or vocab.txt; expected the directory of a "
                "tokenizer that lists its tokens"
            )
        alike = [kind for kind in kinds if kind in earlier]
        tokens = token_list(files, (alike or kinds)[0])
        if alike:
            _require_same_numbers(tokens, token_list(earlier, alike[0]), directory, place)
        else:
            _log.warning(
                "--tokenizer %s: can't be compared with the tokenizer of %s, which has no file of its kind; the model's tokens must keep "
                "their numbers",
                directory,
                place,
            )
        special = new_special_tokens(files, tokens, earlier, header.config)
        return cls(directory, files, tokens, earlier, special, place)

    def files_beside(self, header: Header) -> tuple[dict[str, Path], dict[str, bytes]]:
        """The small files of the output: those that are copied, and those that are made. header: the input's."""
        copied = {**_without_tokenizer(header.files), **self.files}
        made = _without_tokenizer(header.made)
        file = made.get(GENERATION, copied.get(GENERATION))
        if self.special and file is not None:
            copied.pop(GENERATION, None)
            made[GENERATION] = generation_config(file, self.special)
        return copied, made

    def notices(self, config: ModelConfig) -> Iterator[str]:
        """Yield a line for people for each token that begins, ends or pads a text and didn't do so before.

        config: the input's.
        """
        texts = {**self.tokens.usual, **self.tokens.added}
        for name, number in self.special.items():
            yield f"{name} is {number} now ({texts[number]!r:.40}), as in {self.directory}; it was {getattr(config, name)}"

    def pieces(self, numbers: range) -> dict[int, Sequence[int]]:
        """New token -> the tokens that its text had before. Tokens whose text had none of the model's are left out."""
        texts = texts_of(self.files, self.tokens, numbers, str(self.directory))
        found = pieces_of(self.earlier, texts, self.place)
        known = {
            number: [piece for piece in pieces if piece < numbers.start]
            for number, pieces in found.items()
        }
        return {number: pieces for number, pieces in known.items() if pieces}


def tokenizer_files(header: Header) -> dict[str, Path | bytes]:
    """The files of a model's tokenizer by name."""
    beside: dict[str, Path | bytes] = {**header.files, **header.made}
    return {name: file for name, file in beside.items() if is_of_tokenizer(name)}


def _without_tokenizer(files: Mapping[str, F]) -> dict[str, F]:
    """The small files of a model without those of its tokenizer."""
    return {name: file for name, file in files.items() if not is_of_tokenizer(name)}


def _require_same_numbers(
    tokens: TokenList, earlier: TokenList, directory: Path, place: str
) -> None:
    """Raise UsageError unless each usual token keeps its number. A notice counts added tokens with another text."""
    now = {**tokens.usual, **tokens.added}
    moved = [number for number, text in earlier.usual.items() if now.get(number) != text]
    if moved:
        first = min(moved)
        found = f"is {now[first]!r:.40}" if first in now else "isn't there"
        raise UsageError(
            f"--tokenizer {directory}: token {first} {found}, and is {earlier.usual[first]!r:.40} in the tokenizer of {place}; the "
            "model's tokens must keep their numbers"
        )
    renamed = sorted(
        number for number, text in earlier.added.items() if now.get(number, text) != text
    )
    if renamed:
        first = renamed[0]
        _log.warning(
            "--tokenizer %s: %s %s another text than in the tokenizer of %s: token %d is %r, was %r",
            directory,
            counted(len(renamed), "added token"),
            "has" if len(renamed) == 1 else "have",
            place,
            first,
            now[first],
            earlier.added[first],
        )
