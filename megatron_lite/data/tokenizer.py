"""Tokenizers by Megatron's names, with the token ids of megatron-core's classes.

Building a tokenizer imports only the package that it needs.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from formats.rank_files import run_of
from formats.regular_files import check_size
from megaconv.errors import UsageError
from megaconv.hub import tokenizer_directory
from megatron_lite.data.chinese_tokenizer import ChineseTokenizer
from megatron_lite.data.packages import package
from megatron_lite.data.processor_template import NAME, processor_template

SENTENCEPIECE_TYPES = ("Llama2Tokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer")
LOWER_CASE = "BertWordPieceLowerCase"
BERT_TYPES = (LOWER_CASE, "BertWordPieceCase")
TYPES = (
    "GPT2BPETokenizer",
    *SENTENCEPIECE_TYPES,
    "HuggingFaceTokenizer",
    *BERT_TYPES,
    "EncDecTokenizer",
    "NullTokenizer",
)

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", NAME,
)  # fmt: skip
"""Tokenizer files that transformers reads into memory as a whole."""
END_OF_TEXT = "<|endoftext|>"
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class TokenizerOptions:
    """Each field is one of Megatron's flags; there the first two have the prefix `tokenizer_`."""

    type: str
    model: str | None = None
    """A sentencepiece model, or a Hugging Face directory or Hub id."""
    vocab_file: Path | None = None
    merge_file: Path | None = None
    vocab_size: int | None = None
    extra_ids: int | None = None
    """Number of tokens <extra_id_N> appended to BERT's vocabulary, after [BOS] and [EOS], unless it has them; None: nothing.

    Megatron always adds [BOS] and [EOS], also to the words that BERT's samples draw from.
    """


class Tokenizer(Protocol):
    """The interface of all tokenizers."""

    vocab_size: int
    eod: int | None
    """Token that ends a document."""
    pad: int | None
    bos: int | None
    begin: list[int]
    """Tokens with which the model expects a text to begin."""

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, without begin and end tokens."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def spelled(self, ids: Sequence[int]) -> str:
        """Return the text with special tokens, for display."""
        ...


def bert_config(*, lower: bool) -> dict[str, object]:
    """Return the tokenizer_config.json of a vocab.txt of BERT, which itself doesn't say whether texts become lower case."""
    return {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}


def type_of_files(model: str | None, vocab_file: object, merge_file: object) -> str | None:
    """Return the type of a tokenizer of which only files are given, or None if there are none.

    The arguments are the values of --tokenizer-model, --vocab-file and --merge-file.
    """
    if vocab_file:
        return "GPT2BPETokenizer" if merge_file else LOWER_CASE
    if model is None:
        return None
    is_sentencepiece = model.endswith(".model") and Path(model).is_file()
    return "Llama2Tokenizer" if is_sentencepiece else "HuggingFaceTokenizer"


def build_tokenizer(options: TokenizerOptions) -> Tokenizer:
    """Build a tokenizer. Raises UsageError for a missing flag or package, CorruptCheckpoint for files that are no tokenizer."""
    kind = options.type
    if kind not in TYPES:
        known = ", ".join(TYPES)
        raise UsageError(f"--tokenizer-type {kind} is unknown; there are {known}")
    if kind == "NullTokenizer":
        return NullTokenizer(_needed(options, "vocab_size"))
    if kind == "GPT2BPETokenizer":
        vocabulary = _file(options, "vocab_file")
        merges = _file(options, "merge_file")
        return _gpt2(vocabulary, merges)
    if kind in BERT_TYPES:
        lower = kind == LOWER_CASE
        vocabulary = _file(options, "vocab_file")
        return _bert(vocabulary, options.extra_ids, lower=lower)
    if kind == "EncDecTokenizer":
        return ChineseTokenizer(_file(options, "vocab_file"))
    if kind == "HuggingFaceTokenizer":
        place = str(_needed(options, "model"))
        if place.endswith("tokenizer.json"):
            place = str(Path(place).parent)
        return HuggingFaceTokenizer(place)
    begins = kind == "Llama2Tokenizer"
    return SentencePieceTokenizer(_file(options, "model"), begins=begins)


