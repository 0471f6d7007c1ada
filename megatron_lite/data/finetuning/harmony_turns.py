"""The parts of a harmony conversation that the assistant wrote, found by the format's special tokens.

The template of GPT-OSS rewrites earlier turns: it removes their thinking, and ends their answers with `<|end|>` in place of
`<|return|>`. So the beginning of a conversation, rendered alone, is no beginning of the whole.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_lite.data.encoding import BadRecord

_MESSAGE = re.compile(
    r"<\|start\|>(?P<header>.*?)<\|message\|>.*?(?P<end><\|end\|>|<\|call\|>|<\|return\|>)",
    re.DOTALL,
)
_AUTHOR = "assistant"


def harmony_spans(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    wanted: Collection[int],
    *,
    all_whole: bool = False,
) -> list[tuple[int, int]]:
    """Return the character ranges of a rendered conversation that are learned.

    messages: those that the template got. Each one by the assistant has one answer or call, and maybe thinking before it.
    wanted: the numbers of the messages to learn. all_whole: True to raise BadRecord for one without its thinking.

    A range begins behind `<|start|>assistant`, which the prompt ends with. Behind its thinking, a model writes
    `<|start|>assistant` itself, so that the range includes it there. The range includes the token that ends the message,
    except the `<|end|>` of an earlier answer: a model that writes `<|end|>` there goes on. A message whose thinking the
    template removed is not learned, because a model would learn not to think. Raises BadRecord if a message has special
    tokens in its text.
    """
    numbers = [number for number, message in enumerate(messages) if message["role"] == _AUTHOR]
    spans: list[tuple[int, int]] = []
    thinking: int | None = None
    """The beginning of the answer, if thinking comes before it."""
    place = answers = 0
    while place < len(text):
        found = _MESSAGE.match(text, place)
        if found is None:
            raise BadRecord(_SPECIAL)
        place = found.end()
        if not found["header"].startswith(_AUTHOR):
            thinking = None
            continue
        begin = found.start("header") + len(_AUTHOR) if thinking is None else thinking
        if "<|channel|>analysis" in found["header"]:
            thinking = begin
            continue
        if answers == len(numbers):
            raise BadRecord(_SPECIAL)
        number = numbers[answers]
        answers += 1
        is_whole = thinking is not None or not messages[number].get("thinking")
        if all_whole and number in wanted and not is_whole:
            raise BadRecord(_NOT_WHOLE)
        if number in wanted and is_whole:
            end = found.start("end") if found["end"] == "<|end|>" else place
            spans.append((begin, end))
        thinking = None
    if answers != len(numbers):
        raise BadRecord(_SPECIAL)
    return spans


_NOT_WHOLE = (
    "the chat template removes the thinking of a call that an answer follows, so that a whole turn can't be compared; "
    "end the turn with the call, or leave its thinking out"
)
_SPECIAL = (
    "a message's text has special tokens of harmony, such as <|start|> or <|end|>, so that the answers can't be found; "
    "take them out of the text"
)
