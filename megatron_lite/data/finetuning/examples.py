"""All examples as tokens, end to end in memory: which of them are learned, and which pieces fit into a sample."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.encoding import BadRecord, read_fields
from megatron_lite.data.finetuning.chat import ChatTemplate, Encoded
from megatron_lite.data.finetuning.forms import Chat, Plain, read_record
from megatron_lite.data.finetuning.pairs import read_pair
from megatron_lite.data.finetuning.records import Record, find_files, read_records
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer


@dataclass(frozen=True)
class ReadingOptions:
    """Each field is a flag."""

    finetune_form: str | None = None
    finetune_turns: str = "all"
    chat_template: str | None = None
    """The template itself, in place of the tokenizer's own."""
    pairs: bool = False
    """Records are pairs of answers; then examples come in pairs, the chosen one first."""


@dataclass(frozen=True)
class Examples:
    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """Whether a token is to be predicted."""
    bounds: NDArray[np.int64]
    """Example k is tokens bounds[k] to bounds[k + 1]."""
    divisible: NDArray[np.bool_]
    """Whether an example that is too long for a sample goes on in the next one: a plain text. Others are cut."""
    unread: Counter[str] = field(default_factory=Counter)
    """Fields that are no content -> how many records have them."""
    plain_chats: int = 0
    """Instructions that were spelled out, as the tokenizer has no chat template."""
    equal: int = 0
    """Pairs that were left out since both answers are the same."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest example that may not be divided; 0 without any."""
        return int(np.diff(self.bounds)[~self.divisible].max(initial=0))


@dataclass(frozen=True)
class Pieces:
    """What samples are made of: examples, or what of them fits."""

    examples: Examples
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    cut: int
    """Examples whose end was left out."""
    dropped: int
    """Examples of which nothing is left to learn."""

    def __len__(self) -> int:
        return len(self.starts)


def pieces_for(examples: Examples, seq_length: int) -> Pieces:
    """A sample of seq_length tokens holds seq_length + 1 of an example's, the last of them as a label alone."""
    found: list[tuple[int, int]] = []
    cut = dropped = 0
    for number, (first, last) in enumerate(pairwise(examples.bounds.tolist())):
        if examples.divisible[number]:
            found += [(start, min(start + seq_length + 1, last)) for start in range(first, last - 1, seq_length)]
            continue
        end = min(last, first + seq_length + 1)
        if not examples.learned[first + 1 : end].any():
            dropped += 1
            continue
        cut += end < last
        found.append((first, end))
    bounds = np.array(found, np.int64).reshape(-1, 2)
    return Pieces(examples, bounds[:, 0], bounds[:, 1], cut, dropped)


class PairPieces(Pieces):
    """Rows two by two: what fits of the chosen and of the rejected answer of each pair."""

    def __len__(self) -> int:
        return len(self.starts) // 2


def pairs_for(examples: Examples, seq_length: int) -> PairPieces:
    """As pieces_for; a pair of which either answer has nothing left to learn is dropped."""
    starts, ends = examples.bounds[:-1].reshape(-1, 2), examples.bounds[1:].reshape(-1, 2)
    kept = np.minimum(ends, starts + seq_length + 1)
    before = np.concatenate(([0], np.cumsum(examples.learned)))  # learned tokens before each
    whole = (before[kept] > before[starts + 1]).all(1)
    cut = int((kept < ends)[whole].any(1).sum())
    return PairPieces(examples, starts[whole].ravel(), kept[whole].ravel(), cut, int((~whole).sum()))


