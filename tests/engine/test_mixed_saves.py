"""Files of one checkpoint that are from two: of another iteration, or in the directory of another rank."""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import megaconv
from megaconv.errors import CorruptCheckpoint
from megaconv.megatron.states.origin import require_own_directories
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.rank_states import edit, rank_paths
from tests.runs import assert_refused, run

LAYOUTS = {"pp": {"pp": 2}, "tp": {"tp": 2}}
DISTRIBUTED = {"torch_dist": "dist-llama-tp2pp2", "zarr": "zarr-llama-tp2pp2"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "hf", layers=2)


@pytest.fixture(params=LAYOUTS)
def two_files(request: pytest.FixtureRequest, llama: Path, tmp_path: Path) -> Path:
    """iter_0000001 of two ranks."""
    megaconv.convert(llama, tmp_path / "run", saver="core", iteration=1, **LAYOUTS[request.param])
    return tmp_path / "run"


def real(name: str, tmp_path: Path) -> Path:
    """A copy of a checkpoint that Megatron itself wrote."""
    directory = FIXTURES / name
    return shutil.copytree(
        directory / "checkpoint" if (directory / "checkpoint").is_dir() else directory,
        tmp_path / name,
    )


def renamed(root: Path, name: str) -> Path:
    (version,) = root.glob("iter_*")
    version.rename(root / name)
    number = name.removeprefix("iter_").lstrip("0")
    (root / "latest_checkpointed_iteration.txt").write_text(number)
    return root


