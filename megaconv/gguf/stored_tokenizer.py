"""The tokenizer of a GGUF file as Hugging Face's files: the reverse of megaconv/gguf/tokenizer.py.

    gpt2     tokenizer.json         byte-level BPE; the name `pre` stands for the expressions that text is split by
    llama    tokenizer.model        SentencePiece's pieces and scores
    both     tokenizer_config.json  the special tokens, and the chat template

A GGUF file doesn't say which added tokens strip white space. They are taken as they are.
Source: llama-vocab.cpp of llama.cpp.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.gguf.chat_templates import stored_templates
from megaconv.gguf.sentencepiece import CONTROL, NORMAL, UNUSED, USER, Piece, model_of
from megaconv.gguf.tokenizer import GPT2, PATTERNS, PREFIX

LONG = tuple(PREFIX + name for name in ("tokens", "scores", "token_type", "merges"))
"""The keys of arrays with an item per token."""
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "smollm": "starcoder"}
"""Further names of a way to split text."""
_EXPRESSIONS = {name: patterns for patterns, name in PATTERNS.items()}
_WHOLE_WORDS_FIRST = "llama-bpe"
"""The tokenizers that take a word of the vocabulary whole, and begin a text with a token unless the file says otherwise."""
_COMPOSED = "qwen2"
"""The tokenizers that bring text into Unicode's composed form first. llama.cpp doesn't."""
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def unread_tokenizer(keys: Mapping[str, Any]) -> str:
    """The reason why a file's tokenizer can't be restored; empty if it can."""
    kind, pre = keys.get(PREFIX + "model"), _splitting(keys)
    if kind in (None, "none"):
        return "it has none"
    if kind == "gpt2" and pre not in _EXPRESSIONS:
        return f"its way to split text, {pre!r:.40}, is not known"
    return "" if kind in ("gpt2", "llama") else f"it is of the kind {kind!r:.40}"


def tokenizer_files(keys: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """Hugging Face's files, by name. keys: the metadata, with the arrays of LONG. where: the file, for messages.

    Raises CorruptCheckpoint for arrays that contradict each other.
    """
    tokens, kinds = _tokens(keys, where)
    settings = _settings(keys, tokens)
    if keys[PREFIX + "model"] == "llama":
        model = {"tokenizer.model": _sentencepiece(keys, tokens, kinds, where)}
        gemma = str(keys.get("general.architecture", "")).startswith("gemma")
        settings["tokenizer_class"] = "GemmaTokenizer" if gemma else "LlamaTokenizer"
        added = _added(tokens, kinds)
        settings["added_tokens_decoder"] = {str(each.pop("id")): each for each in added}
        for name, otherwise in (("add_bos_token", True), ("add_eos_token", False)):
            settings[name] = bool(keys.get(PREFIX + name, otherwise))
    else:
        model = {"tokenizer.json": _json(_byte_level(keys, tokens, kinds, where))}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    return model | {"tokenizer_config.json": _json(settings)}


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode(errors="replace") + b"\n"


def _splitting(keys: Mapping[str, Any]) -> str:
    """llama.cpp's usual name of the way to split text."""
    name = str(keys.get(PREFIX + "pre", "default"))
    return _SAME.get(name, name)


