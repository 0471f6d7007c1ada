"""Sources that change while they are read: no output is a mixture. And what a run that is resumed takes for unchanged."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import megaconv
from formats.opened import OpenedFiles
from formats.regular_files import read_small, regular_size
from formats.tensor import Box, Bytes, FileTensor
from megaconv.engine.conversion import convert
from megaconv.errors import CorruptCheckpoint
from megaconv.options import ConvertOptions, LoadOptions, SaveOptions
from tests.conftest import FIXTURES
from tests.engine.test_interrupted import KILL
from tests.forks import start
from tests.models import write_llama
from tests.runs import finish, run

READS = 20
"""The source changes before this read of a tensor."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", shards=3)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """meanwhile(change): it happens while tensors are read."""

    def install(change: Callable[[], object]) -> None:
        read_into, reads = FileTensor.read_into, []

        def changing(self: FileTensor, box: Box, out: Bytes) -> None:
            reads.append(1)
            if len(reads) == READS:
                change()
            read_into(self, box, out)

        monkeypatch.setattr(FileTensor, "read_into", changing)

    return install


def shard(model: Path) -> Path:
    return next(iter(sorted(model.glob("*-00002-of-*.safetensors"))))


def overwrite(path: Path) -> None:
    """Change a file in place. Its size and its time stay the same."""
    before, content = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    """Replace a file by a copy with the same time, as a download or a save does."""
    shutil.copy2(path, path.with_name("new"))
    path.with_name("new").rename(path)


CHANGES = {
    "overwritten": overwrite,
    "touched": os.utime,
    "replaced": replace,
    "removed": Path.unlink,
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "name", ["shard", "config.json", "model.safetensors.index.json", "tokenizer.json"]
)
def test_a_source_that_changes_while_it_is_read_ends_the_run(
    model: Path,
    meanwhile: Callable[[Callable[[], object]], None],
    change: str,
    name: str,
    verify: bool,
) -> None:
    (model / "tokenizer.json").write_text('{"a": "bcdefghi"}')
    path = shard(model) if name == "shard" else model / name
    meanwhile(lambda: CHANGES[change](path))
    with pytest.raises(
        CorruptCheckpoint, match=f"{path}: .* {'read|opened' if change == 'removed' else 'while'}"
    ):
        convert(model, model.parent / "out", "core", ConvertOptions(verify=verify, resume=True))
    assert sorted(entry.name for entry in model.parent.iterdir()) == ["model"]


