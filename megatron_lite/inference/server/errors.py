"""Why a request is refused, with the status of HTTP that says so."""

from megatron_lite.inference.slots import NotFinite


class Refused(Exception):
    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        """field: of the request. code: for programs."""
        super().__init__(message)
        self.message, self.field, self.code = message, field, code


class UnknownModel(Refused):
    status = 404


class WrongKey(Refused):
    status = 401
    kind = "authentication_error"


class TooLarge(Refused):
    status = 413


class TooSlow(Refused):
    status = 408


class Gone(Refused):
    """The client; nobody reads this answer."""

    status = 499

    def __init__(self) -> None:
        super().__init__("the client has gone")


class Overloaded(Refused):
    status = 429
    kind = "overloaded_error"


class ShuttingDown(Refused):
    status = 503
    kind = "overloaded_error"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class TimedOut(Refused):
    status = 504
    kind = "timeout_error"


class Broken(Refused):
    """A mistake of ours."""

    status = 500
    kind = "server_error"


class NoAnswer(Broken):
    """The model's numbers are none."""

    def __init__(self) -> None:
        super().__init__(str(NotFinite()), code="not_finite")