def _tokens(keys: Mapping[str, Any], where: str) -> tuple[Sequence[str], Sequence[int]]:
    """(tokens, kinds) of the vocabulary by number."""
    tokens = keys.get(PREFIX + "tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CorruptCheckpoint(f"{where}: {PREFIX}tokens should be a list of texts")
    kinds = keys.get(PREFIX + "token_type", [NORMAL] * len(tokens))
    _require(kinds, tokens, "token_type", int, where)
    return tokens, kinds


def _require(values: object, tokens: Sequence[str], name: str, kind: type, where: str) -> None:
    """Raises CorruptCheckpoint unless there is a value of this type for each token."""
    fits = isinstance(values, list) and all(type(value) is kind for value in values)
    if not fits or len(values) != len(tokens):  # type: ignore[arg-type]
        raise CorruptCheckpoint(
            f"{where}: {PREFIX}{name} should have a number for each of {len(tokens):,} tokens"
        )


def _settings(keys: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens that have names, and the chat template."""
    found: dict[str, Any] = {}
    for name, word in _NAMED.items():
        number = _id(keys, tokens, word)
        if number is not None:
            found[name] = tokens[number]
    templates = stored_templates(keys)
    if templates is not None:
        found["chat_template"] = templates
    return found | {"clean_up_tokenization_spaces": False}


def _id(keys: Mapping[str, Any], tokens: Sequence[str], word: str) -> int | None:
    """The number of a special token; None if the file names none."""
    number = keys.get(f"{PREFIX}{word}_token_id")
    return number if type(number) is int and 0 <= number < len(tokens) else None


def _added(tokens: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens that are found in text as they are, before it is split."""
    return [
        {"id": number, "content": token, **dict.fromkeys(_FLAGS, False), "special": kind != USER}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER)
    ]


def _byte_level(
    keys: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], where: str
) -> dict[str, Any]:
    """The content of tokenizer.json."""
    merges = keys.get(PREFIX + "merges")
    if not isinstance(merges, list) or not all(_is_merge(merge) for merge in merges):
        raise CorruptCheckpoint(f"{where}: {PREFIX}merges should be a list of two words each")
    pre = _splitting(keys)
    # Added tokens are listed too: otherwise the tokenizers library numbers them anew, behind the others.
    used = (number for number, kind in enumerate(kinds) if kind != UNUSED)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, kinds),
        "normalizer": {"type": "NFC"} if pre == _COMPOSED else None,
        "pre_tokenizer": _pre_tokenizer(_EXPRESSIONS[pre]),
        "post_processor": _around(keys, tokens, pre),
        "decoder": _bytes_step(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == _WHOLE_WORDS_FIRST,
            "vocab": {tokens[number]: number for number in used},
            "merges": merges,
        },
    }


def _is_merge(merge: object) -> bool:
    return isinstance(merge, str) and len(merge.split(" ")) == 2


def _bytes_step(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _pre_tokenizer(patterns: Sequence[str]) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
        if pattern != GPT2
    ]
    last = _bytes_step(use_regex=GPT2 in patterns)
    return {"type": "Sequence", "pretokenizers": [*splits, last]} if splits else last


def _around(keys: Mapping[str, Any], tokens: Sequence[str], pre: str) -> dict[str, Any]:
    """The tokens before and after a text."""
    begins = keys.get(PREFIX + "add_bos_token", pre == _WHOLE_WORDS_FIRST)
    ends = keys.get(PREFIX + "add_eos_token", False)
    first = _id(keys, tokens, "bos") if begins else None
    last = _id(keys, tokens, "eos") if ends else None
    found = [tokens[number] for number in (first, last) if number is not None]

    def around(name: str, kind: int) -> list[dict[str, Any]]:
        steps = [] if first is None else [_step("SpecialToken", tokens[first], kind)]
        steps.append(_step("Sequence", name, kind))
        return steps if last is None else [*steps, _step("SpecialToken", tokens[last], kind)]

    special = {
        token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in found
    }
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": special,
    }


def _step(kind: str, name: str, type_id: int) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": type_id}}


def _sentencepiece(
    keys: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], where: str
) -> bytes:
    """The content of tokenizer.model."""
    scores = keys.get(PREFIX + "scores", [0.0] * len(tokens))
    _require(scores, tokens, "scores", float, where)
    assert isinstance(scores, list)
    return model_of(
        map(Piece, tokens, scores, kinds),
        {word: _id(keys, tokens, word) for word in _NAMED.values()},
        space_first=bool(keys.get(PREFIX + "add_space_prefix", True)),
        fewer_spaces=bool(keys.get(PREFIX + "remove_extra_whitespaces", False)),
    )
