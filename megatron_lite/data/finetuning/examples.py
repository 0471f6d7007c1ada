"""All examples as tokens in memory, with a mark on learned tokens."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.encoding import (
    HALF_CHARACTER,
    BadRecord,
    has_half_character,
    read_fields,
)
from megatron_lite.data.finetuning.chat import ChatTemplate, Encoded
from megatron_lite.data.finetuning.forms import IMAGES, Chat, Plain, read_record
from megatron_lite.data.finetuning.image_chat import (
    Illustrated,
    Stored,
    has_images,
    with_places,
    without_images,
)
from megatron_lite.data.finetuning.image_texts import ImageTexts
from megatron_lite.data.finetuning.other_answers import with_other_answers
from megatron_lite.data.finetuning.pairs import MARGIN, Pair, read_margin, read_pair
from megatron_lite.data.finetuning.rated import LABEL, is_pair, read_rated
from megatron_lite.data.finetuning.record_images import has_place, lists_images, with_images
from megatron_lite.data.finetuning.records import Record, find_files, read_records
from megatron_lite.data.images.files import read_image
from megatron_lite.data.images.places import Images, Placed
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.images.written import Written, numbered
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer, has_chat_template


@dataclass(frozen=True)
class ReadingOptions:
    """Each field is a flag."""

    finetune_form: str | None = None
    finetune_turns: str = "all"
    chat_template: str | None = None
    """The template's text, which replaces the tokenizer's own template."""
    pairs: bool = False
    """Records are pairs of answers. Examples then come in pairs, the chosen one first."""
    margins: bool = False
    """Read the margins of pairs."""
    rated: bool = False
    """Records are answers with ratings. Each example is then followed by its question with another answer."""
    images: ImageReader | None = None
    """Reads images in messages; None: records with images are refused."""


@dataclass(frozen=True)
class Examples:
    """All examples of a finetuning dataset."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """True for a token to be predicted."""
    bounds: NDArray[np.int64]
    """Example k is tokens bounds[k] to bounds[k + 1]."""
    divisible: NDArray[np.bool_]
    """True if an example that is too long for a sample continues in the next one: a plain text.

    Other examples are truncated.
    """
    unread: Counter[str] = field(default_factory=Counter)
    """Fields that are not content -> number of records that have them."""
    plain_chats: int = 0
    """Number of instructions written as plain text, because the tokenizer has no chat template."""
    equal: int = 0
    """Number of pairs left out because both answers are the same."""
    ratings: int = 0
    """Number of records with a rating that is not read."""
    margins: NDArray[np.float64] | None = None
    """[pairs], 0 for a pair without a margin; None if no pair has one, or if margins are not read."""
    good: NDArray[np.bool_] | None = None
    """[answers]: the ratings of answers, each of which is the first example of two; None if answers are not rated."""
    images: Images | None = None
    """None for a model that reads no images."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest example that can't be divided; 0 if there is none."""
        return int(np.diff(self.bounds)[~self.divisible].max(initial=0))


def read_examples(
    words: Sequence[str],
    tokenizer: Tokenizer,
    options: ReadingOptions = ReadingOptions(),  # frozen
    flag: str = "--finetune-data",
) -> Examples:
    """Read all examples. Raises UsageError; CorruptCheckpoint with file and line for a record that is not an example."""
    if tokenizer.eod is None:
        raise UsageError(
            f"{flag}: this tokenizer has no token that ends an example; name one as eos_token in its tokenizer_config.json"
        )
    encoder = _Encoder(tokenizer, tokenizer.eod, options)
    examples: list[Stored] = []
    divisible: list[bool] = []
    for name in find_files(words, flag):
        for record in read_records(name):
            try:
                found = encoder.read(record, Path(name).parent)
            except (BadRecord, ValueError, TypeError) as error:
                raise CorruptCheckpoint(f"{record.where}: {_reason(record, error)}") from error
            examples += map(Stored.of, found)
            divisible += [isinstance(record.content, str)] * len(found)
    if not examples:
        what = "pairs whose answers differ" if options.pairs else "examples"
        raise CorruptCheckpoint(f"{', '.join(words)}: there are no {what}")
    if options.rated:
        try:
            examples = with_other_answers(examples, options.images)
        except BadRecord as error:
            raise CorruptCheckpoint(f"{', '.join(words)}: {error}") from error
        divisible = [False] * len(examples)
    lengths = [len(example.tokens) for example in examples]
    bounds = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return Examples(
        np.concatenate([example.tokens for example in examples]),
        np.concatenate([example.learned for example in examples]),
        bounds,
        np.array(divisible, bool),
        encoder.unread,
        encoder.plain_chats // (2 if options.pairs else 1),
        encoder.equal,
        encoder.ratings,
        _filled(encoder.margins),
        np.array(encoder.good, bool) if options.rated else None,
        None if options.images is None else Images.of(options.images, _placed(examples, bounds)),
    )


