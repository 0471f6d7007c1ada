"""The share of each rank: every file and every hash once, evenly, and no tensor read without need."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.tensor import Box
from megaconv import registry
from megaconv.engine.plan import Placement, needed_boxes
from megaconv.engine.preparation import prepare
from megaconv.engine.shares import share_out
from megaconv.input import find_input
from megaconv.model.natives import Region
from megaconv.options import ConvertOptions, SaveOptions
from tests.models import write_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source") / "model", layers=8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 100])
@pytest.mark.parametrize(
    ("saver", "save"), [("core", SaveOptions(tp=2, pp=4)), ("core", SaveOptions(tp=4)), ("hf", SaveOptions(max_shard_bytes=9000))]
)  # fmt: skip
def test_every_file_and_every_hash_falls_to_one_rank(
    model: Path, ranks: int, saver: str, save: SaveOptions
) -> None:
    source, report = prepare(
        find_input(model), model.parent / "out", registry.saver(saver), ConvertOptions(save=save)
    )
    shares = share_out(report.plan, source.header.manifest, ranks)
    assert len(shares) == ranks
    assert sorted(name for share in shares for name in share.plan.files) == sorted(
        report.plan.files
    )
    assert sorted(key for share in shares for key in share.hashed) == sorted(source.header.manifest)
    for key, places in report.plan.placements.items():
        shared = [place for share in shares for place in share.plan.placements.get(key, ())]
        assert sorted(map(repr, shared)) == sorted(map(repr, places))
    for share in shares:
        assert {place.file for places in share.plan.placements.values() for place in places} <= set(
            share.plan.files
        )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_get_about_as_many_bytes_each(model: Path, ranks: int) -> None:
    source, report = prepare(
        find_input(model),
        model.parent / "out",
        registry.saver("core"),
        ConvertOptions(save=SaveOptions(tp=2, pp=4)),
    )
    sizes = [share.plan.nbytes for share in share_out(report.plan, source.header.manifest, ranks)]
    assert max(sizes) <= report.plan.nbytes / ranks + max(
        layout.size for layout in report.plan.files.values()
    )


BOXES = st.builds(
    lambda row, rows, col, cols: Box(row, row + rows, col, col + cols),
    st.integers(0, 12), st.integers(1, 6), st.integers(0, 4), st.integers(1, 4),
)  # fmt: skip


@given(st.lists(BOXES, max_size=8))
def test_needed_boxes_hold_the_rows_of_all_regions_once(boxes: list[Box]) -> None:
    needed = needed_boxes([Placement("file", "record", 1, [Region(box, 0)]) for box in boxes])
    rows = [row for box in needed for row in range(box.row0, box.row1)]
    assert rows == sorted({row for box in boxes for row in range(box.row0, box.row1)})
    assert all(box.col0 == min(other.col0 for other in boxes) for box in needed)
    assert all(box.col1 == max(other.col1 for other in boxes) for box in needed)
