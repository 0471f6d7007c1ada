"""Refusals in Anthropic's format."""

from typing import Any

from megatron_lite.inference.server.errors import Refused

NO_THREADS = "thread_unsupported_request"
"""The code by which Anthropic's clients learn to send the whole conversation each time."""
_KINDS = {"server_error": "api_error"}
"""Kinds of errors that have another name here."""
_OF_STATUS = {404: "not_found_error", 413: "request_too_large"}
"""Kinds of errors that have a name of their own here, by status."""


def error_json(refused: Refused) -> dict[str, Any]:
    """Return a refusal: the body of an answer, or an event of a stream."""
    kind = _OF_STATUS.get(refused.status) or _KINDS.get(refused.kind, refused.kind)
    error: dict[str, Any] = {"type": kind, "message": refused.message}
    if refused.code == NO_THREADS:
        error["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": error}
