"""A tokenizer in GGUF's form: SentencePiece's tokenizer.model, or the byte-level BPE of a tokenizer.json."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.gguf import Value
from formats.small_files import SmallFile
from megaconv.errors import CorruptCheckpoint, NotExpressible, UsageError
from megaconv.gguf.chat_templates import is_template_file, template_values
from megaconv.gguf.names import ARCHITECTURES
from megaconv.gguf.sentencepiece import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER,
    Piece,
    read_pieces,
    read_rules,
)
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header

_ADDED_SCORE = -1000.0
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of a ByteLevel step itself."""
_DIGIT = r"\p{N}"
PATTERNS = {
    (_LLAMA3,): "llama-bpe",
    (_LLAMA3.replace("{1,3}", ""),): "qwen2",
    (GPT2,): "gpt-2",
    (_DIGIT, GPT2): "starcoder",
    (_O200K,): "gpt-4o",
    _DEEPSEEK: "deepseek-v3",
}
"""Regular expressions with which a tokenizer splits text -> llama.cpp's name for them."""
PREFIX = "tokenizer.ggml."


def tokenizer_values(
    header: Header, config: ModelConfig, extra: Mapping[str, str]
) -> dict[str, Value]:
    """GGUF metadata of the tokenizer among the small files of a source.

    Raises UsageError if there is no tokenizer or an option doesn't fit it, NotExpressible for a tokenizer that llama.cpp
    isn't known to support.
    """
    beside: dict[str, Path | bytes] = {**header.files, **header.made}
    files = {name: SmallFile.of(name, given) for name, given in beside.items()}
    _require_usable(files, extra)
    if extra.get("tokenizer") == "none":
        return {PREFIX + "model": Value("string", "none")}
    settings: Mapping[str, Any] = {}
    if "tokenizer_config.json" in files:
        settings = files["tokenizer_config.json"].json()
    found = _tokens(files, settings, config, extra)
    with well_formed("tokenizer_config.json"):
        found |= _ids(settings, found["tokens"].value, config)
        for name in ("add_bos_token", "add_eos_token"):
            if isinstance(settings.get(name), bool):
                found[name] = Value("bool", settings[name])
    values: dict[str, Value] = {}
    if _strips_as_phi3(found, files, settings, config):
        values["general.name"] = Value("string", "Phi-3")
    for name, value in found.items():
        values[PREFIX + name] = value
    texts = {
        name: file.content().decode(errors="replace")
        for name, file in files.items()
        if is_template_file(name)
    }
    with well_formed("tokenizer_config.json"):
        return values | template_values(settings, texts)


def _require_usable(files: Mapping[str, SmallFile], extra: Mapping[str, str]) -> None:
    """Raise UsageError for an unknown value of `tokenizer`, and for a `tokenizer_pre` that has no effect."""
    asked, pre = extra.get("tokenizer"), extra.get("tokenizer_pre")
    if asked not in (None, "none"):
        raise UsageError(f"--option tokenizer={asked}: is not known; write none, or leave it out")
    if pre is not None and asked == "none":
        raise UsageError(
            f"--option tokenizer_pre={pre}: has no effect with --option tokenizer=none; leave one of them out"
        )
    if pre is not None and "tokenizer.model" in files:
        raise UsageError(
            f"--option tokenizer_pre={pre}: has no effect on {files['tokenizer.model'].where}; leave it out"
        )


def _tokens(
    files: Mapping[str, SmallFile],
    settings: Mapping[str, Any],
    config: ModelConfig,
    extra: Mapping[str, str],
) -> dict[str, Value]:
    """Metadata of the tokens. Raises UsageError without a tokenizer."""
    if "tokenizer.model" in files:
        file = files["tokenizer.model"]
        with well_formed(file.where):
            content = file.content()
            _require_bpe(content, file.where)
            found = _sentencepiece(content, _added(files, settings), config, file.where)
            if not _puts_space_first(content, settings, config):
                found["add_space_prefix"] = Value("bool", False)
    elif "tokenizer.json" in files:
        file = files["tokenizer.json"]
        with well_formed(file.where):
            raw = file.json()
            found = _byte_level(raw, config, extra, file.where)
            found |= _added_around(raw, found["pre"].value)
    else:
        _refuse_ranks(files)
        raise UsageError(
            "--saver gguf: the source has no tokenizer.model and no tokenizer.json; --config gives its Hugging Face directory, "
            "--option tokenizer=none leaves the tokenizer out"
        )
    _require_distinct(found["tokens"].value, file.where)
    return found


def _require_bpe(content: bytes, where: str) -> None:
    """Raises NotExpressible for a SentencePiece model of another kind, which llama.cpp would split in another way."""
    if not read_rules(content).is_bpe:
        raise NotExpressible(
            f"{where}: is no BPE of SentencePiece, and llama.cpp would split text in another way; "
            "leave the tokenizer out with --option tokenizer=none"
        )


