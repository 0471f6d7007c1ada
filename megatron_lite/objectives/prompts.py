"""Prompts of --finetune-data, which a model completes. A record has TRL's form: `prompt`, a text or messages.

Its other fields are columns for reward functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from formats.wording import counted
from megaconv.errors import UsageError
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.encoding import BadRecord, read_fields
from megatron_lite.data.finetuning.chat import read_template
from megatron_lite.data.finetuning.forms import IMAGES, Chat, Message, listed, read_turns
from megatron_lite.data.finetuning.packing import shuffled_epochs
from megatron_lite.data.finetuning.record_images import has_place, lists_images, with_images
from megatron_lite.data.finetuning.records import Record, find_files, read_records
from megatron_lite.data.images.files import read_image
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.index_cache import cache_key
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer, has_chat_template
from megatron_lite.inference.gallery import Picture, unencoded, words_of
from megatron_lite.inference.prompts import encode, encode_chat
from megatron_lite.objectives.epochs import evaluations, training_length
from megatron_lite.objectives.rewards import Reward
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.completion_flags import limits_without_effect
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Fields that reward functions don't get as columns, as in TRL."""


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    where: str
    """File and line."""
    content: str | Sequence[Message]
    tokens: NDArray[np.int64]
    """Those of images are as in inference/image_tokens.py."""
    columns: Mapping[str, Any]
    pictures: tuple[Picture, ...] = ()
    """Its images, without vectors."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens as a request has them."""
        return tuple(self.tokens.tolist())


