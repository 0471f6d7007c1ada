"""One set of processes with a pretended CUDA device for all tests of a session."""

from collections.abc import Iterator

import pytest

from tests.trainer.pretended_cuda.guarded_processes import (
    PretendedWorld,
    compile_guard,
    reason_to_skip,
)


@pytest.fixture(scope="session")
def gpu_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PretendedWorld]:
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    library = compile_guard(tmp_path_factory.mktemp("guard"))
    with PretendedWorld(tmp_path_factory.mktemp("gpu-world"), library) as world:
        yield world