def _needed(options: TokenizerOptions, field: str) -> Any:
    value = getattr(options, field)
    if value is None:
        flag = "--tokenizer-model" if field == "model" else f"--{field.replace('_', '-')}"
        raise UsageError(f"--tokenizer-type {options.type} needs {flag}")
    return value


def _file(options: TokenizerOptions, field: str) -> Path:
    path = Path(_needed(options, field))
    if not path.is_file():
        raise CorruptCheckpoint(
            f"{path}: no such file; --tokenizer-type {options.type} reads its vocabulary there"
        )
    check_size(path, SIDECAR_BYTES)
    return path


class NullTokenizer:
    """Splits text that consists of numbers at single spaces. The end-of-document token is the number after the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod: int | None = vocab_size
        self.pad: int | None = None
        self.bos: int | None = None
        self.begin: list[int] = []

    def tokenize(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split(" ")]
        except ValueError as error:
            raise ValueError(
                f"the text {text[:60]!r} is not a row of token ids, such as '5 17 3', which is all that can be read without "
                "a tokenizer; --tokenizer-model DIR gives one"
            ) from error

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def spelled(self, ids: Sequence[int]) -> str:
        return self.detokenize(ids)


class SentencePieceTokenizer:
    """A sentencepiece model. It adds no begin and no end token."""

    def __init__(self, path: Path, *, begins: bool) -> None:
        """begins: whether its model, a Llama, expects the begin token at the start of a text."""
        processor = package("sentencepiece", "this tokenizer").SentencePieceProcessor
        try:
            self._processor = processor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise CorruptCheckpoint(f"{path}: is not a sentencepiece model: {error}") from error
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod, self.pad, self.bos = (
            number if number >= 0 else None
            for number in (
                self._processor.eos_id(),
                self._processor.pad_id(),
                self._processor.bos_id(),
            )
        )
        self.begin: list[int] = [self.bos] if begins and self.bos is not None else []

    def tokenize(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._processor.encode_as_ids(text)
        except RuntimeError as error:  # the package's error for half of a surrogate pair
            raise ValueError(str(error)) from error
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode_ids(self._known(ids))
        return text

    def spelled(self, ids: Sequence[int]) -> str:
        pieces = map(self._processor.id_to_piece, self._known(ids))
        return "".join(pieces).replace("\u2581", " ")

    def _known(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of the vocabulary. A model's may be padded, and other tokenizers leave out its further tokens."""
        return [number for number in ids if number < self.vocab_size]


class HuggingFaceTokenizer:
    """Any tokenizer that transformers can read without running code from it; `inner` is transformers' tokenizer."""

    def __init__(self, place: str) -> None:
        transformers = package("transformers", "this tokenizer")
        directory = _with_tokenizer(tokenizer_directory(place))
        for name in FILES:
            if os.path.lexists(path := directory / name):
                check_size(path, SIDECAR_BYTES)
        try:
            self.inner: Any = transformers.AutoTokenizer.from_pretrained(
                directory, trust_remote_code=False
            )
            # Wrong values of tokenizer_config.json fail at the first use.
            first: list[int] = self.inner("a").input_ids[:1]
        except Exception as error:  # its many formats raise errors of many classes
            if not _has_tokenizer(directory):
                raise CorruptCheckpoint(
                    f"{place}: has no tokenizer (tokenizer.json, tokenizer.model …); name the directory of a model that has one",
                    code="missing-file",
                ) from error
            reason = " ".join(str(error).split())
            raise CorruptCheckpoint(
                f"{place}: transformers can't read a tokenizer there: {reason}"
            ) from error
        one = self.inner
        if not one.chat_template:
            one.chat_template = processor_template(directory)
        self.vocab_size = len(one)
        self.eod = one.sep_token_id if one.eos_token_id is None else one.eos_token_id
        self.bos = one.cls_token_id if one.bos_token_id is None else one.bos_token_id
        self.pad: int | None = one.pad_token_id
        self.begin = first if first == [self.bos] else []

    def pieces(self) -> list[str]:
        """Return the text of every token."""
        found: list[str] = self.inner.convert_ids_to_tokens(list(range(self.vocab_size)))
        return found

    def special(self, name: str) -> int | None:
        """Return the token for `cls`, `sep`, `mask`, `pad`, `bos` or `eos`, or None."""
        number: int | None = getattr(self.inner, f"{name}_token_id", None)
        return number

    def save(self, directory: str) -> None:
        """Write all of its files."""
        self.inner.save_pretrained(directory)

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.inner(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=True)
        return text

    def spelled(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=False)
        return text


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in FILES)


