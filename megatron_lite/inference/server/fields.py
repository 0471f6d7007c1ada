"""Fields of a request's JSON, read with their type and range. A field that no code reads is refused, not ignored."""

import json
from collections.abc import Mapping
from typing import Any

from megatron_lite.inference.server.errors import Refused

HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
)  # fmt: skip
"""Fields that are accepted without effect: none of them changes an answer."""


class Fields:
    """The fields of a request. Each read removes its field; finish() refuses fields that were not read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left: dict[str, Any] = {
            name: value for name, value in values.items() if name not in HARMLESS
        }

    @classmethod
    def parse(cls, body: bytes) -> "Fields":
        """Return the fields of a body. Raises Refused if it is not a JSON object."""
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise Refused(f"the body should be a JSON object, found {type(found).__name__}")
        if _has_half_characters(body, found):
            raise Refused("a text has half of a surrogate pair, which is no character")
        return cls(found)

    def __contains__(self, name: str) -> bool:
        return self._left.get(name) is not None

    def any(self, name: str) -> Any:
        """Return a field's value; None if it is missing."""
        return self._left.pop(name, None)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a number from low to high, or the default. Raises Refused."""
        value = self.any(name)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise Refused(
                f"{name} should be a number from {low:g} to {high:g}, found {value!r:.60}", name
            )
        return float(value)

    def integer(self, name: str, default: Any, low: int, high: int) -> Any:
        """Return an integer field. default may be None."""
        value = self.any(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Refused(
                f"{name} should be a whole number from {low} to {high}, found {value!r:.60}", name
            )
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean field. Raises Refused."""
        value = self.any(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise Refused(f"{name} should be true or false, found {value!r:.60}", name)

    def words(self, name: str, most: int) -> tuple[str, ...]:
        """Return a field with one text or several."""
        value = self.any(name)
        found = [value] if isinstance(value, str) else value
        if value is None:
            found = []
        is_list = isinstance(found, list) and len(found) <= most
        if not is_list or not all(isinstance(word, str) and word for word in found):
            raise Refused(
                f"{name} should be a text or up to {most} of them, found {value!r:.60}", name
            )
        return tuple(found)

    def texts(self, name: str, most: int) -> list[Any]:
        """Return a field with a text, a row of token ids, or several of either. The items are not checked. Raises Refused."""
        value = self.any(name)
        if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
            value = [value]
        if not isinstance(value, list) or not value:
            instead = "it is missing" if value is None else f"found {value!r:.60}"
            raise Refused(
                f"{name} should be a text, a list of texts, of token ids, or of lists of token ids; {instead}",
                name,
            )
        if len(value) > most:
            raise Refused(f"{name} has {len(value)} texts, and may have {most}", name)
        return value

    def only(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Check fields for which only these values (and None) are supported."""
        for name, values in allowed.items():
            value = self.any(name)
            if value is not None and value not in values:
                raise Refused(
                    f"{name} {value!r:.60} is not supported; leave it out", name, "unsupported"
                )

    def finish(self) -> None:
        """Raise Refused if a field was not read. A field that is null is one that the client left out."""
        for name in self._left:
            if name not in self:
                continue
            raise Refused(f"unknown field {name!r:.60}", name, "unknown_field")


def _has_half_characters(body: bytes, found: Any) -> bool:
    """Return whether a text has half a surrogate pair. JSON allows it, escaped or not, but no tokenizer accepts it."""
    if b"\\ud" not in body.lower() and b"\xed" not in body:
        return False
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
