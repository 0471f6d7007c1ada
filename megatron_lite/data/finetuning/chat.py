"""Encodes conversations with the tokenizer's chat template, and finds the tokens that the assistant wrote.

A template may mark these tokens itself, with `{% generation %}` and `{% endgeneration %}`. Without these marks, an
assistant's turn is the text that the turn adds to the conversation before it. The conversation is rendered up to the
turn, with the generation prompt, and rendered with the turn. Both texts have to be prefixes of the whole.

If some answers are not learned, the conversation before the first learned answer has to be a prefix of the whole too. A
template that rewrites earlier turns may break this rule (Qwen 3's removes their thinking). Such a conversation is
refused. GPT-OSS' template rewrites them too; its answers are found by their special tokens (harmony_turns.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from megaconv.errors import UsageError
from megaconv.terminal import reason_of
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.forms import Chat
from megatron_lite.data.finetuning.harmony_turns import harmony_spans
from megatron_lite.data.finetuning.image_texts import ImageTexts, Span, joined
from megatron_lite.data.harmony import is_harmony_template
from megatron_lite.data.harmony_messages import with_descriptions
from megatron_lite.data.packages import package
from megatron_lite.data.template_messages import as_template_expects
from megatron_lite.data.tokenizer import HuggingFaceTokenizer

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The pattern by which transformers finds the marks."""

OTHER_TEMPLATE = "--chat-template FILE takes a template that keeps earlier turns, and has {% generation %} marks around answers"
LAST_TURN = "--finetune-turns last learns the last answer alone"


class Encoded(NamedTuple):
    """An example's tokens, and for each token whether it is learned."""

    ids: list[int]
    learned: list[bool]


