"""Chats that `generate` answers: records of finetuning, without the answer that they end with."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from megaconv.errors import UsageError
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.forms import Chat, Message, listed, read_record
from megatron_lite.data.finetuning.record_images import with_images
from megatron_lite.data.images.files import read_image
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.inference.gallery import Images, Picture
from megatron_lite.inference.prompts import encode_chat


class ChatPrompt(NamedTuple):
    """A chat without its answer."""

    chat: Chat
    text: str
    """The text of its last message."""
    reference: str | None
    """The answer that the record ends with."""
    file: Path
    """The file of the record. Paths of images are relative to its directory."""
    line: int

    @property
    def identity(self) -> str:
        """A hash of its messages, and of its images as the record names them."""
        content = [list(self.chat.messages), self.chat.tools, list(self.chat.images)]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def has_images(self) -> bool:
        """True if a message has an image."""
        return bool(self.chat.images)

    @property
    def where(self) -> str:
        """The place of the record, for messages."""
        return f"{self.file}:{self.line}"


def read_chat(record: Mapping[str, Any], file: Path, line: int) -> ChatPrompt:
    """Return the chat of a record. Raises BadRecord."""
    example = read_record(record).example
    if not isinstance(example, Chat):
        raise BadRecord(f'has {listed(record)}; expected "prompt", or a chat ("messages")')
    chat = with_images(example, record)
    messages, reference = list(chat.messages), None
    if messages[-1]["role"] == "assistant":
        answer = messages.pop()
        if not isinstance(answer["content"], str):
            raise BadRecord("ends with an answer that has an image; end the chat before it")
        reference = answer["content"]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadRecord("has no message of the user to answer")
    asked = Chat(messages, chat.tools, images=chat.images)
    return ChatPrompt(asked, _text_of(messages[-1]), reference, file, line)


def _text_of(message: Message) -> str:
    """Return a message's text without its images."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def encode_prompt(
    prompt: ChatPrompt, tokenizer: Tokenizer, images: Images
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Return the tokens of a chat, and its images. Raises UsageError."""
    chat = prompt.chat
    try:
        files = [read_image(given, prompt.file.parent) for given in chat.images]
        pictures = tuple(images.add(file, several=len(files) > 1) for file in files)
        tokens = encode_chat(tokenizer, chat.messages, chat.tools or (), pictures=pictures)
    except (BadRecord, UsageError) as error:
        raise UsageError(f"{prompt.where}: {error}") from error
    return tokens, pictures
