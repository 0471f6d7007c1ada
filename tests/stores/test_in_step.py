"""Tensors of one fused tensor are written in step: few of its parts are open at once, and the bytes are those of a local output."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from formats.output import FileLayout, PlainFile, Record
from formats.stores.part_file import PartFile
from formats.stores.waiting import Waiting
from formats.tensor import Box
from megaconv.engine import conversion
from megaconv.engine.in_step import in_step, units
from megaconv.engine.parts import orders
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.model.ir import Key
from megaconv.model.regions import Region
from tests.models import write_llama
from tests.runs import run
from tests.stores.attacks import kill, undisturbed
from tests.stores.conftest import BUCKET
from tests.stores.small_store import SmallStore
from tests.stores.test_writing import assert_only, local

OUT = f"s3://{BUCKET}/out"
Q, K, V = Key("q"), Key("k"), Key("v")


def _blocks(rows: int, step: int) -> Iterator[Box]:
    for row in range(0, rows, step):
        yield Box(row, min(row + step, rows), 0, 1)


def test_the_block_after_the_smallest_share_comes_next() -> None:
    moved = list(in_step([(8, _blocks(8, 2)), (2, _blocks(2, 1)), (0, _blocks(0, 1))]))
    assert [(number, box.row0) for number, box in moved] == [
        (0, 0), (1, 0), (0, 2), (0, 4), (1, 1), (0, 6),
    ]  # fmt: skip


def _plan(**places: list[tuple[int, int, int]]) -> OutputPlan:
    """A plan of one file with one output tensor. places: (row, end, row in the output tensor) of each tensor's regions."""
    layout: FileLayout = PlainFile(b"")
    layout.records = {"fused": Record(0, 1000)}  # type: ignore[attr-defined]
    placements = {
        Key(name): [
            Placement("file", "fused", 1, [Region(Box(row, end, 0, 1), at) for row, end, at in found])
        ]
        for name, found in places.items()
    }  # fmt: skip
    return OutputPlan({"file": layout}, placements)


def test_tensors_that_fill_the_rows_in_turn_are_moved_in_step() -> None:
    plan = _plan(v=[(0, 1, 5), (1, 2, 11)], q=[(0, 4, 0), (4, 8, 6)], k=[(0, 1, 4), (1, 2, 10)])
    (order,) = orders(plan)
    assert order == {Q: 0, K: 0, V: 0}


def test_tensors_that_follow_one_another_are_not() -> None:
    plan = _plan(v=[(0, 2, 10)], q=[(0, 8, 0)], k=[(0, 2, 8)])
    (order,) = orders(plan)
    assert order == {Q: 0, K: 1, V: 2}


def test_tensors_of_other_output_tensors_are_not() -> None:
    plan = _plan(q=[(0, 4, 0), (4, 8, 20)], k=[(0, 1, 8)])
    apart = plan.placements[K][0]._replace(offset=2)
    extents = {("file", Q): (0, 24), ("file", K): (10, 11)}
    found = units(OutputPlan(plan.files, {**plan.placements, K: [apart]}), extents)
    assert found == [[Q], [K]]


@pytest.fixture
def open_parts(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Waiting]]:
    """(the numbers of parts that were open at once, the plans)."""
    counts: list[int] = []
    plans: list[Waiting] = []
    files: list[PartFile] = []
    parts_of, make, part = conversion.parts_of, PartFile.__init__, PartFile._part

    def planned(*arguments: object) -> object:
        parts, waiting = parts_of(*arguments)  # type: ignore[arg-type]
        plans.append(waiting)
        files.clear()
        return parts, waiting

    def made(file: PartFile, *arguments: object, **words: object) -> None:
        make(file, *arguments, **words)  # type: ignore[arg-type]
        files.append(file)

    def counted(file: PartFile, number: int) -> object:
        found = part(file, number)
        counts.append(sum(len(each._open) for each in files))
        return found

    monkeypatch.setattr(conversion, "parts_of", planned)
    monkeypatch.setattr(PartFile, "__init__", made)
    monkeypatch.setattr(PartFile, "_part", counted)
    return counts, plans


_LAYOUTS = [
    "--tp 1", "--tp 2", "--tp 2 --pp 2", "--tp 4", "--ckpt-format torch_dist", "--ckpt-format torch_dist --tp 2",
]  # fmt: skip


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(24)]
)
def test_no_more_parts_are_open_than_planned_and_the_bytes_are_those_of_a_local_output(
    writable: SmallStore,
    tmp_path: Path,
    open_parts: tuple[list[int], list[Waiting]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dice = random.Random(seed)
    for module in ("plan", "open_parts"):
        monkeypatch.setattr(f"megaconv.engine.{module}.BLOCK_BYTES", 4096)
    monkeypatch.setattr("megaconv.engine.outputs.MEMORY_BYTES", dice.choice([64, 256, 1024]) << 10)
    kv_heads = dice.choice([2, 4])
    source = write_llama(
        tmp_path / "model", layers=2, hidden=64, ffn=dice.choice([96, 512]), vocab=dice.choice([131, 1024]),
        heads=4 * dice.choice([1, 2, 4]), kv_heads=kv_heads, head_dim=dice.choice([16, 64]), seed=seed,
    )  # fmt: skip
    words = f"--saver core {dice.choice(_LAYOUTS)} --workers {dice.choice([1, 2, 3])}"
    outcome = run("convert", source, OUT, *words.split(), "--max-memory", "256KiB")
    assert outcome.status == 0, outcome.err
    assert_only(writable, local(words, tmp_path / "local", source))
    counts, plans = open_parts
    assert 0 < max(counts) <= plans[0].open_parts, words


def test_a_fused_tensor_of_many_parts_fits_into_little_memory(
    writable: SmallStore,
    tmp_path: Path,
    open_parts: tuple[list[int], list[Waiting]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fused tensor of 24 parts had all of them open after q was written."""
    for module in ("plan", "open_parts"):
        monkeypatch.setattr(f"megaconv.engine.{module}.BLOCK_BYTES", 4096)
    monkeypatch.setattr("megaconv.engine.outputs.MEMORY_BYTES", 10 * (16 << 10))
    source = write_llama(
        tmp_path / "model", layers=2, hidden=128, heads=16, kv_heads=4, head_dim=64
    )
    words = "--saver core --tp 1"
    outcome = run("convert", source, OUT, *words.split(), "--max-memory", "256KiB")
    assert outcome.status == 0, outcome.err
    assert_only(writable, local(words, tmp_path / "local", source))
    counts, plans = open_parts
    assert not plans[0].is_spooled
    assert max(counts) <= plans[0].open_parts <= 7


@pytest.mark.parametrize("kills", [2, pytest.param(24, marks=pytest.mark.slow)])
def test_killed_runs_leave_nothing_or_everything(
    writable: SmallStore, tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaconv.engine.outputs.MEMORY_BYTES", 10 * (16 << 10))
    source = write_llama(tmp_path / "model", layers=2, hidden=128, heads=8, kv_heads=4, head_dim=64)
    words = ("convert", source, OUT, "--saver", "core", "--max-memory", "256KiB")
    scenario, count = undisturbed(writable, words)
    dice = random.Random(kills)
    for place in range(kills):
        kill(writable, scenario, dice.randrange(count), after=bool(place % 2), resume=place % 4 < 3)