def _placed(examples: Sequence[Stored], bounds: NDArray[np.int64]) -> list[Placed]:
    """Return the images of all examples, with their places among all tokens. bounds: see Examples."""
    return [
        image._replace(start=first + image.start)
        for example, first in zip(examples, bounds[:-1].tolist(), strict=True)
        for image in example.images
    ]


def _filled(margins: Sequence[float | None]) -> NDArray[np.float64] | None:
    """Return the margins with 0 for None; None if all are None."""
    if all(margin is None for margin in margins):
        return None
    return np.array([margin or 0.0 for margin in margins])


def _reason(record: Record, error: Exception) -> object:
    """The reason why a record is not an example: a tokenizer's own message about half a character doesn't name it."""
    try:
        fields = record.content if isinstance(record.content, str) else read_fields(record.content)
    except BadRecord:
        return error
    return HALF_CHARACTER if has_half_character(fields) else error


class _Shown(NamedTuple):
    """The images of a chat."""

    images: Sequence[tuple[int, Written]]
    """The number and the text of each."""
    texts: ImageTexts


class _Encoder:
    def __init__(self, tokenizer: Tokenizer, eod: int, options: ReadingOptions) -> None:
        self._tokenizer, self._eod, self._options = tokenizer, eod, options
        self._template: ChatTemplate | None = None
        self.unread: Counter[str] = Counter()
        self.plain_chats = self.equal = self.ratings = 0
        self.margins: list[float | None] = []
        """The margins of the pairs that are not left out."""
        self.good: list[bool] = []
        """The ratings of all answers."""

    def read(self, record: Record, directory: Path) -> list[Illustrated]:
        """Return the examples of a record: one, or the two answers of a pair. directory: of its file.

        Raises BadRecord, and the tokenizer's errors for a text that it refuses.
        """
        if self._options.pairs:
            return self._encode_pair(record, directory)
        if self._options.rated:
            return self._encode_rated(record, directory)
        return [self._encode(record, directory)]

    def _encode(self, record: Record, directory: Path) -> Illustrated:
        """Encode a record that may have images if the model reads them."""
        reader = self._options.images
        if isinstance(record.content, str):
            made = self._plain(Plain("", record.content))
            return Illustrated(made) if reader is None else without_images(made, reader.token)
        fields = read_fields(record.content)
        reading = read_record(fields, self._options.finetune_form)
        self._note_unread(reading.unread)
        self.ratings += isinstance(fields.get(LABEL), bool)
        if reader is None:
            _refuse_images(reading.example, fields)
            return Illustrated(self._example(reading.example))
        return self._illustrated(reading.example, fields, record, directory)

    def _illustrated(
        self, example: Chat | Plain, fields: Mapping[str, Any], record: Record, directory: Path
    ) -> Illustrated:
        """Encode an example that may have images. fields: of its record."""
        reader = self._options.images
        assert reader is not None
        if isinstance(example, Plain):
            _refuse_listed_images(fields)
            return without_images(self._plain(example), reader.token)
        chat = with_images(example, fields)
        if not chat.images:
            return without_images(self._example(chat), reader.token)
        return self._encode_shown(chat, self._shown(chat, record, directory), reader.token)

    def _shown(self, chat: Chat, record: Record, directory: Path) -> _Shown:
        """Return the images of a chat, which get numbers."""
        reader = self._options.images
        assert reader is not None
        kind = reader.require_kind()
        words = kind.words_of(reader.config, self._chat_template().spelled)
        files = [read_image(given, directory) for given in chat.images]
        several = len(files) > 1
        images = [reader.add(file, words, record.where, several) for file in files]
        texts = numbered(image for _, image in images)
        return _Shown(images, ImageTexts(kind.placeholder(words), texts, words.image))

    def _encode_shown(self, chat: Chat, shown: _Shown, token: int) -> Illustrated:
        """Encode a chat that has images. token: stands for each part of an image."""
        return with_places(self._chat_template().encode(chat, shown.texts), shown.images, token)

    def _encode_pair(self, record: Record, directory: Path) -> list[Illustrated]:
        """Return the chosen and the rejected answer, or [] if they are equal."""
        if isinstance(record.content, str):
            raise BadRecord("is plain text; pairs are records with a chosen and a rejected answer")
        fields = read_fields(record.content)
        pair = read_pair(fields)
        margin = read_margin(fields) if self._options.margins else None
        self._note_unread(pair.unread)
        answers = self._answers(pair, fields, record, directory)
        chosen, rejected = (answer.text for answer in answers)
        if chosen.ids == rejected.ids:
            self.equal += 1
            return []
        self.margins.append(margin)
        if isinstance(pair.chosen, Plain) and not pair.chosen.given:
            # The common beginning of both texts is the question.
            both = zip_longest(chosen.ids, rejected.ids)
            question = next(place for place, (one, other) in enumerate(both) if one != other)
            return [Illustrated(_with_question(each.ids, question)) for each in (chosen, rejected)]
        if _prompt(chosen) != _prompt(rejected):
            raise BadRecord(
                'the chat template writes different prompts for "chosen" and "rejected", because it rewrites earlier turns; '
                "leave the thinking of earlier turns out, or give --chat-template FILE with a template that keeps earlier turns"
            )
        return answers

    def _encode_rated(self, record: Record, directory: Path) -> list[Illustrated]:
        """Return the rated answers of a record: one, or the two of a pair, which are good and bad."""
        if isinstance(record.content, str):
            raise BadRecord(
                "is plain text; rated answers are records with a question and an answer"
            )
        fields = read_fields(record.content)
        if is_pair(fields):
            answers = self._encode_pair(record, directory)
            self.good += [True, False] if answers else []
            return answers
        rated = read_rated(fields)
        self._note_unread(rated.unread)
        self.good.append(rated.is_good)
        if self._options.images is None:
            _refuse_images_of_answers([rated.answer], fields)
            return [Illustrated(self._example(rated.answer))]
        return [self._illustrated(rated.answer, fields, record, directory)]

    def _note_unread(self, fields: frozenset[str]) -> None:
        """Count the fields of a record that are not read. fields: those that are not content."""
        margin = {MARGIN} if self._options.margins else set()
        images = set(IMAGES) if self._options.images is not None else set()
        self.unread.update(fields - margin - images)

    def _answers(
        self, pair: Pair, fields: Mapping[str, Any], record: Record, directory: Path
    ) -> list[Illustrated]:
        """Encode both answers with their question. Usually they have the same images, which get one number each."""
        reader, answers = self._options.images, (pair.chosen, pair.rejected)
        if reader is None:
            _refuse_images_of_answers(answers, fields)
            return [Illustrated(self._example(answer)) for answer in answers]
        if isinstance(pair.chosen, Plain) or isinstance(pair.rejected, Plain):
            _refuse_listed_images(fields)
            return [without_images(self._example(answer), reader.token) for answer in answers]
        chosen, rejected = with_images(pair.chosen, fields), with_images(pair.rejected, fields)
        if not chosen.images and not rejected.images:
            return [
                without_images(self._example(chat), reader.token) for chat in (chosen, rejected)
            ]
        of_chosen = of_rejected = self._shown(chosen, record, directory)
        if rejected.images != chosen.images:
            of_rejected = self._shown(rejected, record, directory)
        return [
            self._encode_shown(chosen, of_chosen, reader.token),
            self._encode_shown(rejected, of_rejected, reader.token),
        ]

    def _example(self, example: Chat | Plain) -> Encoded:
        if isinstance(example, Plain):
            return self._plain(example)
        if example.plain is not None and not self._has_template():
            self.plain_chats += 1
            return self._plain(example.plain)
        return self._chat_template().encode(example)

    def _has_template(self) -> bool:
        return bool(self._options.chat_template) or has_chat_template(self._tokenizer)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            if not isinstance(self._tokenizer, HuggingFaceTokenizer):
                raise UsageError(
                    "chats need a Hugging Face tokenizer, with its chat template: --tokenizer-model DIRECTORY"
                )
            self._template = ChatTemplate(
                self._tokenizer,
                self._options.chat_template,
                self._options.finetune_turns,
                pairs=self._options.pairs or self._options.rated,
            )
        return self._template

    def _plain(self, text: Plain) -> Encoded:
        """Encode a plain text, with the model's begin and end tokens unless the text has them already."""
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


