"""--tokenizer: the output's tokenizer, compared with the input's."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from formats.rank_files import run_of
from formats.small_files import SmallFile
from formats.wording import counted
from megaconv.engine.completeness import GENERATION
from megaconv.engine.sidecars import SIDECAR_DIRECTORY, find_sidecars, is_of_tokenizer
from megaconv.engine.special_tokens import SpecialTokens, new_special_tokens, without_numbers
from megaconv.engine.token_lists import Files, TokenList, kinds_of, pieces_of, texts_of, token_list
from megaconv.errors import CheckpointError, CorruptCheckpoint, UsageError
from megaconv.hub import tokenizer_directory
from megaconv.model.ir import Header

F = TypeVar("F")


@dataclass(frozen=True)
class NewTokenizer:
    """The tokenizer of an output."""

    given: str
    """Its directory or Hub id, as the user names it."""
    copied: Mapping[str, Path]
    """Its files, by name."""
    files: Files
    """The same, to be read."""
    tokens: TokenList
    earlier: Files
    """The files of the input's tokenizer."""
    earlier_tokens: TokenList | None
    """The tokens of the input's tokenizer; None if it can't be compared."""
    special: SpecialTokens
    remarks: Sequence[str]
    """Lines for people: in what it differs from the input's, or that it can't be compared."""
    place: str
    """The input, for messages."""

    @classmethod
    def of(cls, given: str, header: Header, place: str) -> "NewTokenizer":
        """The tokenizer in a directory or on the Hub.

        Raises UsageError if it isn't one, or gives tokens of the model other numbers.
        """
        copied = _files_of(given)
        files = {name: SmallFile.of(name, path) for name, path in copied.items()}
        earlier = tokenizer_files(header)
        kinds = kinds_of(files)
        earlier_tokens = _earlier_tokens(earlier, kinds)
        alike = [kind for kind in kinds if kind in earlier]
        tokens = token_list(files, (alike or kinds)[0])
        unnumbered = without_numbers(files, tokens)
        if unnumbered:
            raise UsageError(
                f"--tokenizer {given}: its settings name {unnumbered[0]!r:.40}, which is no token with a number; load the tokenizer "
                "with transformers and save it (save_pretrained), which numbers such tokens"
            )
        if earlier_tokens is None:
            remarks = [
                f"--tokenizer {given}: can't be compared with the tokenizer of {place}, which has no readable file of its kind; the "
                "model's tokens must keep their numbers"
            ]
            earlier = {}
        else:
            remarks = _compared(tokens, earlier_tokens, given, place)
        special = new_special_tokens(files, tokens, earlier, earlier_tokens, header.config)
        if generation_file(header) is None:
            special = replace(special, in_config=True)
        return cls(given, copied, files, tokens, earlier, earlier_tokens, special, remarks, place)

    def in_present_rows(self, vocab: int) -> list[int]:
        """The new tokens for which a model has rows already. vocab: rows of the model."""
        if self.earlier_tokens is None:
            return []
        before = {*self.earlier_tokens.usual, *self.earlier_tokens.added}
        now = {*self.tokens.usual, *self.tokens.added}
        return sorted(number for number in now - before if number < vocab)

    def files_beside(self, header: Header) -> tuple[dict[str, Path], dict[str, bytes]]:
        """The small files of the output: those that are copied, and those that are made. header: the input's."""
        copied = {**_without_tokenizer(header.files), **self.copied}
        made = _without_tokenizer(header.made)
        changed = self._generation_config(header)
        if changed is not None:
            copied.pop(GENERATION, None)
            made[GENERATION] = changed
        return copied, made

    def _generation_config(self, header: Header) -> bytes | None:
        """The generation_config.json with the tokenizer's special tokens; None if there is none, or it has them."""
        file = generation_file(header)
        return None if file is None else self.special.generation_config(file)

    def notices(self, header: Header) -> Iterator[str]:
        """Yield lines for people: remarks, and each token that begins, ends or pads a text and didn't do so before.

        header: the input's.
        """
        config = header.config
        yield from self.remarks
        texts = {**self.tokens.usual, **self.tokens.added}
        made = self.special.of(config)
        if made == config and self._generation_config(header) is not None:
            names = ", ".join(self.special.numbers)
            yield f"{GENERATION}: has other numbers now ({names}), as in {self.given}"
        for name, number in self.special.numbers.items():
            before = getattr(config, name)
            if getattr(made, name) != before:
                yield f"{name} is {number} now ({texts[number]!r:.40}), as in {self.given}; it was {before}"

    def pieces(self, numbers: Collection[int], vocab: int) -> dict[int, Sequence[int]]:
        """New token -> the tokens that its text had before. Tokens whose text had none of the model's are left out.

        vocab: rows of the model.
        """
        texts = texts_of(self.files, self.tokens, numbers, self.given)
        found = pieces_of(self.earlier, texts, self.place)
        known = {
            number: [piece for piece in pieces if piece < vocab] for number, pieces in found.items()
        }
        return {number: pieces for number, pieces in known.items() if pieces}


