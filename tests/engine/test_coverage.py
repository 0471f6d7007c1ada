"""Before the first byte is written a plan is known to write every element of every tensor, and every byte of every file once."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.output import FileLayout, Record
from formats.tensor import Box
from megaconv import registry
from megaconv.engine.coverage import multiplicity, require_complete
from megaconv.engine.opening import open_source
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.engine.preparation import prepare
from megaconv.errors import CheckpointError
from megaconv.input import find_input
from megaconv.model.ir import Key, TensorInfo
from megaconv.model.regions import PLAIN, Order, Region, Repeated
from megaconv.model.spellings.halves import AsHalves
from megaconv.model.spellings.rotary_pairs import AsPairs
from megaconv.model.spellings.transposed import AS_COLUMNS
from megaconv.options import ConvertOptions, SaveOptions
from tests.models import write_llama


class Layout:
    """A file of records, one behind the other."""

    needs_checksums = False

    def __init__(self, **sizes: int) -> None:
        self.records = {name: Record(0, size) for name, size in sizes.items()}
        self.size = sum(sizes.values())

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        return iter(())


TENSOR = Key("embedding.weight")
MANIFEST = {TENSOR: TensorInfo((6, 4), "float32")}
ROW_BYTES = 4 * 4


def planned(
    *placements: Placement, zeros: tuple[tuple[str, str, int, int], ...] = (), **sizes: int
) -> OutputPlan:
    files: dict[str, FileLayout] = {"file": Layout(**sizes)}
    return OutputPlan(files, {TENSOR: placements}, zeros)


def rows(start: int, stop: int, at: int = 0, order: Order = PLAIN) -> Region:
    return Region(Box(start, stop, 0, 4), at, order=order)


def placed(record: str, *regions: Region, offset: int = 0) -> Placement:
    return Placement("file", record, ROW_BYTES, regions, offset)


GOOD = {
    "whole": planned(placed("a", rows(0, 6)), a=96),
    "in two shards": planned(placed("a", rows(0, 3)), placed("b", rows(3, 6)), a=48, b=48),
    "in two copies": planned(placed("a", rows(0, 6)), placed("b", rows(0, 6)), a=96, b=96),
    "in halves of columns": planned(
        Placement("file", "a", 8, [Region(Box(0, 6, 0, 2), 0)]), Placement("file", "b", 8, [Region(Box(0, 6, 2, 4), 0)]), a=48, b=48
    ),
    "transposed": planned(Placement("file", "a", 24, [Region(Box(0, 6, 0, 4), 0, order=AS_COLUMNS)]), a=96),
    "behind each other in a buffer": planned(placed("a", rows(3, 6), offset=48), placed("a", rows(0, 3)), a=96),
    "as pairs of rows": planned(placed("a", rows(0, 6, order=AsPairs(2))), a=96),
    "as two halves": planned(placed("a", rows(0, 6, order=AsHalves())), a=96),
    "padded with its last row": planned(placed("a", rows(0, 6), rows(5, 6, 6, Repeated(2))), a=128),
    "padded with one row": planned(placed("a", rows(0, 6), rows(5, 6, 6)), a=112),
    "padded with zeros": planned(placed("a", rows(0, 6)), zeros=(("file", "a", 96, 32),), a=128),
    "padding alone on a rank": planned(placed("a", rows(0, 6)), placed("b"), zeros=(("file", "b", 0, 32),), a=96, b=32),
    "with a record of nothing": planned(placed("a", rows(0, 6)), a=96, b=0),
}  # fmt: skip


@pytest.mark.parametrize("plan", GOOD.values(), ids=GOOD.keys())
def test_a_plan_that_writes_everything_once_passes(plan: OutputPlan) -> None:
    require_complete(plan, MANIFEST)


BAD = {
    "no place at all": (planned(), "has no place"),
    "rows are missing": (planned(placed("a", rows(0, 5)), a=80), "not hold all of it"),
    "rows are missing in the middle": (planned(placed("a", rows(0, 2), rows(3, 6, 2)), a=80), "not hold all of it"),
    "columns are missing": (
        planned(Placement("file", "a", 12, [Region(Box(0, 6, 0, 3), 0)]), a=72), "not hold all of it",
    ),
    "as many rows as there should be, not all of them": (
        planned(placed("a", rows(0, 3)), placed("b", rows(2, 5)), a=48, b=48), "not hold all of it",
    ),
    "a row twice in one tensor": (planned(placed("a", rows(0, 6), rows(2, 3, 6)), a=112), "a part of it twice"),
    "rows that there are none of": (planned(placed("a", rows(0, 7)), a=112), "reaches out"),
    "a gap in the output": (planned(placed("a", rows(0, 3), rows(3, 6, 4)), a=112), "16 bytes would not be written"),
    "a gap, and the end written over": (planned(placed("a", rows(0, 3), rows(3, 6, 4)), a=96), "reaches out"),
    "written over each other": (planned(placed("a", rows(0, 3), rows(3, 6, 2)), a=96), "twice, or never"),
    "more than there is room for": (planned(placed("a", rows(0, 6)), a=80), "written over twice"),
    "a record that nobody fills": (planned(placed("a", rows(0, 6)), a=96, b=16), "1 of 2 tensors"),
    "a record that there is none of": (planned(placed("c", rows(0, 6)), a=96), "no such record"),
    "zeros where there is no record": (planned(placed("a", rows(0, 6)), zeros=(("file", "c", 0, 8),), a=96), "no such record"),
    "a file that there is none of": (planned(placed("a", rows(0, 6))._replace(file="other"), a=96), "no such record"),
    "rows of half an element": (planned(placed("a", rows(0, 6))._replace(row_bytes=2), a=96), "rows of 2 bytes"),
    "one record twice": (planned(placed("a", rows(0, 6)), placed("a", rows(0, 6)), a=96), "2 of 1 tensors"),
    "half a head": (planned(placed("a", rows(0, 6, order=AsPairs(4))), a=96), "would be parted"),
    "a row without its half": (
        planned(placed("a", rows(0, 3, order=AsHalves())), placed("b", rows(3, 6, order=AsHalves())), a=48, b=48), "would be parted",
    ),
    "zeros over a tensor": (
        planned(placed("a", rows(0, 6)), zeros=(("file", "a", 80, 32),), a=128), "twice, or never",
    ),
    "a gap in a buffer": (
        planned(placed("a", rows(0, 3)), placed("a", rows(3, 6), offset=64), zeros=(("file", "a", 112, 16),), a=112), "twice, or never",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "words"), BAD.values(), ids=BAD.keys())
def test_a_plan_that_leaves_out_or_writes_twice_is_refused(plan: OutputPlan, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as found:
        require_complete(plan, MANIFEST)
    assert found.value.code == "internal-error"


BOXES = st.builds(
    lambda row, rows, col, cols: Box(row, min(9, row + rows), col, min(5, col + cols)),
    st.integers(0, 9), st.integers(0, 9), st.integers(0, 5), st.integers(0, 5),
)  # fmt: skip


@given(st.lists(BOXES, max_size=8))
def test_multiplicity_is_what_counting_every_element_gives(boxes: list[Box]) -> None:
    counted = [
        sum(box.row0 <= row < box.row1 and box.col0 <= col < box.col1 for box in boxes)
        for row in range(9)
        for col in range(5)
    ]
    assert multiplicity(boxes, 9, 5) == (min(counted), max(counted))


def without_a_row(place: Placement) -> Placement:
    first, *others = place.regions
    return place._replace(
        regions=[first._replace(box=first.box._replace(row1=first.box.row1 - 1)), *others]
    )


def one_row_on(place: Placement) -> Placement:
    return place._replace(regions=[region._replace(row=region.row + 1) for region in place.regions])


def of_other_rows(place: Placement) -> Placement:
    """The placement with as many rows, counted from the tensor's first row."""
    boxes = (region.box for region in place.regions)
    firsts = [box._replace(row0=0, row1=box.rows) for box in boxes]
    return place._replace(
        regions=[
            region._replace(box=box) for region, box in zip(place.regions, firsts, strict=True)
        ]
    )


