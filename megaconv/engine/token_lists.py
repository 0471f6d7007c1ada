"""The tokens of a tokenizer by their numbers, from its files alone."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from formats.small_files import SmallFile
from megaconv.errors import CorruptCheckpoint, UnsupportedInput
from megaconv.extras import require_tokenizers
from megaconv.gguf.sentencepiece import read_pieces
from megaconv.model.ceilings import VOCABULARY
from megaconv.model.check import well_formed

_TOKENIZER = "tokenizer.json"
KINDS = (_TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files that list the tokens of a vocabulary."""
_SETTINGS, _ADDED = "tokenizer_config.json", "added_tokens.json"
_RANK = re.compile(rb"([A-Za-z0-9+/]+=*) (\d{1,9})")
"""A line of a tokenizer.model with tiktoken's ranks: a token's bytes in base64 and its number."""
_FREE_NUMBERS = 1000
"""Numbers that a tokenizer may leave out, in addition to as many as it has tokens."""

Files = Mapping[str, SmallFile]
"""Files of a tokenizer by name."""


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


def kinds_of(files: Collection[str]) -> list[str]:
    """The files that list the tokens, of those beside a model."""
    return [kind for kind in KINDS if kind in files]


def token_list(files: Files, kind: str) -> TokenList:
    """The tokens of a tokenizer, as one of its files lists them, with those that a tokenizer.json has in addition.

    Raises CorruptCheckpoint.
    """
    where = files[kind].where
    tokenizer = files[_TOKENIZER].json() if _TOKENIZER in files else {}
    with well_formed(where):
        usual = _usual(files, kind, tokenizer)
        if not usual:
            raise CorruptCheckpoint(f"{where}: has no token")
    added = _added(files, tokenizer)
    if tokenizer and kind != _TOKENIZER:
        with well_formed(files[_TOKENIZER].where):
            usual = _numbered(_listed(tokenizer["model"]["vocab"])) | usual
    found = TokenList({each: text for each, text in usual.items() if each not in added}, added)
    tokens = len(found.usual) + len(added)
    if found.count > 2 * tokens + _FREE_NUMBERS:
        raise CorruptCheckpoint(
            f"{where}: the tokenizer has a token with the number {found.count - 1:,}, and only {tokens:,} tokens; expected numbers "
            "without such gaps"
        )
    return found


def _usual(files: Files, kind: str, tokenizer: Any) -> dict[int, str]:
    """Number -> text of the tokens that a file lists. tokenizer: the content of tokenizer.json."""
    if kind == _TOKENIZER:
        return _numbered(_listed(tokenizer["model"]["vocab"]))
    if kind.endswith(".json"):
        return _numbered(_listed(files[kind].json()))
    content = files[kind].content()
    if kind.endswith(".txt"):
        text = content.decode(errors="replace").removesuffix("\n")
        return dict(enumerate(line.removesuffix("\r") for line in text.split("\n")))
    if _RANK.match(content):
        lines = map(_RANK.fullmatch, content.splitlines())
        return {int(line[2]): line[1].decode() for line in lines if line}
    return dict(enumerate(piece.text for piece in read_pieces(content)))


def _listed(vocabulary: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (number, text) of the tokens of a vocabulary in JSON."""
    if isinstance(vocabulary, list):  # Unigram: [text, score] of each token
        yield from enumerate(token[0] for token in vocabulary)
    else:
        yield from ((number, text) for text, number in vocabulary.items())


def _added(files: Files, tokenizer: Any) -> dict[int, str]:
    """Number -> text of the added tokens. tokenizer: the content of tokenizer.json, or {}."""
    found: dict[int, str] = {}
    if _ADDED in files:
        with well_formed(files[_ADDED].where):
            found |= _numbered(_listed(files[_ADDED].json()))
    if _SETTINGS in files:
        with well_formed(files[_SETTINGS].where):
            listed = files[_SETTINGS].json().get("added_tokens_decoder") or {}
            found |= _numbered((int(number), each["content"]) for number, each in listed.items())
    if _TOKENIZER in files:
        with well_formed(files[_TOKENIZER].where):
            listed = tokenizer.get("added_tokens") or ()
            found |= _numbered((each["id"], each["content"]) for each in listed)
    return found


def _numbered(tokens: Iterable[tuple[Any, Any]]) -> dict[int, str]:
    """The tokens by number. Raises ValueError for something else than numbers and texts."""
    found = {}
    for number, text in tokens:
        if type(number) is not int or not 0 <= number < VOCABULARY or not isinstance(text, str):
            raise ValueError(f"{text!r:.40} with the number {number!r:.40}")
        found[number] = text
    return found


def texts_of(
    files: Files, tokens: TokenList, numbers: Collection[int], where: str
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


def pieces_of(files: Files, texts: Mapping[int, str], where: str) -> dict[int, list[int]]:
    """The tokens of each text, without those at its begin and end, and without those that stand for unknown text.

    files: those of the tokenizer. Raises UnsupportedInput for a tokenizer without a tokenizer.json, or a text that isn't
    one in UTF-8.
    """
    tokenizer = _opened(files, where)
    unknown = _unknown(files[_TOKENIZER].json()["model"])
    found = {}
    for number, text in texts.items():
        try:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:  # half of a surrogate pair, which JSON can hold
            raise UnsupportedInput(
                f"--new-rows pieces: token {number} is {text!r:.40}, which is no text in UTF-8; choose --new-rows mean"
            ) from None
        found[number] = [each for each in ids if each != unknown]
    return found


def _unknown(model: Mapping[str, Any]) -> int | None:
    """The number of the token for unknown text, in a tokenizer.json's model; None if it has none."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    token = model.get("unk_token")
    return None if token is None else model["vocab"].get(token)


def _opened(files: Files, where: str) -> Any:
    """A tokenizer of the tokenizers library. Raises UnsupportedInput without a tokenizer.json."""
    tokenizers = require_tokenizers("--new-rows pieces")
    if _TOKENIZER not in files:
        raise UnsupportedInput(
            f"--new-rows pieces: {where} has no tokenizer.json, which splits the text of new tokens; choose --new-rows mean"
        )
    try:
        made = tokenizers.Tokenizer.from_str(files[_TOKENIZER].content().decode())
    except Exception as error:  # the library raises no narrower one
        raise CorruptCheckpoint(f"{where}: its tokenizer.json is not readable ({error})") from error
    made.no_padding()
    made.no_truncation()
    return made