def _files_of(given: str) -> dict[str, Path]:
    """The files of a tokenizer. Raises UsageError if there is none, CheckpointError if the Hub can't be reached."""
    try:
        directory = tokenizer_directory(given)
    except CheckpointError as error:
        raise type(error)(f"--tokenizer {error}", code=error.code) from error
    if directory.is_file():
        raise UsageError(
            f"--tokenizer {given}: is a file; give the directory of the tokenizer, {directory.parent}"
        )
    for place in (directory, run_of(directory) / SIDECAR_DIRECTORY):
        found = {name: path for name, path in find_sidecars(place).items() if is_of_tokenizer(name)}
        if kinds_of(found):
            return found
    raise UsageError(
        f"--tokenizer {given}: has no tokenizer.json, tokenizer.model, vocab.json or vocab.txt; expected a tokenizer that lists "
        "its tokens"
    )


def tokenizer_files(header: Header) -> dict[str, SmallFile]:
    """The files of a model's tokenizer by name."""
    return {name: file for name, file in _small_files(header).items() if is_of_tokenizer(name)}


def generation_file(header: Header) -> SmallFile | None:
    """A model's generation_config.json; None if it has none."""
    return _small_files(header).get(GENERATION)


def _small_files(header: Header) -> dict[str, SmallFile]:
    beside: dict[str, Path | bytes] = {**header.files, **header.made}
    return {name: SmallFile.of(name, given) for name, given in beside.items()}


def _without_tokenizer(files: Mapping[str, F]) -> dict[str, F]:
    """The small files of a model without those of its tokenizer."""
    return {name: file for name, file in files.items() if not is_of_tokenizer(name)}


def _earlier_tokens(earlier: Files, kinds: Sequence[str]) -> TokenList | None:
    """The tokens of the input's tokenizer, of the first kind of file that both have; None if there is none, or it is damaged."""
    for kind in kinds:
        if kind in earlier:
            try:
                found = token_list(earlier, kind)
                without_numbers(earlier, found)  # reads its settings too
            except CorruptCheckpoint:
                return None
            return found
    return None


def _compared(tokens: TokenList, earlier: TokenList, given: str, place: str) -> list[str]:
    """Lines for people: added tokens with another text. Raises UsageError unless each usual token keeps its number."""
    now = {**tokens.usual, **tokens.added}
    moved = [number for number, text in earlier.usual.items() if now.get(number) != text]
    if moved:
        first = min(moved)
        found = f"is {now[first]!r:.40}" if first in now else "isn't there"
        raise UsageError(
            f"--tokenizer {given}: token {first} {found}, and is {earlier.usual[first]!r:.40} in the tokenizer of {place}; the "
            "model's tokens must keep their numbers"
        )
    renamed = sorted(
        number for number, text in earlier.added.items() if now.get(number, text) != text
    )
    if not renamed:
        return []
    first, have = renamed[0], "has" if len(renamed) == 1 else "have"
    return [
        f"--tokenizer {given}: {counted(len(renamed), 'added token')} {have} another text than in the tokenizer of {place}: token "
        f"{first} is {now[first]!r:.40}, was {earlier.added[first]!r:.40}"
    ]
