"""The time limit of a request: it ends waiting, and it never keeps a cancelled request alive."""

import asyncio

import pytest

from megatron_lite.inference.server.errors import TimedOut
from megatron_lite.inference.server.responses import Deadline


def test_a_result_in_time_is_returned_and_a_late_one_is_not() -> None:
    async def waits() -> None:
        deadline = Deadline(0.05)
        assert await deadline.of(asyncio.sleep(0, "soon")) == "soon"
        with pytest.raises(TimedOut, match=r"ready after 0\.05 seconds"):
            await deadline.of(asyncio.sleep(60))
        with pytest.raises(TimedOut):
            await deadline.of(asyncio.sleep(0, "too late"))

    asyncio.run(waits())


def test_a_request_is_cancelled_even_if_its_next_token_comes_at_the_same_time() -> None:
    async def cancels() -> None:
        token: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(Deadline(60).of(token))
        await asyncio.sleep(0)
        token.set_result(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancels())
