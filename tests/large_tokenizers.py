"""Tokenizers of the sizes of the largest that are published, as transformers saves them, of random words."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

_WORD = 6
"""Letters of a word, all of whose parts become tokens: as many merges for each token as Llama 3 has."""
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


@dataclass(frozen=True)
class Size:
    tokens: int
    """The number of tokens, without the added ones."""
    merges: int
    added: int
    merges_as_lists: bool = True
    """True for merges as lists, as transformers 5 saves them; False for texts, as before."""

    @property
    def words(self) -> int:
        return self.tokens + self.added


SIZES = {
    "a quarter of Llama 3": Size(32_000, 70_000, 256),
    "Llama 3": Size(128_000, 280_147, 256),
    "Llama 3, merges as texts": Size(128_000, 280_147, 256, merges_as_lists=False),
    "Qwen 3.5": Size(248_044, 247_587, 33),
    "Gemma 3": Size(255_903, 514_906, 6_242),
}


def write_byte_level(directory: Path, size: Size) -> Path:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE. Returns the former's path."""
    alphabet = _byte_letters()
    return _write(directory, size, alphabet, _BYTE_LEVEL)


def write_with_sentencepiece(directory: Path, size: Size) -> Path:
    """Write a tokenizer like Gemma's: a BPE of letters in tokenizer.json, and the same pieces in tokenizer.model."""
    file = _write(directory, size, [chr(0x4E00 + index) for index in range(256)], None)
    vocabulary = json.loads(file.read_text())["model"]["vocab"]
    pieces = [(text, -float(number), 1) for text, number in vocabulary.items()]
    pieces += [(f"<unused{number}>", 0.0, 3) for number in range(size.added)]
    (directory / "tokenizer.model").write_bytes(b"".join(_piece(*piece) for piece in pieces))
    return file


def _write(
    directory: Path, size: Size, alphabet: list[str], splitting: dict[str, Any] | None
) -> Path:
    tokens, merges = _vocabulary(size, alphabet)
    listed = [list(pair) if size.merges_as_lists else " ".join(pair) for pair in merges]
    added = [_added(size.tokens + index, f"<unused{index}>") for index in range(size.added)]
    split = {
        "type": "Split",
        "pattern": {"Regex": _LLAMA3},
        "behavior": "Isolated",
        "invert": False,
    }
    steps = {"type": "Sequence", "pretokenizers": [split, splitting]}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": splitting is None, "ignore_merges": True,
        "vocab": {token: number for number, token in enumerate(tokens)}, "merges": listed,
    }  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": steps if splitting else None, "post_processor": None,
        "decoder": splitting, "model": model,
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(whole, indent=2, ensure_ascii=False))
    described = {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in added
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<unused0>", "eos_token": "<unused1>",
        "added_tokens_decoder": described,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return directory / "tokenizer.json"


def _vocabulary(size: Size, alphabet: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """All parts of random words, until there are enough, and as many ways to put them together."""
    random = Random(7)
    known = dict.fromkeys(alphabet)
    while len(known) < size.tokens:
        word = "".join(random.choices(alphabet, k=_WORD))
        for length in range(2, _WORD + 1):
            known.update(
                (word[start : start + length], None) for start in range(_WORD - length + 1)
            )
    tokens = list(known)[: size.tokens]
    whole = set(tokens)
    merges = [
        (token[:at], token[at:])
        for token in tokens
        for at in range(1, len(token))
        if token[:at] in whole and token[at:] in whole
    ]
    assert len(merges) >= size.merges
    return tokens, merges[: size.merges]


def _added(number: int, text: str) -> dict[str, Any]:
    return {
        "id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True,
    }  # fmt: skip


def _byte_letters() -> list[str]:
    """The letters that stand for bytes in a byte-level BPE, as GPT-2 chose them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + index) for index in range(len(hidden))]


def _piece(text: str, score: float, kind: int) -> bytes:
    content = text.encode()
    message = (
        b"\x0a"
        + _varint(len(content))
        + content
        + b"\x15"
        + struct.pack("<f", score)
        + b"\x18"
        + _varint(kind)
    )
    return b"\x0a" + _varint(len(message)) + message


def _varint(number: int) -> bytes:
    return bytes(_groups(number))


def _groups(number: int) -> Iterator[int]:
    while number > 127:
        yield number & 127 | 128
        number >>= 7
    yield number
