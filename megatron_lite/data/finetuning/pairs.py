"""Pairs of a preferred and a rejected answer: two examples with a common beginning that is not learned.

| question | `chosen` and `rejected` | by |
|---|---|---|
| `prompt`, text | texts | TRL |
| `prompt`, messages | messages | TRL |
| none | conversations or texts with a common beginning | TRL, Anthropic |
| `prompt`, the text of a message | conversations that contain it | UltraFeedback |
| `instruction`; `input`, `system` | texts | LLaMA-Factory |
| `question`; `system` | texts | Orca |
| `conversations` or `messages` | one or several messages | LLaMA-Factory |

Messages may have images (record_images.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.forms import (
    Chat,
    Message,
    Plain,
    listed,
    read_message,
    read_record,
    read_turns,
)

ANSWERS = ("chosen", "rejected")
MARGIN = "margin"
"""The field with the difference that a reward model's scores of both answers should exceed, as TRL names it."""
_LARGEST_MARGIN = 3.4e38
"""About the largest number of float32."""


class Pair(NamedTuple):
    """Two answers to the same question."""

    chosen: Chat | Plain
    rejected: Chat | Plain
    unread: frozenset[str]
    """Fields that are not content."""


def read_pair(record: Mapping[str, Any]) -> Pair:
    """Read a pair.

    Raises BadRecord with the field's name for a record that is no pair, or for content that would be left out.
    """
    there = {name: value for name, value in record.items() if value is not None}
    missing = [name for name in ANSWERS if name not in there]
    if missing:
        raise BadRecord(
            f"has {listed(there) or 'no fields'}, but no {listed(missing)}: a pair has a chosen and a rejected answer"
        )
    empty = [name for name in ANSWERS if not there[name] and isinstance(there[name], str)]
    if empty:
        raise BadRecord(f"its {listed(empty)} is empty")
    if there.get("messages") in (there["chosen"], []):
        # Some datasets repeat the chosen conversation for finetuning.
        del there["messages"]
    chosen, rejected = (read_record(with_answer(there, name)) for name in ANSWERS)
    if isinstance(chosen.example, Chat) and isinstance(rejected.example, Chat):
        return Pair(*_with_common_beginning(chosen.example, rejected.example), chosen.unread)
    if type(chosen.example) is not type(rejected.example):
        raise BadRecord(
            'its "chosen" is a text and its "rejected" messages, or the other way round'
        )
    return Pair(chosen.example, rejected.example, chosen.unread)


def read_margin(record: Mapping[str, Any]) -> float | None:
    """Return the margin of a pair, or None if it has none. Raises BadRecord for a value that is no finite number."""
    value = record.get(MARGIN)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _LARGEST_MARGIN:
        raise BadRecord(f'its "{MARGIN}" has to be a finite number, found {value!r:.40}')
    return float(value)


def with_answer(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a record in a form that finetuning reads: the question and one of its answers, which is in a field."""
    answer = record[name]
    where = f'its "{name}"'
    asked = {}
    for field, value in record.items():
        if field not in (*ANSWERS, name):
            asked[field] = value
    if isinstance(answer, str):
        return _with_text(asked, answer)
    if isinstance(answer, list):
        turns = read_turns(record, name, images=True)
    elif isinstance(answer, Mapping):
        turns = [read_message(answer, where, images=True)]
    else:
        kind = type(answer).__name__
        raise BadRecord(f"{where} should be text or messages, found {kind}")
    return _with_turns(asked, turns, name)


def _with_text(asked: dict[str, Any], answer: str) -> dict[str, Any]:
    if isinstance(asked.get("prompt"), str):
        return {**asked, "completion": answer}
    if "instruction" in asked:
        return {**asked, "output": answer}
    if "question" in asked:
        question = asked.pop("question")
        return {**asked, "instruction": question, "output": answer}
    if "prompt" in asked or "conversations" in asked or "messages" in asked:
        return _with_turns(asked, [{"role": "assistant", "content": answer}], "")
    return {**asked, "text": answer}


def _with_turns(asked: dict[str, Any], turns: list[Message], name: str) -> dict[str, Any]:
    prompt = asked.pop("prompt", None)
    if isinstance(prompt, str):
        if turns[0]["role"] == "assistant":
            question: Message = {"role": "user", "content": prompt}
            return {**asked, "messages": [question, *turns]}
        contents = [turn.get("content") for turn in turns if turn["role"] != "assistant"]
        if prompt not in contents:
            raise BadRecord(
                f'its "prompt" is no message of its "{name}", so that it would be left out'
            )
        return {**asked, "messages": turns}
    if prompt is not None:
        before = read_turns({"prompt": prompt}, "prompt", images=True)
        return {**asked, "messages": [*before, *turns]}
    place = "conversations" if "conversations" in asked else "messages"
    before = read_turns(asked, place, images=True) if place in asked else []
    return {**asked, place: [*before, *turns]}


def _with_common_beginning(chosen: Chat, rejected: Chat) -> tuple[Chat, Chat]:
    given = _first_difference(chosen.messages, rejected.messages)
    for name, chat in zip(ANSWERS, (chosen, rejected), strict=True):
        if chat.messages[given]["role"] != "assistant":
            raise BadRecord(
                f'its "chosen" and "rejected" part at message {given + 1}, which in "{name}" is not the assistant\'s: '
                "answers to different questions can't be compared"
            )
    return replace(chosen, given=given), replace(rejected, given=given)


def _first_difference(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return the number of the first differing message; the last common one if one list begins with the other."""
    common = min(len(chosen), len(rejected))
    for number in range(common):
        if chosen[number] != rejected[number]:
            return number
    return common - 1