def _refuse_images(example: Chat | Plain, fields: Mapping[str, Any]) -> None:
    """Raise BadRecord for a chat with an image. A field of images alone may be about something else."""
    if not isinstance(example, Chat):
        return
    if has_images(example) or (lists_images(fields) and has_place(example.messages)):
        raise BadRecord(
            "has an image, and the model of this run reads text alone; --image-encoder DIRECTORY names a multimodal model that reads it"
        )


def _refuse_images_of_answers(answers: Sequence[Chat | Plain], fields: Mapping[str, Any]) -> None:
    """Raise BadRecord for compared or rated answers with an image."""
    if lists_images(fields) or any(isinstance(each, Chat) and has_images(each) for each in answers):
        raise BadRecord(
            "has images, and this run reads texts alone; it reads images too if --load or --image-encoder names a multimodal model"
        )


def _refuse_listed_images(fields: Mapping[str, Any]) -> None:
    if lists_images(fields):
        raise BadRecord('has images, but no messages where they could be; expected "messages"')


def _prompt(example: Encoded) -> list[int]:
    """Return the tokens before the first learned one."""
    return example.ids[: example.learned.index(True)]


def _with_question(ids: list[int], question: int) -> Encoded:
    """Return a text whose first tokens are the question, which is not learned. question: number of these tokens."""
    learned = [False] * question + [True] * (len(ids) - question)
    return Encoded(ids, learned)
