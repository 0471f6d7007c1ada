"""One rank of a node reads the metadata of a checkpoint, and passes it on to the others."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from formats.errors import CorruptCheckpoint
from formats.tensor import InputFile, read_tensor
from megatron_lite.checkpoint.restore import open_weights
from megatron_lite.processes.failure import SharedError
from megatron_lite.processes.node import node_group, once_a_node
from tests.trainer.loop.launches import LLAMA, launch, train
from tests.trainer.parallel.conftest import world  # noqa: F401  # a fixture
from tests.trainer.parallel.worlds import TIMEOUT, World

FIXTURES = Path(__file__).parents[2] / "fixtures"


def opened(rank: int) -> tuple[list[int], bool]:
    """(ranks whose call was made, whether what can't be passed on was made here)."""
    made = []

    def call(result: Any) -> Callable[[], Any]:
        def make() -> Any:
            made.append(rank)
            return result

        return make

    node = node_group(dist.new_group(backend="gloo"), TIMEOUT)
    own = [rank]
    passed = once_a_node(call(own), node)
    assert passed == [0]
    assert once_a_node(call(None), node) is None
    calls = list(made)
    closure = lambda: rank  # noqa: E731
    here = once_a_node(call(closure), node) is closure
    with pytest.raises(SharedError, match="broken"):
        once_a_node(broken, node)
    dist.destroy_process_group(node)
    return calls, here


def broken() -> None:
    raise CorruptCheckpoint("a file: broken")


def test_one_rank_of_a_node_calls_and_all_have_what_it_made_or_its_error(world: World) -> None:  # noqa: F811
    assert world.run(2, opened) == [([0, 0], True), ([], True)]


def count_openings(rank: int) -> None:
    from megatron_lite.checkpoint import restore

    open_source = restore.open_source

    def counting(*what: Any) -> Any:
        with Path("opened.txt").open("a") as file:
            file.write(f"{rank}\n")
        return open_source(*what)

    restore.open_source = counting


@pytest.mark.slow
def test_a_run_of_several_processes_opens_its_checkpoint_once(tmp_path: Path) -> None:
    command = f"pretrain {LLAMA} --train-iters 3 --save ckpt --resume"
    train(tmp_path, 1, f"{command} --exit-interval 1")
    running = launch(
        tmp_path, 2, f"{command} --use-distributed-optimizer --exit-interval 2", count_openings
    )
    assert running.wait() == [0, 0], running.logs()
    assert (tmp_path / "opened.txt").read_text() == "0\n"


@pytest.mark.parametrize(
    "name",
    [
        "core-llama-distopt-tp1pp2dp2", "core-te-mixtral-grouped-tp2ep2", "dist-llama-tp2pp2", "dist-mixtral-optim-ep2-fully_reshardable",
        "dist-v0.9-llama-optim-dp2-fully_sharded_model_space", "zarr-llama-tp2pp2", "legacy-gpt2-tp2pp2", "fsdp-verl-dp3",
        "deepspeed-zero3-llama-dp2", "gguf-llama-spm-q8_0",
    ],
)  # fmt: skip
def test_opened_weights_of_any_format_read_the_same_bytes_in_another_process(name: str) -> None:
    """One process can show only this much: after pickling, nothing that was opened is shared."""
    place = FIXTURES / name
    inner = [
        path for path in (place / "checkpoint", place / "hf", place / "model") if path.is_dir()
    ]
    start = open_weights(str(inner[0] if inner else place))
    passed = pickle.loads(pickle.dumps(start))
    assert (passed.config, passed.header.manifest) == (start.config, start.header.manifest)
    assert passed.tensors.keys() == start.tensors.keys()
    for key, tensor in start.tensors.items():
        assert (read_tensor(passed.tensors[key]) == read_tensor(tensor)).all(), key


def test_a_file_that_is_only_partly_here_is_not_passed_on(tmp_path: Path) -> None:
    from formats.partial_files import RemoteState
    from formats.stores.stand_in import StandIn

    class Nothing:
        """Objects that nobody reads."""

        def request(self, key: str) -> str:
            raise AssertionError

        def fetch(self, *arguments: object) -> Iterator[int]:
            raise AssertionError

        def require_unchanged(self, states: object) -> None:
            raise AssertionError

    StandIn(tmp_path / "part", Nothing(), "part", RemoteState("s3://bucket/part", 100, "tag"))
    with pytest.raises(TypeError, match="only this process can fetch"):
        pickle.dumps(InputFile.open(tmp_path / "part"))