def exchange(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


# Incomplete copies.


@pytest.mark.parametrize(("size", "lost"), [("tensor", "mp_rank_01*"), ("pipeline", "*_001")])
def test_a_copy_of_some_ranks_is_no_smaller_model(
    llama: Path, tmp_path: Path, size: str, lost: str
) -> None:
    """The ranks that are there look complete: only their args have more."""
    megaconv.convert(llama, tmp_path / "run", saver="core", tp=2, pp=2)
    for directory in (tmp_path / "run" / "release").glob(lost):
        shutil.rmtree(directory)
    for words in (["inspect"], ["convert", tmp_path / "out", "--saver", "hf"]):
        outcome = run(words[0], tmp_path / "run", *words[1:])
        assert_refused(
            outcome,
            3,
            f"{size}_model_parallel_size = 2",
            "there are rank directories for 1; copy the missing ones",
        )


# Iterations.


def test_rank_files_of_two_iterations_are_no_model(two_files: Path, tmp_path: Path) -> None:
    first, second = rank_paths(two_files)
    edit([second], iteration=2)
    outcome = run(
        "convert", "--load-dir", two_files, "--saver", "hf", "--save-dir", tmp_path / "out"
    )
    names = [f"{file.parent.name}/{file.name}" for file in (first, second)]
    assert_refused(
        outcome, 3, f"{names[0]} has iteration 1", f"{names[1]} 2", "Copy all files of one save"
    )
    assert not (tmp_path / "out").exists()


def test_rank_files_that_saw_another_number_of_samples_are_no_model(two_files: Path) -> None:
    first, second = rank_paths(two_files)
    edit([first], args={"consumed_train_samples": 64})
    edit([second], args={"consumed_train_samples": 96})
    with pytest.raises(CorruptCheckpoint, match=r"has consumed_train_samples 64, .* 96") as refused:
        megaconv.open(two_files)
    assert refused.value.code == "mixed-iterations"


@pytest.mark.parametrize(
    ("name", "values"), [("seed", (1, 2)), ("lr", (1e-3, 2e-3)), ("global_batch_size", (8, 16))]
)
def test_rank_files_of_two_runs_at_the_same_iteration_are_no_model(
    two_files: Path, name: str, values: tuple[float, float]
) -> None:
    for file, value in zip(rank_paths(two_files), values, strict=True):
        edit([file], args={name: value})
    expected = rf"has args.{name} {values[0]}, .* {values[1]}: they are from two runs. Copy all"
    with pytest.raises(CorruptCheckpoint, match=expected) as refused:
        megaconv.open(two_files)
    assert refused.value.code == "mixed-iterations"


def test_rank_files_of_two_runs_on_other_data_are_no_model(two_files: Path) -> None:
    """The trainer saves a hash of its data. All flags of the two runs may be the same."""
    for file, data in zip(rank_paths(two_files), ("aaaa", "bbbb"), strict=True):
        edit([file], megatron_lite={"data": data})
    expected = "has megatron_lite.data aaaa, .* bbbb: they are from two runs. Copy all"
    with pytest.raises(CorruptCheckpoint, match=expected):
        megaconv.open(two_files)


def test_an_iteration_that_differs_from_its_directory_is_refused_with_both_names(
    two_files: Path,
) -> None:
    edit(rank_paths(two_files), iteration=6)
    with pytest.raises(CorruptCheckpoint) as refused:
        megaconv.open(two_files)
    message = str(refused.value)
    assert "is of iteration 6, its directory iter_0000001 of iteration 1" in message
    assert (
        "name it iter_0000006 again and write 6 into latest_checkpointed_iteration.txt" in message
    )
    assert refused.value.code == "mixed-iterations"
    megaconv.open(renamed(two_files, "iter_0000006"))


def test_a_renamed_release_gets_the_name_of_a_release(two_files: Path) -> None:
    edit(rank_paths(two_files), iteration=0)
    remedy = "name it release again and write release into latest_checkpointed_iteration.txt"
    with pytest.raises(CorruptCheckpoint, match=remedy):
        megaconv.open(two_files)
    megaconv.open(renamed(two_files, "release"))


@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_the_common_state_of_another_iteration_is_refused(kind: str, tmp_path: Path) -> None:
    source = real(DISTRIBUTED[kind], tmp_path)
    (file,) = rank_paths(source)
    number = int(file.parent.name.removeprefix("iter_"))
    renamed(source, "iter_0000006")
    with pytest.raises(CorruptCheckpoint) as refused:
        megaconv.open(source)
    assert f"common.pt: is of iteration {number}, its directory iter_0000006 of iteration 6" in str(
        refused.value
    )
    assert refused.value.code == "mixed-iterations"


def test_a_directory_without_a_number_may_hold_any_iteration(two_files: Path) -> None:
    edit(rank_paths(two_files), iteration=6)
    (version,) = two_files.glob("iter_*")
    megaconv.open(version.rename(two_files / "before-the-crash"))
    (two_files / "before-the-crash").rename(two_files / "release")
    (two_files / "latest_checkpointed_iteration.txt").write_text("release")
    assert megaconv.open(two_files).header.training.release


def test_files_that_do_not_say_their_iteration_are_read(two_files: Path) -> None:
    first, second = rank_paths(two_files)
    edit([first], iteration=None)
    megaconv.open(two_files)
    edit([second], iteration="release")
    megaconv.open(two_files)


# Ranks.


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("core-llama-tp4pp1", "mp_rank_01", "mp_rank_02"),
        ("core-llama-tp2pp2", "mp_rank_00_000", "mp_rank_01_000"),
        ("core-llama-tp2pp2", "mp_rank_00_000", "mp_rank_00_001"),
        ("core-mixtral-seq-tp2ep2", "mp_rank_00_000", "mp_rank_00_001"),
        ("core-mixtral-seq-tp2pp2ep2", "mp_rank_00_001_000", "mp_rank_00_001_001"),
        ("core-llama-distopt-tp1pp2dp2", "mp_rank_00_000", "mp_rank_00_001"),
        ("legacy-gpt2-tp2pp2", "mp_rank_00_001", "mp_rank_01_001"),
        ("old-gpt2-tp2-ckptv0", "mp_rank_00", "mp_rank_01"),
        ("pipelined-t5-tp2e1d1", "mp_rank_00_001", "mp_rank_01_001"),
    ],
)
def test_exchanged_rank_files_of_megatron_are_refused(
    name: str, first: str, second: str, tmp_path: Path
) -> None:
    source = real(name, tmp_path)
    (version,) = source.glob("iter_*")
    exchange(version / first, version / second)
    with pytest.raises(CorruptCheckpoint) as refused:
        megaconv.open(source)
    assert f"{first}/model_optim_rng.pt: its args are of rank " in str(refused.value)
    assert f"whose file belongs in {second}" in str(refused.value)
    assert refused.value.code == "misplaced-rank-file"


