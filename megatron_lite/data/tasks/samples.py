"""Texts as tokens: `[CLS] first [SEP] second [SEP]`, truncated at the sequence's length but always ending with [SEP]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.tasks.examples import Example, Task

Array = NDArray[np.int64]


class TaskSample(NamedTuple):
    """text, types and padding_mask: [length], or [choices, length] for multiple choice. The names are Megatron's."""

    text: Array
    types: Array
    """0: [CLS], the first text and its [SEP]; 1: the second text and the last [SEP].

    As in Megatron, the remaining positions have the padding token.
    """
    padding_mask: Array
    label: int
    counts: int = 1
    """0 for a sample that only fills up a batch."""


@dataclass(frozen=True)
class Sequences:
    """Converts a task's examples to sequences of tokens."""

    task: Task
    tokenize: Callable[[str], Sequence[int]]
    cls: int
    sep: int
    pad: int
    length: int

    def sample(self, example: Example) -> TaskSample:
        """Return the sample of an example."""
        second = self.tokenize(example.second)
        rows = [
            self._row(self.tokenize(first)[: self.task.longest_first], second)
            for first in example.firsts
        ]
        text, types, mask = np.array(rows, np.int64).transpose(1, 0, 2)
        if self.task.rows == 1:
            text, types, mask = text[0], types[0], mask[0]
        return TaskSample(text, types, mask, example.label)

    def _row(
        self, first: Sequence[int], second: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        tokens = [self.cls, *first, self.sep, *second]
        types = [0] * (len(first) + 2) + [1] * len(second)
        # Every row ends with a separator, truncated or not.
        tokens = [*tokens[: self.length - 1], self.sep]
        types = [*types[: self.length - 1], 1]
        padding = self.length - len(tokens)
        return (
            tokens + [self.pad] * padding,
            types + [self.pad] * padding,
            [1] * len(tokens) + [0] * padding,
        )
