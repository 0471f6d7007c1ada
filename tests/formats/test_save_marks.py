"""Marks at the end of `.distcp` files: read back, never mistaken, and never in the way of other readers."""

import io
from pathlib import Path

import pytest

from formats import save_marks, torch_zip
from formats.errors import CorruptCheckpoint
from formats.output import whole_content
from formats.tensor import InputFile

ONE, OTHER = "1" * save_marks.ID_LENGTH, "2" * save_marks.ID_LENGTH


def archive(value: object) -> bytes:
    return whole_content(torch_zip.plan(value, "archive"))


def written(path: Path, content: bytes, save_id: str | None = None) -> InputFile:
    path.write_bytes(content)
    if save_id is not None:
        save_marks.append(path, save_id)
    return InputFile.open(path)


def test_a_mark_is_read_back_and_loads_in_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    block = archive([1, 2])
    file = written(tmp_path / "__0_0.distcp", block, ONE)
    assert save_marks.read(file) == ONE
    behind = (tmp_path / "__0_0.distcp").read_bytes()[len(block) :]
    assert torch.load(io.BytesIO(behind), weights_only=True) == {"save_id": ONE}
    assert torch_zip.read_at(file, 0, len(block)) == [1, 2]


@pytest.mark.parametrize("kind", ["empty", "short", "object", "same size", "by chance", "bytes"])
def test_a_file_without_a_mark_has_none(kind: str, tmp_path: Path) -> None:
    mark = archive({"save_id": ONE})
    content = {
        "empty": b"",
        "short": b"PK\3\4",
        "object": archive([None]),
        "same size": archive({"save_ix": ONE}),
        "by chance": b"PK\3\4" + bytes(len(mark)),
        "bytes": bytes(5000),
    }[kind]
    assert save_marks.read(written(tmp_path / "__0_0.distcp", content)) is None


def test_files_of_one_save_are_accepted_and_a_file_of_another_is_not(tmp_path: Path) -> None:
    content = archive([1])
    first, second, other, unmarked = (
        written(tmp_path / f"__{number}_0.distcp", content, save_id)
        for number, save_id in enumerate((ONE, ONE, OTHER, None))
    )
    common = tmp_path / "common.pt"
    save_marks.require_one_save(common, {"save_id": ONE}, [first, second])
    save_marks.require_one_save(common, {"save_id": ONE}, [unmarked])  # of another program
    save_marks.require_one_save(common, {}, [first, other])  # no id to compare with
    for files, culprit in (
        ([first, other], other),
        ([first, unmarked], unmarked),
        ([other], other),
    ):
        with pytest.raises(CorruptCheckpoint) as refused:
            save_marks.require_one_save(common, {"save_id": ONE}, files)
        expected = f"{culprit.path}: is of another save than common.pt; copy all files of one save"
        assert str(refused.value) == expected
        assert refused.value.code == "mixed-iterations"
