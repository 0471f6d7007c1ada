"""Makes the requests to a bucket, and repeats those whose failure may not happen again."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from formats.errors import CheckpointError
from formats.stores.patience import Patience, Transient
from formats.stores.refusals import Answer

_Result = TypeVar("_Result")


class Refused(Exception):
    """An answer that repeating doesn't change. Whoever expects it doesn't raise `error`."""

    def __init__(self, answer: Answer, error: CheckpointError) -> None:
        self.answer, self.error = answer, error


class Requests(NamedTuple):
    """Requests to one bucket. Any thread may make them."""

    answer_of: Callable[[Exception], Answer]
    """The answer in an error of the store's client."""
    failure: Callable[[Exception, str], Transient | CheckpointError]
    """(error of the store's client, name of the request) -> the failure to repeat, or the error to end with."""

    def made(self, request: str, call: Callable[[], _Result]) -> _Result:
        """The result of a request. Raises Refused, and CheckpointError after several attempts.

        request: its name, such as `s3:GetObject on bucket/key`.
        """
        patience = Patience(request)
        while True:
            try:
                return call()
            except (
                Exception
            ) as error:  # the errors of a client and its libraries have no common class
                failure = self.failure(error, request)
                if isinstance(failure, CheckpointError):
                    raise Refused(self.answer_of(error), failure) from None
                patience.wait(failure)

    def needed(self, request: str, call: Callable[[], _Result]) -> _Result:
        """The result of a request that has to succeed."""
        try:
            return self.made(request, call)
        except Refused as refused:
            raise refused.error from None

    def found(self, request: str, call: Callable[[], _Result]) -> _Result | None:
        """The result of a request about an object or an upload; None if there is no such thing."""
        try:
            return self.made(request, call)
        except Refused as refused:
            if refused.answer.is_absent:
                return None
            raise refused.error from None
