"""A conversation on the terminal: messages with texts and images."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.data.images.files import ImageFile
from megatron_lite.inference.gallery import Images, Picture

NEW, IMAGE = "/new", "/image"
Message = Mapping[str, Any]


class Conversation:
    """The messages so far, and the images for the next one."""

    def __init__(self, images: Images, begin: Sequence[Message]) -> None:
        """begin: the messages with which each conversation begins."""
        self._images, self._begin = images, begin
        self.messages: list[Message] = list(begin)
        self.pictures: list[Picture] = []
        """The images of all messages."""
        self._waiting = 0
        """Number of images that belong to the next message."""

    def hear(self, line: str) -> bool:
        """Take a line of the user. Returns whether it is a message, which needs an answer. Raises UsageError."""
        if line == NEW:
            self.messages, self.pictures, self._waiting = list(self._begin), [], 0
            return False
        word, _, name = line.partition(" ")
        if word == IMAGE:
            self._show(name.strip())
            return False
        if not line:
            return False
        several = len(self.pictures) > 1  # with some models, it changes an image's tokens
        self.pictures = [self._images.add(picture.file, several) for picture in self.pictures]
        content: Any = line
        if self._waiting:
            text = {"type": "text", "text": line}
            content = [*({"type": "image"} for _ in range(self._waiting)), text]
            self._waiting = 0
        self.messages.append({"role": "user", "content": content})
        return True

    def _show(self, name: str) -> None:
        """Add an image to the next message."""
        if not name:
            raise UsageError(f"{IMAGE} needs the name of a file: {IMAGE} FILE")
        # Without a home directory of its user, a name with ~ is taken as it is.
        with suppress(RuntimeError):
            name = str(Path(name).expanduser())
        self.pictures.append(self._images.add(ImageFile(Path(name))))
        self._waiting += 1

    def answered(self, answer: str) -> None:
        """Add the answer to the last message."""
        self.messages.append({"role": "assistant", "content": answer})

    def unanswered(self) -> None:
        """Take back the last message, which got no answer, with its images."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "user":
            return
        self.messages.pop()
        if not isinstance(last["content"], str):
            count = sum(part["type"] == "image" for part in last["content"])
            del self.pictures[len(self.pictures) - count :]
