"""Starts processes of the trainer's tests: forks of one process that has imported torch, the trainer and transformers, once a session."""

from multiprocessing import get_context
from typing import Any

FORKS: Any = get_context("forkserver")
"""A context of multiprocessing. Its processes have the environment that the first one had."""

FORKS.set_forkserver_preload(["tests.trainer.preloaded", "tests.trainer.preloaded_transformers"])
