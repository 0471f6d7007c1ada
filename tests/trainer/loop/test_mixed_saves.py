"""Files of two saves in one directory: a run and `megaconv` refuse them, whichever file was exchanged."""

import errno
import io
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import megaconv
from formats import save_marks
from formats.errors import CorruptCheckpoint
from tests.runs import assert_refused, run
from tests.trainer.loop.launches import LLAMA, launch, train

COMMAND = f"pretrain {LLAMA} --train-iters 4 --save ckpt --save-interval 2"
LAYOUTS = {
    "tensor": "--tensor-model-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2 --ckpt-format torch_dist",
}
LAST = Path("ckpt", "iter_0000004")


@pytest.fixture(scope="module", params=LAYOUTS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, `one` and `other`, that differ in the seed alone."""
    root = tmp_path_factory.mktemp(request.param)
    for seed, name in enumerate(("one", "other")):
        train(root / name, 2, f"{COMMAND} {LAYOUTS[request.param]} --seed {seed + 1}")
    return root


@pytest.fixture
def mixed(runs: Path, tmp_path: Path) -> Path:
    """A copy of `one`, for files of other saves."""
    return shutil.copytree(runs / "one", tmp_path / "mixed")


SOURCES = {"another run": Path("other") / LAST, "an older iteration": Path("one/ckpt/iter_0000002")}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
def test_blocks_of_another_save_are_refused(
    source: str, name: str, runs: Path, mixed: Path
) -> None:
    shutil.copy(runs / SOURCES[source] / name, mixed / LAST / name)
    with pytest.raises(CorruptCheckpoint, match=rf"{name}: is of another save than common\.pt"):
        megaconv.open(mixed / "ckpt")


def test_common_values_of_another_run_are_refused(runs: Path, mixed: Path) -> None:
    shutil.copy(runs / "other" / LAST / "common.pt", mixed / LAST / "common.pt")
    with pytest.raises(CorruptCheckpoint, match=r"is of another save than common\.pt"):
        megaconv.open(mixed / "ckpt")


def test_a_run_and_a_command_refuse_the_file_in_one_line(runs: Path, mixed: Path) -> None:
    shutil.copy(runs / SOURCES["another run"] / "__1_0.distcp", mixed / LAST / "__1_0.distcp")
    expected = "__1_0.distcp: is of another save than common.pt; copy all files of one save"
    outcome = run("convert", mixed / "ckpt", mixed / "out", "--saver", "hf")
    assert_refused(outcome, 3, expected)
    assert not (mixed / "out").exists()
    resumed = launch(mixed, 1, f"{COMMAND} --resume".replace("--train-iters 4", "--train-iters 6"))
    assert resumed.wait() != [0]
    assert expected in resumed.log(0)
    assert "Traceback" not in resumed.log(0)


def test_a_save_without_marks_is_read(runs: Path, mixed: Path) -> None:
    """As other programs write it, and this one did before it wrote marks."""
    whole = megaconv.open(mixed / "ckpt").slots
    for path in (mixed / LAST).glob("*.distcp"):
        nbytes = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(nbytes - save_marks.NBYTES)
    assert megaconv.open(mixed / "ckpt").slots.keys() == whole.keys()


def test_torch_reads_marked_files(runs: Path, tmp_path: Path) -> None:
    """Its reader takes the places of blocks from `.metadata`, and never looks at a mark."""
    marked = runs / "one" / LAST
    with (marked / "__1_0.distcp").open("rb") as file:
        file.seek(-save_marks.NBYTES, io.SEEK_END)
        assert set(torch.load(io.BytesIO(file.read()), weights_only=True)) == {"save_id"}
    dcp_to_torch_save(marked, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=False)
    assert state["decoder.layers.mlp.linear_fc2.weight"].shape == (4, 32, 64)


def fill_the_disk_of_rank_1(rank: int) -> None:
    def append(path: Path, save_id: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        save_marks.append = append


def test_a_rank_that_cannot_write_its_mark_ends_all(tmp_path: Path) -> None:
    running = launch(tmp_path, 2, f"{COMMAND} {LAYOUTS['tensor']}", fill_the_disk_of_rank_1)
    assert running.wait() == [1, 1]
    assert "No space left on device" in running.logs()
    assert not list(tmp_path.glob("ckpt/*"))
