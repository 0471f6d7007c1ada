"""The processes that tests of the trainer share, and one thread, since many processes run tests at the same time."""

from tests.trainer.parallel.conftest import _one_thread, world

__all__ = ["_one_thread", "world"]
