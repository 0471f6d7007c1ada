"""Limits the time of chat templates, which are programs that come with a model.

jinja's sandbox keeps a template from files and from Python. This module stops a template that does not end. Both limits
hold for loops. A single operation, such as a power of large numbers, can still take unlimited time and memory. So take
templates, like models, only from people whom you trust.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

RENDER_S = 10.0
"""A template usually takes milliseconds."""


class _Stopped(Exception):
    pass


def bounded(render: Callable[[], T], seconds: float = RENDER_S) -> T:
    """Return render(). If it takes longer than `seconds`, it is stopped, on any thread, and TimeoutError is raised."""
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