def read_template(path: str | None) -> str | None:
    """Return the text of --chat-template. Raises UsageError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {path}: can't be read: {reason_of(error)}") from error


class ChatTemplate:
    """Encodes chats. Raises UsageError for a tokenizer without a template or without token offsets."""

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        template: str | None = None,
        turns: str = "all",
        *,
        pairs: bool = False,
    ) -> None:
        """template: replaces the tokenizer's own. turns: `all`, or `last` for only the assistant's last turn.

        pairs: True for answers that are compared, so that no part of one may be left out.
        """
        self._inner, self._turns, self._pairs = tokenizer.inner, turns, pairs
        self._template = self._inner.chat_template if template is None else template
        if not self._template:
            raise UsageError("the tokenizer has no chat template; give one: --chat-template FILE")
        if not self._inner.is_fast:
            raise UsageError(
                "chats need a tokenizer with a tokenizer.json; this one has only its older files"
            )
        self._added = tuple(
            str(token.content) for token in self._inner.added_tokens_decoder.values()
        )
        self._added_ids = frozenset(self._inner.added_tokens_decoder)
        self._eod = tokenizer.eod
        self._unreadable: type[Exception] = package("jinja2", "a chat template").TemplateSyntaxError

    def spelled(self, token: int) -> str:
        """Return the text of a special token."""
        return str(self._inner.convert_ids_to_tokens(token))

    def encode(self, chat: Chat, images: ImageTexts | None = None) -> Encoded:
        """Return the tokens of transformers' apply_chat_template, plus the end of text if they end without a special token.

        Raises BadRecord for the conversation, UsageError for a template that is invalid for any conversation.
        """
        try:
            template = self._inner.get_chat_template(self._choice(), chat.tools)
            chat = _as_template_expects(chat, template)
            ids, learned = self._encoded(chat, template, images)
        except BadRecord:
            raise
        except self._unreadable as error:
            raise UsageError(
                f"the chat template can't be read, at its line {getattr(error, 'lineno', '?')}: {error}"
            ) from error
        except Exception as error:  # a template's code may raise any error
            raise BadRecord(f"the chat template refuses it: {error}") from error
        if not any(learned):
            raise BadRecord("nothing of it is marked by the chat template as said by the assistant")
        if learned[-1] and ids[-1] not in self._added_ids and self._eod is not None:
            return Encoded([*ids, self._eod], [*learned, True])
        return Encoded(ids, learned)

    def _encoded(self, chat: Chat, template: str, images: ImageTexts | None) -> Encoded:
        """Encode the messages as the template expects them."""
        answers = [
            number for number, message in enumerate(chat.messages) if message["role"] == "assistant"
        ]
        wanted = [number for number in answers if number >= chat.given]
        if not wanted:
            raise BadRecord(
                "has no message by the assistant, so that there is nothing to learn in it"
            )
        learned_answers = wanted[-1:] if self._turns == "last" else wanted
        if MARKS.search(template):
            skips_answers = len(learned_answers) < len(answers)
            return self._by_marks(chat, learned_answers[0] if skips_answers else 0, images)
        if is_harmony_template(template):
            whole = self._rendered(chat, chat.messages)
            spans = harmony_spans(whole, chat.messages, learned_answers, all_whole=self._pairs)
            return self._by_spans(whole, spans, images)
        return self._by_beginnings(chat, learned_answers, images)

    def _choice(self) -> Any:
        """Return the template, or None if the tokenizer has several by name; tools then determine the choice."""
        return self._template if isinstance(self._template, str) else None

    def _by_marks(self, chat: Chat, first: int, images: ImageTexts | None) -> Encoded:
        """Encode with transformers' own mask, from message `first` on."""
        made = self._inner.apply_chat_template(
            list(chat.messages), tools=chat.tools, chat_template=self._choice(), tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, tokenizer_kwargs={"return_offsets_mapping": True},
        )  # fmt: skip
        start = self._start_of(chat, first) if first else 0
        learned: list[bool] = []
        marked_until = 0
        for mark, (begin, end) in zip(made["assistant_masks"], made["offset_mapping"], strict=True):
            # If several tokens form the answer's last character, transformers marks only the first of them.
            is_marked = bool(mark) or begin < marked_until
            if is_marked:
                marked_until = end
            learned.append(is_marked and end > start)
        if images is None:
            return Encoded(list(made["input_ids"]), learned)
        spans = joined(compress(made["offset_mapping"], learned))
        return self._by_spans(self._rendered(chat, chat.messages), spans, images)

    def _start_of(self, chat: Chat, number: int) -> int:
        """Return the number of characters before a message. Raises BadRecord if that text is not a prefix of the whole."""
        whole = self._rendered(chat, chat.messages)
        # Some templates end a conversation if there is no generation prompt. So try again with one.
        for prompt in (False, True):
            before = self._rendered(chat, chat.messages[:number], prompt=prompt)
            if whole.startswith(before):
                return len(before)
        raise BadRecord(_rewritten(number, OTHER_TEMPLATE))

    def _by_beginnings(
        self, chat: Chat, wanted: Sequence[int], images: ImageTexts | None
    ) -> Encoded:
        whole = self._rendered(chat, chat.messages)
        spans: list[Span] = []
        for number in wanted:
            spans.append(self._span(chat, number, whole, is_last=number == wanted[-1]))
        return self._by_spans(whole, spans, images)

    def _by_spans(self, whole: str, spans: Sequence[Span], images: ImageTexts | None) -> Encoded:
        """Encode a rendered conversation with its images. spans: the character ranges that are learned."""
        if images is not None:
            whole, spans = images.put_into(whole, spans)
        made = self._inner(whole, add_special_tokens=False, return_offsets_mapping=True)
        learned = [
            any(first < end and last > start for start, end in spans)
            for first, last in made["offset_mapping"]
        ]
        ids = list(made["input_ids"])
        if images is not None and images.token:
            token = self._inner.convert_tokens_to_ids(images.token)
            return Encoded(*images.multiplied(ids, learned, token))
        return Encoded(ids, learned)

    def _span(self, chat: Chat, number: int, whole: str, *, is_last: bool) -> tuple[int, int]:
        """Return the character range of a turn's answer, with its end-of-turn token, but without the line break after it."""
        if not number:
            raise BadRecord(
                "begins with the assistant's turn, which the chat template can't distinguish from its prompt"
            )
        before = self._rendered(chat, chat.messages[:number], prompt=True)
        ends_whole = number == len(chat.messages) - 1
        through = whole if ends_whole else self._rendered(chat, chat.messages[: number + 1])
        if not (whole.startswith(through) and through.startswith(before)):
            raise BadRecord(
                _rewritten(number, OTHER_TEMPLATE if is_last else f"{LAST_TURN}; {OTHER_TEMPLATE}")
            )
        ended = through.rstrip()
        return len(before), len(ended) if ended.endswith(self._added) else len(through)

    def _rendered(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False
    ) -> str:
        text: str = self._inner.apply_chat_template(
            list(messages),
            tools=chat.tools,
            chat_template=self._choice(),
            tokenize=False,
            add_generation_prompt=prompt,
        )
        return text


def _as_template_expects(chat: Chat, template: str) -> Chat:
    """Return the chat with the roles and fields that the template reads."""
    # Messages may become more of them.
    given = len(as_template_expects(chat.messages[: chat.given], template))
    messages = as_template_expects(chat.messages, template)
    tools = with_descriptions(chat.tools, template) if chat.tools else chat.tools
    return replace(chat, messages=messages, tools=tools, given=given)


def _rewritten(number: int, remedy: str) -> str:
    return (
        f"message {number + 1}: the conversation before this answer, rendered alone, is no beginning of the whole "
        f"(the chat template rewrites earlier turns), so that the answer can't be found; {remedy}"
    )