def _puts_space_first(content: bytes, settings: Mapping[str, Any], config: ModelConfig) -> bool:
    """True if a text begins with a space. Gemma's tokenizers put none there, whatever their files say."""
    if ARCHITECTURES[config.family].startswith("gemma"):
        return False
    given = settings.get("add_prefix_space")
    return given if isinstance(given, bool) else read_rules(content).space_first


def _require_distinct(tokens: Sequence[str], where: str) -> None:
    """Raises NotExpressible for a duplicate token: llama.cpp would abort."""
    twice = next((token for token, count in Counter(tokens).items() if count > 1), None)
    if twice is not None:
        raise NotExpressible(
            f"{where}: two tokens are {twice!r}; llama.cpp has each once; leave the tokenizer out with --option tokenizer=none"
        )


_PHI3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}


def _strips_as_phi3(
    found: Mapping[str, Value],
    files: Mapping[str, SmallFile],
    settings: Mapping[str, Any],
    config: ModelConfig,
) -> bool:
    """True if special tokens strip the white space behind them, which llama.cpp does only for the name Phi-3.

    For that name llama.cpp requires four tokens, and doesn't load a vocabulary without them.
    """
    strips = any(token.get("rstrip") for token in _added(files, settings).values())
    return config.family == "phi3" and strips and set(found["tokens"].value) >= _PHI3_TOKENS


def _added(
    files: Mapping[str, SmallFile], settings: Mapping[str, Any]
) -> dict[int, Mapping[str, Any]]:
    """Number -> content, special, rstrip ... of the tokens that other files add to a tokenizer.model."""
    found: dict[int, Mapping[str, Any]]
    if "tokenizer.json" in files:
        name = "tokenizer.json"
        listed = files["tokenizer.json"].json().get("added_tokens") or ()
        found = {token["id"]: token for token in listed}
    elif decoder := settings.get("added_tokens_decoder"):
        name = "tokenizer_config.json"
        found = {int(number): token for number, token in decoder.items()}
    elif "added_tokens.json" in files:
        name = "added_tokens.json"
        plain = files["added_tokens.json"].json()
        found = {number: {"content": text} for text, number in plain.items()}
    else:
        return {}
    numbers = {token["content"]: number for number, token in found.items()}
    _require_numbers(numbers, files[name].where)
    return found


def _ids(
    settings: Mapping[str, Any], tokens: Sequence[str], config: ModelConfig
) -> dict[str, Value]:
    """The ids of the special tokens that tokenizer_config.json names, or else of the configuration."""
    named = {token: number for number, token in enumerate(tokens)}
    of_model = (
        ("bos", "bos", config.bos_token_id),
        ("eos", "eos", _first(config.eos_token_id)),
        ("pad", "padding", config.pad_token_id),
    )
    found: dict[str, Value] = {}
    for word, name, otherwise in of_model:
        given = settings.get(f"{word}_token")
        text = given.get("content") if isinstance(given, dict) else given
        number = otherwise
        if isinstance(text, str):
            number = named.get(text, otherwise)
        if number is not None and number >= 0:  # some configurations have -1 for no token
            found[f"{name}_token_id"] = Value("u32", number)
    return found


def _first(ids: int | tuple[int, ...] | None) -> int | None:
    if isinstance(ids, int):
        return ids
    return ids[0] if ids else None


def _sentencepiece(
    content: bytes, added: Mapping[int, Mapping[str, Any]], config: ModelConfig, where: str
) -> dict[str, Value]:
    """GGUF metadata of a tokenizer.model.

    added: further tokens by number. A token without a row in the embedding is left out.
    """
    pieces = read_pieces(content)
    _require_room(len(pieces), config, where)
    pieces += [
        Piece(f"[PAD{index}]", -1000.0, UNUSED) for index in range(len(pieces), config.vocab)
    ]
    for number, token in added.items():
        if number < config.vocab and _changes(token, pieces[number]):
            pieces[number] = Piece(token["content"], _ADDED_SCORE, _type_of_added(token))
    return {
        "model": Value("string", "llama"),
        "pre": Value("string", "default"),
        "tokens": Value("string", [piece.text for piece in pieces]),
        "scores": Value("f32", [piece.score for piece in pieces]),
        "token_type": Value("i32", [piece.kind for piece in pieces]),
    }


def _changes(token: Mapping[str, Any], piece: Piece) -> bool:
    """True if an added token has another text than the piece with its number, or that is an ordinary piece."""
    return token["content"] != piece.text or piece.kind == NORMAL


def _type_of_added(token: Mapping[str, Any]) -> int:
    return CONTROL if token.get("special") else USER


