"""The places of images among the tokens of a chat."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.wording import counted
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.chat import Encoded
from megatron_lite.data.finetuning.forms import Chat
from megatron_lite.data.finetuning.image_texts import require_as_many
from megatron_lite.data.images.places import Placed
from megatron_lite.data.images.written import Written


class Illustrated(NamedTuple):
    """An example with its images, in the order of their places."""

    text: Encoded
    images: Sequence[Placed] = ()


class Stored(NamedTuple):
    """An example as arrays, which need less memory."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    images: Sequence[Placed]

    @classmethod
    def of(cls, made: Illustrated) -> "Stored":
        ids, learned = made.text
        return cls(np.array(ids, np.int32), np.array(learned, bool), made.images)

    @property
    def answer(self) -> int:
        """The place of the first learned token."""
        return int(self.learned.argmax())


def with_places(made: Encoded, images: Sequence[tuple[int, Written]], token: int) -> Illustrated:
    """Return an encoded chat with the places of its images. images: the number and the text of each. Raises BadRecord.

    token: stands for each part of an image.
    """
    found = np.flatnonzero(np.array(made.ids) == token)
    expected = sum(image.grid.tokens for _, image in images)
    if len(found) != expected:
        raise BadRecord(
            f"has {counted(len(found), 'token')} of images, and {expected} are those of its {counted(len(images), 'image')}; "
            "a text may not contain that token"
        )
    placed: list[Placed] = []
    used = 0
    for number, image in images:
        own = found[used : used + image.grid.tokens]
        start, last = int(own[0]), int(own[-1])
        placed.append(Placed(number, start, last + 1 - start, image.grid))
        used += image.grid.tokens
    return Illustrated(made, placed)


def without_images(made: Encoded, token: int) -> Illustrated:
    """Return an encoded text. Raises BadRecord for a text with the token of images."""
    require_as_many(0, made.ids.count(token))
    return Illustrated(made)


def has_images(chat: Chat) -> bool:
    """Return whether a message has a part that is an image."""
    return any(not isinstance(message["content"], str) for message in chat.messages)
