"""Converts texts and conversations to tokens, and finds the tokens with which a model ends a text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.data.encoding import HALF_CHARACTER, BadRecord, has_half_character
from megatron_lite.data.harmony import harmony_marks
from megatron_lite.data.harmony_messages import with_descriptions
from megatron_lite.data.template_messages import as_template_expects
from megatron_lite.data.templates import bounded
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, NullTokenizer, Tokenizer
from megatron_lite.inference.gallery import Picture, texts_of, with_ids_of
from megatron_lite.inference.generation_config import eos_of_generation


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of a text, with the begin token if the model expects one. Raises UsageError like tokens_of."""
    return (*tokenizer.begin, *tokens_of(tokenizer, text))


def start_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens before a text without a prompt: the begin token, else the end-of-document token."""
    if tokenizer.begin:
        return tuple(tokenizer.begin)
    start = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    return () if start is None else (start,)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, without begin and end tokens. Raises UsageError for a text that can't be tokenized."""
    try:
        return tokenizer.tokenize(text)
    except (ValueError, TypeError) as error:
        if isinstance(tokenizer, NullTokenizer):
            raise UsageError(str(error)) from error
        why = HALF_CHARACTER if has_half_character(text) else error
        raise UsageError(f"the text {text[:60]!r} can't be tokenized: {why}") from error


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    pictures: Sequence[Picture] = (),
) -> tuple[int, ...]:
    """Return the tokens of a conversation by the tokenizer's template, up to the start of the assistant's answer.

    tools: descriptions of the tools that the model may call, in OpenAI's form. template: in place of the tokenizer's.
    variables: further ones for the template. pictures: the images, for which messages have parts {"type": "image"}.
    Raises UsageError if there is no template, or if it refuses the conversation.
    """
    if isinstance(tokenizer, NullTokenizer):
        raise UsageError("the model has no tokenizer; --tokenizer-model DIR gives one")
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not (
        template or tokenizer.inner.chat_template
    ):
        raise UsageError(
            "the tokenizer has no chat template, so it can't format messages; give texts instead: "
            '{"prompt": ...} in `generate`, --raw in `chat`, /v1/completions in `serve`'
        )
    try:
        offered = [dict(tool) for tool in tools] or None
        text = tokenizer.inner.get_chat_template(template, offered)
        conversation = [dict(message) for message in as_template_expects(messages, text)]
        ids = bounded(
            lambda: tokenizer.inner.apply_chat_template(
                conversation,
                tools=with_descriptions(offered, text) if offered else None,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=not pictures,
                **(variables or {}),
            )
        )
    except Exception as error:  # templates raise errors of any class
        if has_half_character(messages):
            raise UsageError(f"the conversation can't be tokenized: {HALF_CHARACTER}") from error
        raise UsageError(f"the chat template refuses this conversation: {error}") from error
    if pictures:
        return _with_images(tokenizer, ids, pictures)
    return tuple(ids["input_ids"] if isinstance(ids, Mapping) else ids)


def _with_images(
    tokenizer: HuggingFaceTokenizer, rendered: str, pictures: Sequence[Picture]
) -> tuple[int, ...]:
    """Return the tokens of a rendered conversation with its images."""
    try:
        text, _ = texts_of(pictures).put_into(rendered, ())
    except BadRecord as error:
        raise UsageError(f"the conversation {error}") from error
    return with_ids_of(pictures, tokenizer.inner(text, add_special_tokens=False)["input_ids"])


def template_for_tools(tokenizer: Tokenizer) -> str:
    """Return the chat template of conversations with tools; an empty text without one."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.inner.chat_template:
        return ""
    template: str = tokenizer.inner.get_chat_template(None, [{}])
    return template


def stop_ids(
    config: ModelConfig, tokenizer: Tokenizer, files: Mapping[str, Path]
) -> frozenset[int]:
    """Return the stop tokens of the model's config, of its generation config, and of the tokenizer.

    In harmony a call ends the answer too, and `<|end|>` never does, because a model ends its thinking with it.
    """
    found = set(eos_of_generation(files))
    for ids in (config.eos_token_id, tokenizer.eod):
        if ids is not None:
            found |= {ids} if isinstance(ids, int) else set(ids)
    marks = harmony_marks(tokenizer)
    if marks is not None:
        found = (found | marks.stops) - {marks.end}
    return frozenset(found)