def _refuse_ranks(files: Mapping[str, SmallFile]) -> None:
    """Raises NotExpressible if there are only tiktoken's ranks (Qwen 1, Kimi).

    Such a file has lines of bytes in base64 and a number.
    """
    ranks = [name for name in files if name == "tiktoken.model" or name.endswith(".tiktoken")]
    if ranks:
        raise NotExpressible(
            f"{files[ranks[0]].where}: has the ranks of tiktoken's tokens, but neither the expression that text is split by nor the "
            "special tokens, which are in the model's Python code; write a tokenizer.json with transformers (TikTokenConverter), put it "
            "beside and give the directory as --config, or leave the tokenizer out with --option tokenizer=none"
        )


def _byte_level(
    raw: Mapping[str, Any], config: ModelConfig, extra: Mapping[str, str], where: str
) -> dict[str, Value]:
    model = raw["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise NotExpressible(
            f"{where}: a tokenizer of the kind {model['type']} that is not byte-level BPE; there is no tokenizer.model"
        )
    added = [
        token for token in raw.get("added_tokens") or () if not _stands_for_image(token, config)
    ]
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    _require_numbers(ids, where)
    _require_room(max(ids.values()) + 1, config, where)
    tokens = [f"[PAD{index}]" for index in range(config.vocab)]
    types = [UNUSED] * config.vocab
    for text, number in ids.items():
        tokens[number] = text
        types[number] = NORMAL
    for token in added:
        types[token["id"]] = _type_of_added(token)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    pre = extra.get("tokenizer_pre") or _pre(raw.get("pre_tokenizer"), where)
    return {
        "model": Value("string", "gpt2"),
        "pre": Value("string", pre),
        "tokens": Value("string", tokens),
        "token_type": Value("i32", types),
        "merges": Value("string", merges),
    }


def _stands_for_image(token: Mapping[str, Any], config: ModelConfig) -> bool:
    """True for Llama 3.2 Vision's token of an image, for which the Llama inside it has no row."""
    text, number = token["content"], token["id"]
    return bool(text == "<|image|>" and number == config.vocab)


def _added_around(raw: Mapping[str, Any], pre: str) -> dict[str, Value]:
    """add_bos_token and add_eos_token, where the tokenizer differs from llama.cpp's default.

    By its name, Llama 3 begins a text with a token in llama.cpp; other tokenizers neither begin nor end a text with
    one.
    """
    found = raw.get("post_processor") or {}
    steps = found.get("processors", [found])
    single: Sequence[Mapping[str, Any]] = next(
        (step["single"] for step in steps if step.get("type") == "TemplateProcessing"), []
    )
    begins, ends = ("SpecialToken" in (single[at] if single else {}) for at in (0, -1))
    bos = {"add_bos_token": Value("bool", begins)} if begins or pre == "llama-bpe" else {}
    return bos | ({"add_eos_token": Value("bool", True)} if ends else {})


def _pre(raw: Any, where: str) -> str:
    steps = raw.get("pretokenizers", [raw]) if isinstance(raw, dict) else []
    patterns = tuple(pattern for step in steps for pattern in _patterns_of(step))
    if patterns not in PATTERNS or not any(step.get("type") == "ByteLevel" for step in steps):
        raise NotExpressible(
            f"{where}: splits text in a way that has no known name in llama.cpp; give it with --option tokenizer_pre=NAME "
            f"(known: {', '.join(PATTERNS.values())}): {json.dumps(patterns)[:200]}"
        )
    return PATTERNS[patterns]


def _patterns_of(step: Mapping[str, Any]) -> tuple[str, ...]:
    """The expressions that a step splits by; the step itself as JSON if llama.cpp has no such step."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return (GPT2,) if step.get("use_regex", True) else ()
    if kind == "Digits" and step.get("individual_digits"):
        return (_DIGIT,)
    keeps_all = (step.get("behavior"), step.get("invert")) in (
        ("Isolated", False),
        ("Removed", True),
    )
    if kind == "Split" and keeps_all and "Regex" in step["pattern"]:
        # The JSON file has a line break either as itself or escaped.
        return (step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n"),)
    return (json.dumps(step),)


def _require_numbers(tokens: Mapping[str, Any], where: str) -> None:
    """Raise CorruptCheckpoint for a token with something else than a number from 0. tokens: text -> number."""
    for text, number in tokens.items():
        if type(number) is not int or number < 0:
            raise CorruptCheckpoint(
                f"{where}: token {text!r:.40} has the number {number!r:.40}; expected a whole number from 0"
            )


def _require_room(tokens: int, config: ModelConfig, where: str) -> None:
    if tokens > config.vocab:
        raise CorruptCheckpoint(
            f"{where}: the tokenizer has {tokens:,} tokens, the embedding {config.vocab:,} rows"
        )
