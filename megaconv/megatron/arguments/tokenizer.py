"""The tokenizer that Megatron's arguments name, for a checkpoint without `hf/`.

    --tokenizer-model /models/Llama-2-7b              a directory of transformers' (HuggingFaceTokenizer)
    --tokenizer-model /models/tokenizer.model         SentencePiece
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt

A path in a checkpoint can't be trusted. A file is taken only if it has a tokenizer's name and content, and lies at that
path (no link leads out of its directory). A notice names it. Source: megatron/training/arguments.py of Megatron-LM.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import CheckpointError
from formats.regular_files import parse_json
from megaconv.engine.sidecars import find_sidecars, read_sidecar

_PATHS = ("tokenizer_model", "vocab_file")
"""Arguments with a path, in the order in which they are tried."""
_OF_DIRECTORY = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
_TEXTS = ("merges.txt", "chat_template.jinja")
"""Files without a structure to check. They are taken only together with others."""


class NamedTokenizer(NamedTuple):
    """The tokenizer that the arguments name, and its files on this machine."""

    name: str = ""
    """A path, or a name on the Hub; empty if the arguments name none."""
    files: Mapping[str, Path] = {}
    """Files by transformers' names; empty if nothing exists at the path, or it is no tokenizer."""
    ids: Mapping[str, int | tuple[int, ...]] = {}
    """`bos_token_id` and `eos_token_id`, if the files contain them."""


def named_tokenizer(args: Namespace) -> NamedTokenizer:
    named = [word for name in _PATHS if isinstance(word := getattr(args, name, None), str) and word]
    for word in named:
        files = _candidates(args, Path(word))
        contents = {name: content for name, path in files.items() if (content := _read(name, path))}
        if any(name not in _TEXTS for name in contents):
            return NamedTokenizer(
                word, {name: files[name] for name in contents}, _special_tokens(contents)
            )
    return NamedTokenizer(named[0] if named else "")


def _candidates(args: Namespace, path: Path) -> dict[str, Path]:
    try:
        if path.is_dir():
            return {
                name: file for name, file in find_sidecars(path).items() if name in _OF_DIRECTORY
            }
        if not path.is_file():
            return {}
    except (OSError, ValueError):  # no file can have this name
        return {}
    if path.suffix == ".model":
        return {"tokenizer.model": path}
    merges = getattr(args, "merge_file", None)
    if path.suffix == ".json" and isinstance(merges, str) and merges:
        return {"vocab.json": path, "merges.txt": Path(merges)}
    return {path.name: path} if path.name in _OF_DIRECTORY else {}


def _read(name: str, path: Path) -> bytes:
    """A file's content; empty if the content doesn't fit the name."""
    try:
        content = read_sidecar(path)
        return content if _is_like(name, path, content) else b""
    except (CheckpointError, OSError, ValueError, RecursionError, IndexError):
        return b""


def _is_like(name: str, path: Path, content: bytes) -> bool:
    if name in _TEXTS:
        return path.suffix == Path(name).suffix and bool(content.decode())
    if name == "tokenizer.model":
        return any(_sentence_pieces(content))
    value = parse_json(content)
    if name == "vocab.json":
        return (
            isinstance(value, dict)
            and len(value) > 1
            and all(_is_id(number) for number in value.values())
        )
    return isinstance(value, dict) and (
        name != "tokenizer.json" or isinstance(value.get("model"), dict)
    )


# Token ids.


def _special_tokens(contents: Mapping[str, bytes]) -> dict[str, int | tuple[int, ...]]:
    """The ids of the special tokens. contents: the checked files."""
    values = {
        name: parse_json(content) for name, content in contents.items() if name.endswith(".json")
    }
    settings = values.get("generation_config.json", {})
    words = values.get("special_tokens_map.json", {}) | values.get("tokenizer_config.json", {})
    if "tokenizer.model" in contents and not words:
        words = {"bos_token": "<s>", "eos_token": "</s>"}  # SentencePiece's defaults
    known = _ids(values, contents.get("tokenizer.model", b""))
    found: dict[str, int | tuple[int, ...]] = {}
    for kind in ("bos_token", "eos_token"):
        given, word = settings.get(f"{kind}_id"), words.get(kind)
        word = word.get("content") if isinstance(word, dict) else word
        has_ids = isinstance(given, list) and bool(given) and all(map(_is_id, given))
        if _is_id(given):
            found[f"{kind}_id"] = given
        elif kind == "eos_token" and has_ids:
            found["eos_token_id"] = tuple(given)
        elif isinstance(word, str) and word in known:
            found[f"{kind}_id"] = known[word]
    return found


def _ids(values: Mapping[str, Any], pieces: bytes) -> dict[str, int]:
    """Token -> id, from all files that list tokens."""
    tokenizer = values.get("tokenizer.json", {})
    lists = [
        tokenizer.get("model", {}).get("vocab"),
        values.get("vocab.json"),
        values.get("added_tokens.json"),
    ]
    found: dict[str, int] = {}
    for each in lists:
        if isinstance(each, dict):
            found |= {token: number for token, number in each.items() if _is_id(number)}
    found |= {piece: number for number, piece in enumerate(_sentence_pieces(pieces))}
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if (
            isinstance(entry, dict)
            and isinstance(entry.get("content"), str)
            and _is_id(entry.get("id"))
        ):
            found[entry["content"]] = entry["id"]
    return found


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _sentence_pieces(model: bytes) -> Iterator[str]:
    """The pieces of a SentencePiece model in the order of their ids. Raises ValueError or IndexError for other bytes.

    The model is a protocol buffer. Field 1 is a piece, whose field 1 is its text. Source: sentencepiece_model.proto.
    """
    for number, content in _fields(model):
        if number == 1:
            yield next(text.decode() for inner, text in _fields(content) if inner == 1)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of the fields of a message. The content is empty for a field that isn't bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        kind = tag & 7
        number = tag >> 3
        if kind == 2:
            length, position = _varint(message, position)
            end = position + length
            if end > len(message):
                raise ValueError("a field that reaches past the end")
            yield number, message[position:end]
            position = end
        elif kind == 0:
            _, position = _varint(message, position)
            yield number, b""
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
            yield number, b""
        else:
            raise ValueError(f"a field of kind {kind}")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