def prompts_of(
    settings: Settings, tokenizer: Tokenizer, reader: ImageReader | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Read the prompts for training, and those for evaluation. Raises UsageError, CorruptCheckpoint."""
    data = settings.data
    template = read_template(data.chat_template)
    words, flag = data.finetune_data or (), "--finetune-data"
    train = read_prompts(words, tokenizer, template, flag, reader)
    if not data.valid_finetune_data:
        return train, []
    words, flag = data.valid_finetune_data, "--valid-finetune-data"
    return train, read_prompts(words, tokenizer, template, flag, reader)


def read_prompts(
    words: Sequence[str],
    tokenizer: Tokenizer,
    template: str | None,
    flag: str,
    reader: ImageReader | None = None,
) -> list[Prompt]:
    """Read all prompts. template: the text of a chat template; None: the tokenizer's own. reader: of images in messages.

    Raises UsageError; CorruptCheckpoint with file and line for a record that is no prompt.
    """
    encoder = _Encoder(tokenizer, template, reader)
    found: list[Prompt] = []
    for name in find_files(words, flag):
        for record in read_records(name):
            try:
                found.append(encoder.read(record, Path(name).parent))
            except (BadRecord, UsageError) as error:
                raise CorruptCheckpoint(f"{record.where}: {error}") from error
    if not found:
        raise CorruptCheckpoint(f"{', '.join(words)}: there are no prompts")
    return found


@dataclass(frozen=True)
class _Encoder:
    """Encodes prompts."""

    tokenizer: Tokenizer
    template: str | None
    reader: ImageReader | None

    def read(self, record: Record, directory: Path) -> Prompt:
        """Return the prompt of a record. directory: of its file. Raises BadRecord, UsageError."""
        if isinstance(record.content, str):
            raise BadRecord('is plain text; prompts are JSON lines with a "prompt"')
        fields = read_fields(record.content)
        asked = fields.get("prompt")
        content: str | Sequence[Message]
        pictures: tuple[Picture, ...] = ()
        if isinstance(asked, str) and asked:
            content, ids = asked, self._text(asked, fields)
        elif isinstance(asked, list):
            chat = self._chat(fields)
            pictures = self._pictures(chat, record.where, directory)
            content, ids = chat.messages, self._ids(chat.messages, pictures)
        else:
            there = listed([name for name, value in fields.items() if value is not None])
            raise BadRecord(
                f'has {there or "no fields"}; its "prompt" should be a text or messages'
            )
        if not ids:
            raise BadRecord('has no tokens in its "prompt"')
        columns = {name: value for name, value in fields.items() if name not in NOT_COLUMNS}
        return Prompt(record.where, content, np.array(ids, np.int64), columns, pictures)

    def _text(self, asked: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
        if self.reader is not None and lists_images(fields):
            raise BadRecord(
                'has images, but no messages where they could be; expected a list as "prompt"'
            )
        return encode(self.tokenizer, asked)

    def _chat(self, fields: Mapping[str, Any]) -> Chat:
        """Return the messages, with parts for images."""
        messages = read_turns(fields, "prompt", images=True)
        if self.reader is not None:
            return with_images(Chat(messages), fields)
        has_parts = any(not isinstance(message["content"], str) for message in messages)
        if has_parts or (lists_images(fields) and has_place(messages)):
            raise BadRecord(
                "has images, and the model of this run reads text alone; --image-encoder DIRECTORY names a multimodal model "
                "that reads them"
            )
        return Chat(messages)

    def _pictures(self, chat: Chat, where: str, directory: Path) -> tuple[Picture, ...]:
        """Return the images of a chat, which get numbers. where: its record."""
        if self.reader is None or not chat.images:
            return ()
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            raise BadRecord(
                "has images, which need a Hugging Face tokenizer: --tokenizer-model DIRECTORY"
            )
        words, several = words_of(self.reader, self.tokenizer), len(chat.images) > 1
        pictures = []
        for given in chat.images:
            file = read_image(given, directory)
            number, written = self.reader.add(file, words, where, several)
            pictures.append(unencoded(self.reader, words, file, number, written))
        return tuple(pictures)

    def _ids(self, messages: Sequence[Message], pictures: Sequence[Picture]) -> tuple[int, ...]:
        if self.template is None and not has_chat_template(self.tokenizer):
            raise BadRecord(
                "has messages, and the tokenizer has no chat template; give --chat-template"
            )
        return encode_chat(self.tokenizer, messages, template=self.template, pictures=pictures)


class PromptSample(NamedTuple):
    """One sample."""

    number: NDArray[np.int64]
    """[]: the number of its prompt."""


@dataclass(frozen=True)
class PromptDataset:
    """Prompts by their number, in the order of samples."""

    order: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> PromptSample:
        return PromptSample(np.asarray(self.order[index]))


@dataclass(frozen=True)
class PromptData(TrainingData):
    """Prompts for training and, optionally, for evaluation, and the functions that judge completions, if any."""

    train: Sequence[Prompt]
    valid: Sequence[Prompt]
    rewards: Sequence[Reward]
    completion: int
    """Most tokens of a completion."""
    generations: int
    """Completions of a prompt."""
    images: ImageReader | None = None
    """Reads images; None for a model of texts."""

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts by number: first those for training."""
        return [*self.train, *self.valid]

    @property
    def reader(self) -> ImageReader | None:
        """See TrainingData."""
        return self.images if any(prompt.pictures for prompt in self.prompts) else None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest completion."""
        return max(len(prompt.tokens) for prompt in self.prompts) + self.completion

    @property
    def tokens(self) -> int:
        """See TrainingData: the tokens of one completion of each prompt."""
        return len(self.train) * self.longest

    def fitted(
        self, settings: Settings, sizes: Sizes, progress: Progress, say: Say
    ) -> tuple[Settings, "PromptData"]:
        """See TrainingData.fitted. Raises UsageError for a prompt without room for a completion."""
        for prompt in self.prompts:
            length = len(prompt.tokens)
            if length + self.completion > sizes.seq:
                raise UsageError(
                    f"{prompt.where}: {length} tokens and --max-completion-length {self.completion} exceed "
                    f"--seq-length {sizes.seq}; raise it, or shorten one of them"
                )

        def train(epochs: int) -> int:
            return epochs * len(self.train)

        def valid(epochs: int) -> int:
            return epochs * len(self.valid)

        length_settings = training_length(settings, sizes, train, progress)
        chosen = evaluations(settings, sizes, train, valid if self.valid else None, say)
        training = replace(settings.training, **length_settings, **chosen)
        return replace(settings, training=training), self

    def datasets(self, setup: Setup, samples: Sequence[int]) -> list[Dataset | None]:
        seed = setup.settings.training.seed
        train = np.arange(len(self.train))
        valid = np.arange(len(self.train), len(self.prompts))
        has_evaluation = bool(len(valid) and samples[1])
        return [
            PromptDataset(shuffled_epochs(train, samples[0], seed)),
            PromptDataset(shuffled_epochs(valid, samples[1], seed)) if has_evaluation else None,
            None,
        ]

    def identity(self, setup: Setup) -> str:
        """See TrainingData.identity. It is a hash of all prompts, and of the columns that rewards read, without images."""
        columns = [
            repr({name: value for name, value in prompt.columns.items() if name not in IMAGES})
            for prompt in self.train
        ]
        return cache_key(
            tokens=np.concatenate([prompt.tokens for prompt in self.train]),
            lengths=np.array([len(prompt.tokens) for prompt in self.train]),
            columns=columns,
        )

    def introduction(self, setup: Setup, dataset: Dataset | None) -> Iterator[str]:
        """Yield a summary of prompts and rewards."""
        batch = setup.sizes.batch.full
        steps = len(self.train) / batch
        plural = "" if steps == 1 else "s"
        each, of_step = self.generations, batch * self.generations
        yield (
            f"{self._prompts()}, {counted(each, 'completion')} each of at most {self.completion} tokens: "
            f"{counted(of_step, 'completion')} a step, {steps:,.4g} step{plural} an epoch"
        )
        if self.rewards:
            judged = ", ".join(f"{reward.weight:g} x {reward.word}" for reward in self.rewards)
            yield f"rewards: {judged}"
        unused = limits_without_effect(setup.settings)
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            yield (
                f"notice: {' and '.join(unused)} {verb} no effect with --num-iterations 1: completions are learned once, while their "
                "probability ratios are 1"
            )

    def _prompts(self) -> str:
        """Return a text such as `4 prompts with 3 images`."""
        prompts = counted(len(self.train), "prompt")
        images = sum(len(prompt.pictures) for prompt in self.train)
        return f"{prompts} with {counted(images, 'image')}" if images else prompts
