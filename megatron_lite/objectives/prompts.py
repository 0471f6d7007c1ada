"""Prompts of --finetune-data, which a model completes. A record has TRL's form: `prompt`, a text or messages.

Its other fields are columns for reward functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from formats.wording import counted
from megaconv.errors import UsageError
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.encoding import BadRecord, read_fields
from megatron_lite.data.finetuning.forms import Message, listed, read_turns
from megatron_lite.data.finetuning.packing import shuffled_epochs
from megatron_lite.data.finetuning.record_images import has_place, lists_images
from megatron_lite.data.finetuning.records import Record, find_files, read_records
from megatron_lite.data.index_cache import cache_key
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import Tokenizer, has_chat_template
from megatron_lite.inference.prompts import encode, encode_chat
from megatron_lite.objectives.epochs import evaluations, training_length
from megatron_lite.objectives.rewards import Reward
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Fields that reward functions don't get as columns, as in TRL."""


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    where: str
    """File and line."""
    content: str | list[Message]
    ids: tuple[int, ...]
    columns: Mapping[str, Any]


def read_prompts(
    words: Sequence[str], tokenizer: Tokenizer, template: str | None, flag: str
) -> list[Prompt]:
    """Read all prompts. template: the text of a chat template; None: the tokenizer's own.

    Raises UsageError; CorruptCheckpoint with file and line for a record that is no prompt.
    """
    found: list[Prompt] = []
    for name in find_files(words, flag):
        for record in read_records(name):
            try:
                found.append(_read_prompt(record, tokenizer, template))
            except (BadRecord, UsageError) as error:
                raise CorruptCheckpoint(f"{record.where}: {error}") from error
    if not found:
        raise CorruptCheckpoint(f"{', '.join(words)}: there are no prompts")
    return found


def _read_prompt(record: Record, tokenizer: Tokenizer, template: str | None) -> Prompt:
    if isinstance(record.content, str):
        raise BadRecord('is plain text; --grpo reads JSON lines with a "prompt"')
    fields = read_fields(record.content)
    asked = fields.get("prompt")
    content: str | list[Message]
    if isinstance(asked, str) and asked:
        content, ids = asked, encode(tokenizer, asked)
    elif isinstance(asked, list):
        content = read_turns(fields, "prompt")
        if lists_images(fields) and has_place(content):
            raise BadRecord("has images; --grpo learns from texts alone")
        if template is None and not has_chat_template(tokenizer):
            raise BadRecord(
                "has messages, and the tokenizer has no chat template; give --chat-template"
            )
        ids = encode_chat(tokenizer, content, template=template)
    else:
        there = listed([name for name, value in fields.items() if value is not None])
        raise BadRecord(f'has {there or "no fields"}; its "prompt" should be a text or messages')
    if not ids:
        raise BadRecord('has no tokens in its "prompt"')
    columns = {name: value for name, value in fields.items() if name not in NOT_COLUMNS}
    return Prompt(record.where, content, ids, columns)


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
    """Prompts for training and, optionally, for evaluation, and the functions that judge completions."""

    train: Sequence[Prompt]
    valid: Sequence[Prompt]
    rewards: Sequence[Reward]
    completion: int
    """Most tokens of a completion."""

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts by number: first those for training."""
        return [*self.train, *self.valid]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest completion."""
        return max(len(prompt.ids) for prompt in self.prompts) + self.completion

    @property
    def tokens(self) -> int:
        """See TrainingData: the tokens of one completion of each prompt."""
        return len(self.train) * self.longest

    def fitted(
        self, settings: Settings, sizes: Sizes, progress: Progress, say: Say
    ) -> tuple[Settings, "PromptData"]:
        """See TrainingData.fitted. Raises UsageError for a prompt without room for a completion."""
        for prompt in self.prompts:
            length = len(prompt.ids)
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
        """See TrainingData.identity. It is a hash of all prompts, and of the columns that rewards read."""
        ids = [list(prompt.ids) for prompt in self.train]
        return cache_key(ids=ids, columns=[repr(dict(prompt.columns)) for prompt in self.train])

    def introduction(self, setup: Setup, dataset: Dataset | None) -> Iterator[str]:
        """Yield a summary of prompts and rewards."""
        grpo, batch = setup.settings.grpo, setup.sizes.batch.full
        steps = len(self.train) / batch
        plural = "" if steps == 1 else "s"
        completions = batch * grpo.num_generations
        yield (
            f"{counted(len(self.train), 'prompt')}, {grpo.num_generations} completions each of at most "
            f"{self.completion} tokens: {completions} completions a step, {steps:,.4g} step{plural} an epoch"
        )
        judged = ", ".join(f"{reward.weight:g} x {reward.word}" for reward in self.rewards)
        yield f"rewards: {judged}"
