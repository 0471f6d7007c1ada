"""Reasons to refuse a request, with their HTTP status."""

from typing import Any

from megatron_lite.inference.slots import NotFinite


class Refused(Exception):
    """A request that is refused, with HTTP status and OpenAI's error type."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        """field: name of the request's field. code: for programs."""
        super().__init__(message)
        self.message, self.field, self.code = message, field, code


class NoRoom(Refused):
    """The prompt, with the tokens to generate, does not fit into the model's length."""

    def __init__(self, message: str, prompt_tokens: int, field: str = "prompt") -> None:
        """prompt_tokens: number of the prompt's tokens. field: the request's field with the text."""
        super().__init__(message, field, "context_length_exceeded")
        self.prompt_tokens = prompt_tokens


class UnknownModel(Refused):
    """The request names another model."""

    status = 404


class WrongKey(Refused):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"


class OtherSite(Refused):
    """A web page of another site sent the request."""

    status = 403
    kind = "permission_error"


class TooLarge(Refused):
    """The body exceeds the limit."""

    status = 413

    def __init__(self, most: int) -> None:
        super().__init__(
            f"the body is larger than {most:,} bytes, the limit of this server (--max-body-bytes)"
        )


class TooSlow(Refused):
    """The body did not arrive in time."""

    status = 408


class Gone(Refused):
    """The client has disconnected; no one reads this answer."""

    status = 499

    def __init__(self) -> None:
        super().__init__("the client has gone")


class Overloaded(Refused):
    """Too many requests wait."""

    status = 429
    kind = "overloaded_error"


class ShuttingDown(Refused):
    """The server is ending."""

    status = 503
    kind = "overloaded_error"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class TimedOut(Refused):
    """The answer was not ready in time."""

    status = 504
    kind = "timeout_error"


class Broken(Refused):
    """An internal error."""

    status = 500
    kind = "server_error"


class NoAnswer(Broken):
    """The model's logits are NaN or infinite."""

    def __init__(self) -> None:
        super().__init__(str(NotFinite()), code="not_finite")


def refused_json(refused: Refused) -> dict[str, Any]:
    """Return a refusal in OpenAI's format."""
    described = {
        "message": refused.message,
        "type": refused.kind,
        "param": refused.field,
        "code": refused.code,
    }
    return {"error": described}
