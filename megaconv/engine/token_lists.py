"""The tokens of a tokenizer by their numbers, from its files alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.ceilings import SIDECAR_BYTES
from formats.regular_files import parse_json, read_small
from megaconv.errors import CorruptCheckpoint, UnsupportedInput
from megaconv.extras import require_tokenizers
from megaconv.gguf.sentencepiece import read_pieces
from megaconv.model.ceilings import VOCABULARY
from megaconv.model.check import well_formed

KINDS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files that list the tokens of a vocabulary. The first one that is there counts."""
_SETTINGS, _ADDED = "tokenizer_config.json", "added_tokens.json"


@dataclass(frozen=True)
class TokenList:
    """The tokens of a tokenizer."""

    usual: Mapping[int, str]
    """Number -> text of the tokens that the vocabulary was made with."""
    added: Mapping[int, str]
    """The same of the tokens that were added to it, such as those of a chat."""

    @property
    def count(self) -> int:
        """Rows that an embedding needs: one more than the largest number."""
        return max((*self.usual, *self.added)) + 1


def kinds_of(files: Mapping[str, Path | bytes]) -> list[str]:
    """The files that list the tokens, of those beside a model."""
    return [kind for kind in KINDS if kind in files]


def token_list(files: Mapping[str, Path | bytes], kind: str) -> TokenList:
    """The tokens of a tokenizer. files: its files by name. Raises CorruptCheckpoint, UnsupportedInput."""
    where = _where(files, kind)
    raw = _json(files, kind) if kind.endswith(".json") else None
    with well_formed(where):
        usual = dict(_usual(_content(files[kind]), kind) if raw is None else _listed(raw, kind))
    added = _added(files, raw if kind == "tokenizer.json" else {}, where)
    for number in (*usual, *added):
        if type(number) is not int or not 0 <= number < VOCABULARY:
            raise CorruptCheckpoint(f"{where}: has a token with the number {number!r:.40}")
    if not usual:
        raise CorruptCheckpoint(f"{where}: has no token")
    only_usual = {number: text for number, text in usual.items() if number not in added}
    return TokenList(only_usual, added)


def _where(files: Mapping[str, Path | bytes], name: str) -> str:
    return str(files[name]) if isinstance(files[name], Path) else name


def _content(file: Path | bytes) -> bytes:
    return read_small(file, SIDECAR_BYTES) if isinstance(file, Path) else file


def _json(files: Mapping[str, Path | bytes], name: str) -> Any:
    try:
        return parse_json(_content(files[name]))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{_where(files, name)}: is not a readable JSON file ({error})"
        ) from error


def _usual(content: bytes, kind: str) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the tokens of a file that isn't JSON."""
    if kind.endswith(".model"):
        yield from enumerate(piece.text for piece in read_pieces(content))
    else:
        text = content.decode(errors="replace").removesuffix("\n")
        yield from enumerate(line.removesuffix("\r") for line in text.split("\n"))


def _listed(raw: Any, kind: str) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the tokens of a JSON file."""
    listed = raw["model"]["vocab"] if kind == "tokenizer.json" else raw
    if isinstance(listed, list):  # Unigram: [text, score] of each token
        yield from enumerate(str(token[0]) for token in listed)
    else:
        yield from ((number, str(text)) for text, number in listed.items())


def _added(files: Mapping[str, Path | bytes], tokenizer: Any, where: str) -> dict[int, str]:
    """Number -> text of the added tokens. tokenizer: the content of tokenizer.json, or {}. where: its path, for messages."""
    found: dict[int, str] = {}
    if _ADDED in files:
        with well_formed(_where(files, _ADDED)):
            found |= {number: str(text) for text, number in _json(files, _ADDED).items()}
    if _SETTINGS in files:
        with well_formed(_where(files, _SETTINGS)):
            listed = _json(files, _SETTINGS).get("added_tokens_decoder") or {}
            found |= {int(number): str(token["content"]) for number, token in listed.items()}
    with well_formed(where):
        listed = tokenizer.get("added_tokens") or ()
        return found | {token["id"]: str(token["content"]) for token in listed}


def texts_of(
    files: Mapping[str, Path | bytes], tokens: TokenList, numbers: range, where: str
) -> dict[int, str]:
    """The texts that tokens of a tokenizer stand for. files: its files. where: its place, for messages.

    Raises UnsupportedInput for usual tokens of a tokenizer without a tokenizer.json.
    """
    texts = {number: tokens.added[number] for number in numbers if number in tokens.added}
    usual = [number for number in numbers if number in tokens.usual]
    if usual:
        tokenizer = _opened(files, where)
        texts |= {number: tokenizer.decode([number]) for number in usual}
    return texts


def pieces_of(
    files: Mapping[str, Path | bytes], texts: Mapping[int, str], where: str
) -> dict[int, list[int]]:
    """The tokens of each text, without those at its begin and end. files: those of the tokenizer.

    Raises UnsupportedInput for a tokenizer without a tokenizer.json.
    """
    tokenizer = _opened(files, where)
    return {
        number: tokenizer.encode(text, add_special_tokens=False).ids
        for number, text in texts.items()
    }


def _opened(files: Mapping[str, Path | bytes], where: str) -> Any:
    """A tokenizer of the tokenizers library. Raises UnsupportedInput without a tokenizer.json."""
    tokenizers = require_tokenizers("--new-rows pieces")
    if KINDS[0] not in files:
        raise UnsupportedInput(
            f"--new-rows pieces: {where} has no tokenizer.json, which splits the text of new tokens; choose --new-rows mean"
        )
    try:
        return tokenizers.Tokenizer.from_str(_content(files[KINDS[0]]).decode())
    except Exception as error:  # the library raises no narrower one
        raise CorruptCheckpoint(f"{where}: its tokenizer.json is not readable ({error})") from error
