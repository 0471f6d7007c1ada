"""The tokens of images in a chat: the template writes one for each image, which becomes a token for each of its parts."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from formats.wording import counted
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.chat import Encoded
from megatron_lite.data.finetuning.forms import Chat
from megatron_lite.data.images.files import read_image
from megatron_lite.data.images.kinds import Grid
from megatron_lite.data.images.places import Placed
from megatron_lite.data.images.reader import ImageReader


class Illustrated(NamedTuple):
    """An example with its images, in the order of their places."""

    text: Encoded
    images: Sequence[Placed] = ()


def with_tokens_of_images(
    made: Encoded, chat: Chat, reader: ImageReader, directory: Path
) -> Illustrated:
    """Return an encoded chat with the tokens of its images. directory: of the record's file. Raises BadRecord."""
    images = [reader.add(read_image(given, directory)) for given in chat.images]
    return _expanded(made, reader.token, images)


def without_images(made: Encoded, reader: ImageReader) -> Illustrated:
    """Return an encoded text. Raises BadRecord for a text with the token of images."""
    return _expanded(made, reader.token, ())


def _expanded(made: Encoded, token: int, images: Sequence[tuple[int, Grid]]) -> Illustrated:
    """Replace the token of each image by as many as the image has. images: (number, tokens) of each."""
    written = made.ids.count(token)
    if written != len(images):
        raise BadRecord(
            f"has {counted(len(images), 'image')}, and its text, as the chat template writes it, {counted(written, 'token')} of images; "
            "a text may not contain that token, and the template has to write one for each image"
        )
    waiting = iter(images)
    ids: list[int] = []
    learned: list[bool] = []
    placed: list[Placed] = []
    for each, is_learned in zip(made.ids, made.learned, strict=True):
        count = 1
        if each == token:
            number, grid = next(waiting)
            placed.append(Placed(number, len(ids), grid))
            count, is_learned = grid.tokens, False
        ids += [each] * count
        learned += [is_learned] * count
    return Illustrated(Encoded(ids, learned), placed)


def has_images(chat: Chat) -> bool:
    """Return whether a message has a part that is an image."""
    return any(not isinstance(message["content"], str) for message in chat.messages)
