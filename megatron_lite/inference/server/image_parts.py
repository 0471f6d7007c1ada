"""Images in the messages of requests. They come as data URIs: the server fetches no addresses and reads no files."""

from collections.abc import Mapping, Sequence
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.images.files import ImageFile, read_data_uri
from megatron_lite.inference.gallery import Images, Picture
from megatron_lite.inference.server.errors import Refused

FIELD = "messages"
Message = Mapping[str, Any]


def read_image_url(given: Any, name: str) -> ImageFile:
    """Return the image of an OpenAI part. given: {"url": ...}, or the URI alone. name: of the message. Raises Refused."""
    uri = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(uri, str) or not uri.startswith("data:"):
        raise Refused(
            f"an image of {name} should be a data URI in base64 (data:image/png;base64,...), found {uri!r:.60}",
            FIELD,
        )
    try:
        return ImageFile(read_data_uri(uri))
    except BadRecord as error:
        raise Refused(f"{name} {error}", FIELD) from error


def with_pictures(
    messages: Sequence[Message], images: Images
) -> tuple[Sequence[Message], tuple[Picture, ...]]:
    """Return the messages as a chat template expects them, and their images. Raises Refused.

    messages: an image is a part {"type": "image", "image": ImageFile}.
    """
    files: list[ImageFile] = []
    made = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [_part(part, files) for part in content]
        made.append({**message, "content": content})
    try:
        return made, tuple(images.add(file, several=len(files) > 1) for file in files)
    except UsageError as error:
        raise Refused(str(error), FIELD) from error


def _part(part: Message, into: list[ImageFile]) -> Message:
    """Return a part for the template. Add its image, if it has one."""
    if part["type"] != "image":
        return part
    into.append(part["image"])
    return {"type": "image"}
