"""The directories of ranks: names as Megatron writes them, trackers, and errors in both."""

from pathlib import Path

import pytest

from formats.errors import CorruptCheckpoint
from formats.rank_files import (
    find_version,
    is_rank_files,
    iteration_directory,
    rank_directory,
    read,
)


def make(version: Path, *ranks: str) -> Path:
    for rank in ranks:
        (version / rank).mkdir(parents=True)
        (version / rank / "model_optim_rng.pt").touch()
    return version


def track(root: Path, word: str) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text(word)


@pytest.mark.parametrize(
    ("iteration", "name"),
    [(0, "iter_0000000"), (5, "iter_0000005"), (12345678, "iter_12345678"), (None, "release")],
)
def test_iterations_have_seven_digits_or_more(iteration: int | None, name: str) -> None:
    assert iteration_directory(iteration) == name


@pytest.mark.parametrize(
    ("ranks", "pp", "ep", "name"),
    [
        ((0, 0, 0), 1, 1, "mp_rank_00"),
        ((1, 0, 0), 2, 1, "mp_rank_01_000"),
        ((123, 11, 0), 12, 1, "mp_rank_123_011"),
        ((1, 0, 3), 1, 4, "mp_rank_01_003"),
        ((1, 2, 3), 4, 4, "mp_rank_01_002_003"),
    ],
)
def test_pipeline_and_expert_ranks_are_named_only_where_there_are_several(
    ranks: tuple[int, int, int], pp: int, ep: int, name: str
) -> None:
    assert rank_directory(*ranks, pp, ep) == name


# Finding an iteration.


@pytest.mark.parametrize("word", ["5", "5\n", " 5 ", "0000005"])
def test_the_tracker_decides_among_iterations(tmp_path: Path, word: str) -> None:
    for name in ("iter_0000005", "iter_0000009", "release"):
        make(tmp_path / name, "mp_rank_00")
    track(tmp_path, word)
    assert find_version(tmp_path) == tmp_path / "iter_0000005"


def test_the_tracker_may_say_release(tmp_path: Path) -> None:
    make(tmp_path / "iter_0000005", "mp_rank_00")
    make(tmp_path / "release", "mp_rank_00")
    track(tmp_path, "release\n")
    assert find_version(tmp_path) == tmp_path / "release"


@pytest.mark.parametrize("name", ["iter_0000005", "release", "iter_123456789"])
def test_without_a_tracker_the_only_iteration_is_taken(tmp_path: Path, name: str) -> None:
    make(tmp_path / name, "mp_rank_00")
    (tmp_path / "tensorboard").mkdir()
    assert find_version(tmp_path) == tmp_path / name


def test_without_a_tracker_several_iterations_are_none(tmp_path: Path) -> None:
    for name in ("iter_0000005", "iter_0000009"):
        make(tmp_path / name, "mp_rank_00")
    assert find_version(tmp_path) is None


def test_an_iteration_can_be_given_itself(tmp_path: Path) -> None:
    version = make(tmp_path / "iter_0000005", "mp_rank_00")
    assert find_version(version) == version


def test_nothing_and_other_things_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert find_version(tmp_path) is None
    assert find_version(tmp_path / "file") is None
    assert find_version(tmp_path / "missing") is None


@pytest.mark.parametrize("word", ["", "five", "-5", "5.0", "1e3", "²", "../iter_0000005", "5 6"])
def test_a_tracker_of_garbage_is_refused(tmp_path: Path, word: str) -> None:
    track(tmp_path, word)
    with pytest.raises(
        CorruptCheckpoint,
        match=r"latest_checkpointed_iteration\.txt: .*iteration number or `release`",
    ):
        find_version(tmp_path)


def test_the_error_about_a_tracker_does_not_quote_the_file_that_it_links_to(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").symlink_to(secret)
    with pytest.raises(CorruptCheckpoint, match="iteration number or `release`") as caught:
        find_version(tmp_path / "run")
    assert "password" not in str(caught.value)


def test_a_tracker_of_binary_garbage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(bytes(range(256)))
    with pytest.raises(CorruptCheckpoint, match="iteration number or `release`"):
        find_version(tmp_path)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("5", "says 5"),
        ("release", "says release"),
        ("9" * 300, "300 characters"),
        ("9" * 4000, "4000 char"),
    ],
)
def test_a_tracker_that_points_nowhere_is_refused(tmp_path: Path, word: str, expected: str) -> None:
    make(tmp_path / "iter_0000009", "mp_rank_00")
    track(tmp_path, word)
    with pytest.raises(
        CorruptCheckpoint, match=rf"latest_checkpointed_iteration\.txt: .*{expected}"
    ):
        find_version(tmp_path)


# Reading an iteration.


def test_ranks_are_listed_by_their_numbers(tmp_path: Path) -> None:
    version = make(
        tmp_path / "iter_0000005",
        "mp_rank_00_000",
        "mp_rank_01_000",
        "mp_rank_00_001",
        "mp_rank_01_001",
    )
    found = read(version)
    assert found.iteration == 5
    assert list(found.files) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found.files[1, 0] == version / "mp_rank_01_000" / "model_optim_rng.pt"


def test_one_and_three_numbers_are_known_too(tmp_path: Path) -> None:
    assert list(read(make(tmp_path / "a", "mp_rank_00", "mp_rank_100")).files) == [(0,), (100,)]
    assert list(read(make(tmp_path / "b", "mp_rank_00_000_007")).files) == [(0, 0, 7)]


def test_a_release_has_no_iteration(tmp_path: Path) -> None:
    assert read(make(tmp_path / "release", "mp_rank_00")).iteration is None


def test_other_entries_are_passed_over(tmp_path: Path) -> None:
    version = make(tmp_path / "iter_0000005", "mp_rank_00")
    for name in ("mp_rank_1", "mp_rank_00_1", "mp_rank_00.bak", "xmp_rank_00", "dist_optim"):
        (version / name).mkdir()
    (version / "mp_rank_01").touch()
    assert list(read(version).files) == [(0,)]


def test_a_rank_directory_without_its_file_is_named(tmp_path: Path) -> None:
    version = make(tmp_path / "iter_0000005", "mp_rank_00", "mp_rank_01")
    (version / "mp_rank_01" / "model_optim_rng.pt").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"mp_rank_01/model_optim_rng\.pt: no such file"):
        read(version)


def test_a_directory_in_place_of_a_rank_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").mkdir(parents=True)
    with pytest.raises(CorruptCheckpoint, match=r"mp_rank_00/model_optim_rng\.pt: no such file"):
        read(tmp_path)


def test_different_kinds_of_rank_directories_are_refused(tmp_path: Path) -> None:
    version = make(tmp_path / "iter_0000005", "mp_rank_00", "mp_rank_00_001")
    with pytest.raises(
        CorruptCheckpoint, match="different kinds in one place: mp_rank_00, mp_rank_00_001"
    ):
        read(version)


def test_two_names_of_one_rank_are_refused(tmp_path: Path) -> None:
    version = make(tmp_path / "iter_0000005", "mp_rank_00", "mp_rank_000")
    with pytest.raises(CorruptCheckpoint, match="mp_rank_000"):
        read(version)


def test_a_distributed_checkpoint_is_another_format(tmp_path: Path) -> None:
    version = make(tmp_path / "iter_0000005", "mp_rank_00")
    assert is_rank_files(version)
    (version / "metadata.json").write_text("{}")
    assert not is_rank_files(version)