def test_an_original_that_changes_while_it_is_copied_ends_the_run(
    model: Path, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    base = write_llama(model.parent / "base")
    meanwhile(lambda: overwrite(base / "model.safetensors"))
    with pytest.raises(CorruptCheckpoint, match=f"{base / 'model.safetensors'}: was changed"):
        convert(model, model.parent / "out", "hf", ConvertOptions(save=SaveOptions(base=base)))
    assert not (model.parent / "out").exists()


@pytest.mark.parametrize("kind", ["core", "legacy", "torch_dist", "zarr", "dcp", "llama_mistral"])
def test_every_kind_of_source_is_watched(
    model: Path, meanwhile: Callable[[Callable[[], object]], None], kind: str, tmp_path: Path
) -> None:
    ckpt_format = kind if kind in ("torch_dist", "zarr") else "torch"
    saver = "core" if ckpt_format != "torch" else kind
    source = tmp_path / "source"
    convert(model, source, saver, ConvertOptions(save=SaveOptions(ckpt_format=ckpt_format)))
    largest = max(
        (path for path in source.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    meanwhile(lambda: overwrite(largest))
    load = LoadOptions(config=model) if kind == "dcp" else LoadOptions()
    with pytest.raises(CorruptCheckpoint, match=f"{largest}: was changed while it was read"):
        convert(source, tmp_path / "out", "hf", ConvertOptions(load=load))
    assert not (tmp_path / "out").exists()


def test_a_run_may_save_its_next_iteration_while_one_is_converted(
    tmp_path: Path, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    source = shutil.copytree(FIXTURES / "dist-llama-tp2pp2", tmp_path / "source")
    tracker = source / "latest_checkpointed_iteration.txt"

    def save() -> None:
        shutil.copytree(source / "iter_0000010", source / "iter_0000020")
        tracker.write_text("20")

    meanwhile(save)
    convert(source, tmp_path / "out", "hf", ConvertOptions())
    assert tracker.read_text() == "20"


def test_files_that_a_source_opens_late_are_watched_for_changes(
    model: Path, meanwhile: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader of another package may open files this late."""
    later = model.parent / "later"
    later.write_text("content")
    tensors = megaconv.engine.opening.LazySource.tensors

    def opening(self: Any) -> Iterator[Any]:
        regular_size(later)
        yield from tensors(self)

    monkeypatch.setattr("megaconv.engine.opening.LazySource.tensors", opening)
    meanwhile(lambda: replace(later))
    with pytest.raises(CorruptCheckpoint, match=f"{later}: was replaced"):
        convert(model, model.parent / "out", "core", ConvertOptions())


def test_nothing_is_noted_outside(tmp_path: Path) -> None:
    opened, file = OpenedFiles(), tmp_path / "file"
    file.write_text("content")
    read_small(file, 100)
    assert opened.listing() == []
    with opened:
        read_small(file, 100)
        with OpenedFiles() as inner:
            regular_size(file)
    assert [path for path, _, _ in opened.listing()] == [str(file)]
    assert inner.listing() == opened.listing()


def test_a_file_may_be_opened_while_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server compares the files of a source in one thread, and opens further ones in another."""
    opened, files = OpenedFiles(), [tmp_path / name for name in "abc"]
    for file in files:
        file.write_text("content")
    first, second, later = files
    for file in (first, second):
        opened.note(file, file.stat())
    open_file = os.open

    def opening(*words: Any, **values: Any) -> int:
        opened.note(later, later.stat())
        return open_file(*words, **values)

    monkeypatch.setattr(os, "open", opening)
    opened.require_unchanged()
    assert len(opened.listing()) == len(files)


# Resuming.


COUNT = """
from formats.tensor import FileTensor
read_into = FileTensor.read_into
def counted(self, box, out):
    print("read")
    read_into(self, box, out)
FileTensor.read_into = counted
"""


@contextmanager
def killed_half_way(model: Path) -> Iterator[Callable[[], int]]:
    """A run that was killed when 29 of its 39 tensors were done; gives how many the one that resumes it reads."""
    words = [
        "convert",
        "--load-dir",
        model,
        "--saver",
        "core",
        "--save-dir",
        model.parent / "out",
        "--resume",
    ]
    words += ["--workers", 1]
    journal = str(model.parent / ".out.megaconv-partial" / "journal.jsonl")
    journaled = f"while open({journal!r}).read().count(chr(10)) < 30: pass"
    kill = KILL.format(owner="FileTensor", name="read_into", number=30, journaled=journaled)
    assert finish(start(*words, before=kill)).status == -9

    def resume() -> int:
        outcome = finish(start(*words, before=COUNT))
        assert outcome.status == 0, outcome.err
        return outcome.out.count("read\n")

    yield resume
    assert run("diff", model, model.parent / "out").status == 0


def test_a_file_that_is_saved_beside_the_source_does_not_make_a_run_start_over(model: Path) -> None:
    with killed_half_way(model) as resume:
        (model / "notes.txt").write_text("half way")
        (model / "runs").mkdir()
        assert resume() == 10


@pytest.mark.parametrize("change", ["overwritten", "touched", "replaced"])
def test_a_file_of_the_source_that_changed_makes_a_run_start_over(model: Path, change: str) -> None:
    with killed_half_way(model) as resume:
        CHANGES[change](shard(model))
        assert resume() == 39


def test_a_new_file_that_goes_into_the_output_makes_a_run_start_over(model: Path) -> None:
    with killed_half_way(model) as resume:
        (model / "tokenizer.json").write_text("{}")
        assert resume() == 39
    assert (model.parent / "out" / "hf" / "tokenizer.json").is_file()