def read_examples(
    words: Sequence[str],
    tokenizer: Tokenizer,
    options: ReadingOptions = ReadingOptions(),  # frozen
    flag: str = "--finetune-data",
) -> Examples:
    """Raises UsageError; CorruptCheckpoint, naming file and line, for a record that is no example."""
    if tokenizer.eod is None:
        raise UsageError(f"{flag}: this tokenizer has no token that ends an example")
    encoder = _Encoder(tokenizer, tokenizer.eod, options)
    tokens: list[NDArray[np.int32]] = []
    learned: list[NDArray[np.bool_]] = []
    divisible: list[bool] = []
    for name in find_files(words, flag):
        for record in read_records(name):
            try:
                found = encoder.encode_pair(record) if options.pairs else [encoder.encode(record)]
            except (BadRecord, ValueError, TypeError) as error:
                raise CorruptCheckpoint(f"{record.where}: {error}") from error
            for made in found:
                tokens.append(np.array(made.ids, np.int32))
                learned.append(np.array(made.learned, bool))
                divisible.append(isinstance(record.content, str))
    if not tokens:
        what = "pairs whose answers differ" if options.pairs else "examples"
        raise CorruptCheckpoint(f"{', '.join(words)}: there are no {what}")
    bounds = np.concatenate(([0], np.cumsum([len(ids) for ids in tokens], dtype=np.int64)))
    joined = np.concatenate(tokens), np.concatenate(learned), bounds, np.array(divisible, bool)
    return Examples(*joined, encoder.unread, encoder.plain_chats // (2 if options.pairs else 1), encoder.equal)


class _Encoder:
    def __init__(self, tokenizer: Tokenizer, eod: int, options: ReadingOptions) -> None:
        self._tokenizer, self._eod, self._options = tokenizer, eod, options
        self._template: ChatTemplate | None = None
        self.unread: Counter[str] = Counter()
        self.plain_chats = self.equal = 0

    def encode(self, record: Record) -> Encoded:
        """Raises BadRecord, and what tokenizers raise for a text that they can't have."""
        if isinstance(record.content, str):
            return self._plain(Plain("", record.content))
        reading = read_record(read_fields(record.content), self._options.finetune_form)
        self.unread.update(reading.unread)
        return self._example(reading.example)

    def encode_pair(self, record: Record) -> list[Encoded]:
        """Chosen and rejected; neither where they are the same. Raises as encode does."""
        if isinstance(record.content, str):
            raise BadRecord("is plain text; --dpo learns from records with a chosen and a rejected answer")
        pair = read_pair(read_fields(record.content))
        self.unread.update(pair.unread)
        chosen, rejected = self._example(pair.chosen), self._example(pair.rejected)
        if chosen.ids == rejected.ids:
            self.equal += 1
            return []
        if isinstance(pair.chosen, Plain) and not pair.chosen.given:  # what was asked is how both begin
            same = next(
                place for place, (one, other) in enumerate(zip_longest(chosen.ids, rejected.ids)) if one != other
            )
            return [Encoded(ids, [False] * same + [True] * (len(ids) - same)) for ids, _ in (chosen, rejected)]
        return [chosen, rejected]

    def _example(self, example: Chat | Plain) -> Encoded:
        if isinstance(example, Plain):
            return self._plain(example)
        if example.plain is not None and not self._has_template():
            self.plain_chats += 1
            return self._plain(example.plain)
        return self._chat(example)

    def _has_template(self) -> bool:
        own = isinstance(self._tokenizer, HuggingFaceTokenizer) and self._tokenizer.inner.chat_template
        return bool(own or self._options.chat_template)

    def _chat(self, chat: Chat) -> Encoded:
        if self._template is None:
            if not isinstance(self._tokenizer, HuggingFaceTokenizer):
                raise UsageError(
                    "chats need a Hugging Face tokenizer, with its chat template: --tokenizer-model DIRECTORY"
                )
            self._template = ChatTemplate(self._tokenizer, self._options.chat_template, self._options.finetune_turns)
        return self._template.encode(chat)

    def _plain(self, text: Plain) -> Encoded:
        """Begun and ended as the model expects it of a text, unless the text has it so already."""
        tokenize: Callable[[str], list[int]] = self._tokenizer.tokenize
        asked = tokenize(text.given) if text.given else []
        answer = tokenize(text.learned)
        if not answer:
            raise BadRecord("there is nothing to learn in it")
        begin = self._tokenizer.begin
        if (asked or answer)[: len(begin)] != begin:
            asked = [*begin, *asked]
        if answer[-1] != self._eod:
            answer = [*answer, self._eod]
        return Encoded(asked + answer, [False] * len(asked) + [True] * len(answer))
