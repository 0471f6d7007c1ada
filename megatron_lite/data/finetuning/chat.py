"""Conversations through the tokenizer's own chat template, and which of their tokens the assistant wrote.

A template may say so itself: what stands between `{% generation %}` and `{% endgeneration %}`. For one without these marks each
of the assistant's turns is what it adds behind the conversation before it: rendered up to that turn, with the prompt to answer, and
rendered with it, both have to be beginnings of the whole. A template that rewrites earlier turns is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from megaconv.errors import UsageError
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.forms import Chat
from megatron_lite.data.packages import package
from megatron_lite.data.tokenizer import HuggingFaceTokenizer

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""As transformers looks for them."""

REWRITTEN = (
    "the chat template renders this conversation otherwise than its beginnings (it rewrites earlier turns, or its prompt to answer is no "
    "part of the answer), so that the assistant's turns can't be found; --finetune-turns last learns the last answer alone, "
    "and --chat-template FILE takes a template that has {% generation %} around what the assistant says"
)


class Encoded(NamedTuple):
    ids: list[int]
    learned: list[bool]


class ChatTemplate:
    """Raises UsageError for a tokenizer without a template, or one whose tokens don't know their place in the text."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, template: str | None = None, turns: str = "all") -> None:
        """template: in place of the tokenizer's own. turns: `all`, or `last`, the assistant's last one alone."""
        self._inner, self._turns = tokenizer.inner, turns
        self._template = self._inner.chat_template if template is None else template
        if not self._template:
            raise UsageError("the tokenizer has no chat template; give one: --chat-template FILE")
        if not self._inner.is_fast:
            raise UsageError("chats need a tokenizer with a tokenizer.json; this one has only its older files")
        self._added = tuple(str(token.content) for token in self._inner.added_tokens_decoder.values())
        self._added_ids = frozenset(self._inner.added_tokens_decoder)
        self._eod = tokenizer.eod
        self._unreadable: type[Exception] = package("jinja2", "a chat template").TemplateSyntaxError

    def encode(self, chat: Chat) -> Encoded:
        """Tokens as transformers' apply_chat_template has them; the end of the text behind one that ends with no special token.

        Raises BadRecord; UsageError for a template that isn't one, whatever the conversation.
        """
        answers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        wanted = [number for number in answers if number >= chat.given]
        if not wanted:
            raise BadRecord("has no message by the assistant, so that there is nothing to learn in it")
        try:
            if self._turns == "all" and self._has_marks(chat):
                ids, learned = self._by_marks(chat)
                if len(wanted) < len(answers):
                    learned = self._behind(chat, learned)
            else:
                ids, learned = self._by_beginnings(chat, wanted if self._turns == "all" else wanted[-1:])
        except BadRecord:
            raise
        except self._unreadable as error:
            raise UsageError(
                f"the chat template can't be read, at its line {getattr(error, 'lineno', '?')}: {error}"
            ) from error
        except Exception as error:  # whatever the template's own code raises
            raise BadRecord(f"the chat template refuses it: {error}") from error
        if not any(learned):
            raise BadRecord("nothing of it is marked by the chat template as said by the assistant")
        if learned[-1] and ids[-1] not in self._added_ids and self._eod is not None:
            return Encoded([*ids, self._eod], [*learned, True])
        return Encoded(ids, learned)

    def _has_marks(self, chat: Chat) -> bool:
        return bool(MARKS.search(self._inner.get_chat_template(self._choice(), chat.tools)))

    def _choice(self) -> Any:
        """A tokenizer may have several templates by name; which, depends on whether there are tools."""
        return self._template if isinstance(self._template, str) else None

    def _by_marks(self, chat: Chat) -> Encoded:
        made = self._inner.apply_chat_template(
            list(chat.messages), tools=chat.tools, chat_template=self._choice(), tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        return Encoded(list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]])

    def _behind(self, chat: Chat, learned: Sequence[bool]) -> list[bool]:
        """Without as many marked tokens as the messages that are given have."""
        given = sum(self._by_marks(replace(chat, messages=chat.messages[: chat.given])).learned)
        return [mark and number > given for mark, number in zip(learned, accumulate(learned), strict=True)]

    def _by_beginnings(self, chat: Chat, wanted: Sequence[int]) -> Encoded:
        whole = self._rendered(chat, chat.messages)
        spans = [self._span(chat, number, whole) for number in wanted]
        made = self._inner(whole, add_special_tokens=False, return_offsets_mapping=True)
        learned = [any(first < end and last > start for start, end in spans) for first, last in made["offset_mapping"]]
        return Encoded(list(made["input_ids"]), learned)

    def _span(self, chat: Chat, number: int, whole: str) -> tuple[int, int]:
        """Characters of a turn's answer, its end-of-turn token included, the line break behind that left out."""
        if not number:
            raise BadRecord("begins with the assistant's turn, which the chat template can't tell from its prompt")
        before = self._rendered(chat, chat.messages[:number], prompt=True)
        last = number == len(chat.messages) - 1
        through = whole if last else self._rendered(chat, chat.messages[: number + 1])
        if not (whole.startswith(through) and through.startswith(before)):
            raise BadRecord(REWRITTEN)
        ended = through.rstrip()
        return len(before), len(ended) if ended.endswith(self._added) else len(through)

    def _rendered(self, chat: Chat, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        text: str = self._inner.apply_chat_template(
            list(messages), tools=chat.tools, chat_template=self._choice(), tokenize=False, add_generation_prompt=prompt
        )
        return text