@pytest.mark.parametrize("change", [without_a_row, one_row_on, of_other_rows])
@pytest.mark.parametrize(
    "tensor", ["layers.1.attn.k.weight", "layers.0.mlp.gate.weight", "head.weight"]
)
def test_one_rectangle_that_is_changed_makes_a_real_plan_be_refused(
    tmp_path: Path, change: Callable[[Placement], Placement], tensor: str
) -> None:
    model = write_llama(tmp_path / "model", layers=2)
    source, report = prepare(
        find_input(model),
        tmp_path / "out",
        registry.saver("core"),
        ConvertOptions(save=SaveOptions(tp=2)),
    )
    key = next(key for key in source.header.manifest if key.name == tensor)
    *others, last = report.plan.placements[key]
    altered = {**report.plan.placements, key: [*others, change(last)]}
    with pytest.raises(CheckpointError, match="please report this"):
        require_complete(replace(report.plan, placements=altered), source.header.manifest)
    require_complete(report.plan, source.header.manifest)


def test_a_dry_run_refuses_what_a_saver_plans_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from savers import hf

    model = write_llama(tmp_path / "model")
    plan = hf.plan(open_source(find_input(model)).header, SaveOptions())
    key, *_ = plan.placements
    short = {**plan.placements, key: [without_a_row(place) for place in plan.placements[key]]}
    wrong = replace(hf.SAVER, plan=lambda header, options: replace(plan, placements=short))
    monkeypatch.setattr(hf, "SAVER", wrong)
    with pytest.raises(CheckpointError, match=f"{key.name}: the output would not hold all of it"):
        prepare(find_input(model), tmp_path / "out", registry.saver("hf"), ConvertOptions())
