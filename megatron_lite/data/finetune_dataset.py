"""`--finetune-data`: examples to learn from, several packed into a sample; none is split in two, and none sees another.

{"prompt": …, "completion": …}      learns the completion and the end, not the prompt; also "input" and "output"
{"text": …}                          learns all of it
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.encoding import BadRecord, read_fields
from megatron_lite.data.samples import Sample
from megatron_lite.data.text_files import find_inputs, read_batches
from megatron_lite.data.tokenizer import Tokenizer

PAIRS = (("prompt", "completion"), ("input", "output"))


@dataclass(frozen=True)
class Examples:
    """All of them end to end, in memory."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """Whether a token is to be predicted."""
    bounds: NDArray[np.int64]
    """Example k is tokens bounds[k] to bounds[k + 1]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1


def read_examples(inputs: Sequence[str], tokenizer: Tokenizer) -> Examples:
    """Raises CorruptCheckpoint, naming file and line, for one that is no example."""
    if tokenizer.eod is None:
        raise UsageError("--finetune-data: this tokenizer has no token that ends an example")
    tokens: list[NDArray[np.int32]] = []
    learned: list[NDArray[np.bool_]] = []
    for batch in read_batches(find_inputs(inputs), ()):
        for number, record in enumerate(batch.records, batch.first):
            if isinstance(record, bytes) and not record.strip():
                continue
            try:
                prompt, rest = _texts(read_fields(record))
                asked, answer = tokenizer.tokenize(prompt) if prompt else [], tokenizer.tokenize(rest)
            except (BadRecord, ValueError, TypeError) as error:
                raise CorruptCheckpoint(f"{batch.source}:{number}: {error}") from error
            if not answer:
                raise CorruptCheckpoint(f"{batch.source}:{number}: there is nothing to learn in it")
            ids = np.array([*asked, *answer, tokenizer.eod], np.int32)
            tokens.append(ids)
            learned.append(np.arange(len(ids)) >= len(asked))
    if not tokens:
        raise CorruptCheckpoint(f"{', '.join(inputs)}: there are no examples")
    bounds = np.concatenate(([0], np.cumsum([len(ids) for ids in tokens], dtype=np.int64)))
    return Examples(np.concatenate(tokens), np.concatenate(learned), bounds)


def _texts(fields: Mapping[str, Any]) -> tuple[str, str]:
    """(what is given, what is learned)."""
    for first, second in PAIRS:
        if isinstance(fields.get(first), str) and isinstance(fields.get(second), str):
            return fields[first], fields[second]
    if isinstance(fields.get("text"), str):
        return "", fields["text"]
    raise BadRecord('has neither "text" nor "prompt" and "completion"')


class FinetuneDataset:
    """Samples of whole examples; what doesn't fill a sample counts for nothing, what is longer is truncated."""

    def __init__(
        self, examples: Examples, members: NDArray[np.int32], seq_length: int, samples: int | None, seed: int
    ) -> None:
        """members: numbers of the examples that belong to this part. samples: how many will be drawn; None: one epoch."""
        self._examples, self._seq_length = examples, seq_length
        sizes = np.minimum(np.diff(examples.bounds), seq_length + 1)
        random = np.random.RandomState(seed)
        self._packs: list[list[int]] = []
        while not self._packs or (samples is not None and len(self._packs) < samples):
            self._packs += _packed(random.permutation(members).tolist(), sizes, seq_length)

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> Sample:
        tokens, labels, position_ids = (np.zeros(self._seq_length, np.int64) for _ in range(3))
        loss_mask = np.zeros(self._seq_length, np.float32)
        documents = np.full(self._seq_length, len(self._packs[index]), np.int32)  # the rest is one of its own
        start = 0
        for ordinal, number in enumerate(self._packs[index]):
            first = int(self._examples.bounds[number])
            last = min(int(self._examples.bounds[number + 1]), first + self._seq_length + 1)
            place = slice(start, start + last - first - 1)
            tokens[place] = self._examples.tokens[first : last - 1]
            labels[place] = self._examples.tokens[first + 1 : last]
            loss_mask[place] = self._examples.learned[first + 1 : last]
            position_ids[place] = np.arange(last - first - 1)
            documents[place] = ordinal
            start = place.stop
        position_ids[start:] = np.arange(self._seq_length - start)
        return Sample(tokens, labels, loss_mask, position_ids, documents)


def _packed(order: Sequence[int], sizes: NDArray[np.int64], seq_length: int) -> Iterator[list[int]]:
    """Examples in order, as many to a sample as there is room for. An example of n tokens takes n - 1."""
    pack: list[int] = []
    room = seq_length
    for number in order:
        taken = int(sizes[number]) - 1
        if taken > room:
            yield pack
            pack, room = [], seq_length
        pack.append(number)
        room -= taken
    if pack:
        yield pack
