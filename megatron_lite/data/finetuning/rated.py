"""Answers that are rated good or bad, for KTO: examples whose question is not learned.

| question and answer | rating | by |
|---|---|---|
| `prompt` and `completion`, texts or messages | `label`, true or false | TRL |
| `messages` or `conversations`, whose last message is the answer | `label` | LLaMA-Factory |
| `instruction` and `output`; `input`, `system` | `label` | LLaMA-Factory |
| a pair: `chosen` is good, `rejected` bad (pairs.py) | | TRL |

Messages may have images (record_images.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.forms import Chat, Plain, listed, read_record
from megatron_lite.data.finetuning.pairs import ANSWERS, with_answer

LABEL = "label"
"""The field with the rating."""
_OWN_ANSWER = "completion"
"""The field with an answer that is apart from its question."""


class Rated(NamedTuple):
    """A question with a rated answer."""

    answer: Chat | Plain
    is_good: bool
    unread: frozenset[str]
    """Fields that are not content."""


def read_rated(record: Mapping[str, Any]) -> Rated:
    """Read an answer with its rating. Raises BadRecord with the field's name for any other record."""
    there = {name: value for name, value in record.items() if value is not None}
    is_good = _rating(there)
    own = there.get(_OWN_ANSWER)
    reading = read_record(there if own is None else with_answer(there, _OWN_ANSWER))
    turns = len(own) if isinstance(own, list) else 1
    answer = _with_question(_with_answer_of(reading.example, turns))
    return Rated(answer, is_good, reading.unread - {LABEL})


def is_pair(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a pair, or a part of one."""
    return any(record.get(name) is not None for name in ANSWERS)


def _rating(record: Mapping[str, Any]) -> bool:
    if LABEL not in record:
        raise BadRecord(
            f'has {listed(record) or "no fields"}, but no "{LABEL}": an answer is rated true (good) or false (bad)'
        )
    value = record[LABEL]
    if value not in (0, 1):
        raise BadRecord(f'its "{LABEL}" has to be true or false, found {value!r:.40}')
    return bool(value)


def _with_answer_of(example: Chat | Plain, turns: int) -> Chat | Plain:
    """Return the example, of whose messages only the last ones are the answer. Raises BadRecord if they are no answer.

    turns: number of the answer's messages.
    """
    if isinstance(example, Plain):
        return example
    messages = example.messages
    if messages[-1]["role"] != "assistant":
        raise BadRecord(
            "its last message is not the assistant's: that one is the answer that is rated"
        )
    if len(messages) == turns:
        raise BadRecord("has an answer without a question")
    return replace(example, given=len(messages) - turns)


def _with_question(example: Chat | Plain) -> Chat | Plain:
    """Return the example. Raises BadRecord for a text without a question."""
    if isinstance(example, Plain) and not example.given:
        raise BadRecord(
            'has an answer without a question; expected "prompt" and "completion", or messages'
        )
    return example
