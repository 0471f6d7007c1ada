"""The same processes and threads as tests of the parallel core."""

from tests.trainer.parallel.conftest import _one_thread, world

__all__ = ["_one_thread", "world"]