@pytest.mark.parametrize("name", ["core-llama-tp4pp1", "core-qwenlike-tp2pp1"])
def test_a_rank_file_that_was_copied_over_another_is_refused(name: str, tmp_path: Path) -> None:
    source = real(name, tmp_path)
    (version,) = source.glob("iter_*")
    shutil.copy(version / "mp_rank_00/model_optim_rng.pt", version / "mp_rank_01")
    with pytest.raises(
        CorruptCheckpoint,
        match=r"mp_rank_01/model_optim_rng.pt: its args are of rank 0 of .* belongs in mp_rank_00\.",
    ):
        megaconv.open(source)


def test_tools_that_write_all_files_in_one_process_leave_its_rank_in_all(two_files: Path) -> None:
    edit(rank_paths(two_files), args={"rank": 0})
    megaconv.open(two_files)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize(
    ("tp", "cp", "pp", "dp", "ep", "etp"),
    [
        (2, 1, 2, 2, 1, 2),
        (2, 2, 3, 2, 1, 2),
        (2, 2, 2, 2, 2, 2),
        (4, 1, 2, 2, 4, 2),
        (2, 1, 1, 4, 4, 1),
        (1, 2, 4, 4, 2, 1),
    ],
)
def test_ranks_are_counted_as_megatron_counts_them(
    order: str, tp: int, cp: int, pp: int, dp: int, ep: int, etp: int
) -> None:
    from megatron.core.parallel_state import RankGenerator

    edp = tp * cp * dp // (etp * ep)
    if order.endswith("dp") and edp != dp:
        pytest.skip("Megatron wants as many data parallel ranks of experts as of all else")
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    of_experts = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    sizes = {
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "pipeline_model_parallel_size": pp,
    }
    sizes |= {
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "world_size": tp * cp * dp * pp,
    }
    states, files = {}, {}
    for rank in (group[0] for group in of_experts.get_ranks("dp")):
        stage = (place_along(dense.get_ranks("pp"), rank),) if pp > 1 else ()
        experts = (place_along(of_experts.get_ranks("ep"), rank),) if ep > 1 else ()
        numbers = (place_along(dense.get_ranks("tp"), rank), *stage, *experts)
        args = Namespace(**sizes, rank=rank, use_tp_pp_dp_mapping=order.endswith("dp"))
        states[numbers], files[numbers] = (
            {"args": args, "rng_state": []},
            Path("_".join(map(str, numbers))),
        )
    require_own_directories(states, files)
    first, *_, last = sorted(states)
    with pytest.raises(CorruptCheckpoint):
        require_own_directories(states | {first: states[last], last: states[first]}, files)


def place_along(groups: list[list[int]], rank: int) -> int:
    return next(group.index(rank) for group in groups if rank in group)


# What we write.


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "pp": 2},
        {"tp": 2, "ep": 2},
        {"tp": 2, "pp": 2, "ep": 2},
        {"tp": 4, "ep": 4, "etp": 2},
        {"tp": 2, "ep": 2, "etp": 1},
    ],
    ids=lambda sizes: "-".join(f"{name}{size}" for name, size in sizes.items()),
)
def test_each_rank_file_of_ours_says_its_own_rank(sizes: dict[str, int], tmp_path: Path) -> None:
    source = FIXTURES / "core-mixtral-seq-tp1ep1" / "checkpoint"
    megaconv.convert(source, tmp_path / "out", saver="core", **sizes)
    args = [torch.load(file, weights_only=False)["args"] for file in rank_paths(tmp_path / "out")]
    assert len({each.rank for each in args}) == len(args)
    assert all(each.rank < each.world_size for each in args)
    assert megaconv.fingerprint(tmp_path / "out").weights == megaconv.fingerprint(source).weights
    (version,) = (tmp_path / "out").glob("iter_*")
    first, *_, last = sorted(version.glob("mp_rank_*"))
    exchange(first, last)
    assert_refused(
        run("fingerprint", tmp_path / "out"), 3, "its args are of rank", f"belongs in {last.name}"
    )