def _with_tokenizer(directory: Path) -> Path:
    """The directory with the tokenizer's files: a Megatron run keeps them in hf/, beside its iterations."""
    inside = run_of(directory) / "hf"
    return inside if not _has_tokenizer(directory) and _has_tokenizer(inside) else directory


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has a chat template of its own."""
    return isinstance(tokenizer, HuggingFaceTokenizer) and bool(tokenizer.inner.chat_template)


class RustTokenizer:
    """A tokenizer of the `tokenizers` package, built from a vocabulary."""

    def __init__(self, tokenizer: Any, eod: str, pad: str | None, bos: str) -> None:
        self.inner = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.eod: int | None = tokenizer.token_to_id(eod)
        self.pad: int | None = tokenizer.token_to_id(pad) if pad else None
        self.bos: int | None = tokenizer.token_to_id(bos)
        self.begin: list[int] = []

    def pieces(self) -> list[str]:
        """Return the text of every token."""
        return [self.inner.id_to_token(number) for number in range(self.vocab_size)]

    def special(self, name: str) -> int | None:
        """Return the token for `cls`, `sep`, `mask`, `pad`, `bos` or `eos`, or None."""
        number: int | None = self.inner.token_to_id(f"[{name.upper()}]")
        return number

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=True)
        return text

    def spelled(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=False)
        return text


def _gpt2(vocab_file: Path, merge_file: Path) -> RustTokenizer:
    """GPT-2's byte-level BPE. `<|endoftext|>` in a text becomes that one token, as in transformers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    try:
        vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
        merges = merge_file.read_text(encoding="utf-8")
        pairs: list[tuple[str, str]] = []
        for line in merges.splitlines():
            is_header = line.startswith("#version:")
            if line and not is_header:
                first, second = line.split(" ")
                pairs.append((first, second))
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    except Exception as error:  # tokenizers raises Exception itself
        raise CorruptCheckpoint(
            f"{vocab_file}, {merge_file}: are not a vocabulary and merges of GPT-2: {error}"
        ) from error
    if END_OF_TEXT not in vocabulary:
        raise CorruptCheckpoint(f"{vocab_file}: has no {END_OF_TEXT}, with which documents end")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end_of_text = AddedToken(END_OF_TEXT, normalized=False, special=True)
    tokenizer.add_special_tokens([end_of_text])
    return RustTokenizer(tokenizer, END_OF_TEXT, None, END_OF_TEXT)


def _lines(vocab_file: Path) -> list[str]:
    """Return the words of a vocab.txt. Other line ends, such as U+2028, are words of some vocabularies."""
    try:
        lines = vocab_file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{vocab_file}: is not a vocabulary in UTF-8: {error}") from error
    return lines if lines[-1] else lines[:-1]


def _bert(vocab_file: Path, extra_ids: int | None, *, lower: bool) -> RustTokenizer:
    """BERT's word pieces. lower: lower case without accents. A document ends with [SEP].

    No text is split into the added tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = _lines(vocab_file)
    missing = [word for word in BERT_SPECIAL if word not in words]
    if missing:
        raise CorruptCheckpoint(
            f"{vocab_file}: has no {', '.join(missing)}; it is not a BERT vocabulary"
        )
    if extra_ids is not None:
        added = ["[BOS]", "[EOS]"]
        added += [f"<extra_id_{number}>" for number in range(extra_ids)]
        words += [word for word in added if word not in words]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = [AddedToken(word, normalized=False, special=True) for word in BERT_SPECIAL]
    tokenizer.add_special_tokens(special)
    return RustTokenizer(tokenizer, "[SEP]", "[PAD]", "[CLS]")
