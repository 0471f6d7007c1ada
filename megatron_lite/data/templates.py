"""Chat templates are programs that come with a model. jinja's sandbox keeps them from files and from Python; here one of
them that doesn't come to its end is stopped.

Both hold for what a template may do by loops. One operation of its own, a power of large numbers say, can still take all time and
memory: as with the rest of a model, take templates from people whom you trust.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

RENDER_S = 10.0
"""A template takes milliseconds."""


class _Stopped(Exception):
    pass


def bounded(render: Callable[[], T], seconds: float = RENDER_S) -> T:
    """render(). Raises TimeoutError when it takes longer; it is stopped then, on whatever thread it runs."""
    thread, lock, done = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def stop() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Stopped))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        return render()
    except _Stopped:
        raise TimeoutError(f"it is not done after {seconds:g} seconds") from None
    finally:
        timer.cancel()
        with lock:
            done = True
