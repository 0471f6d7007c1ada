"""Refusals in Anthropic's format."""

from typing import Any

from megatron_lite.inference.server.errors import Refused, TooLarge, UnknownModel

_KINDS = {"server_error": "api_error"}
"""Kinds of errors that have another name here."""


def error_json(refused: Refused) -> dict[str, Any]:
    """Return a refusal: the body of an answer, or an event of a stream."""
    kind = _KINDS.get(refused.kind, refused.kind)
    if isinstance(refused, UnknownModel):
        kind = "not_found_error"
    elif isinstance(refused, TooLarge):
        kind = "request_too_large"
    return {"type": "error", "error": {"type": kind, "message": refused.message}}
