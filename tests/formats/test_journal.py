"""The journal of an output: what was finished is found again, and nothing else, whatever happened to its bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from formats.journal import Journal, changes

ENTRIES = [
    {"plan": "abc"},
    {"n": 1, "runs": [["a/b", "w", [[0, 128, 4023233417]]]]},
    {"n": 2, "name": "ä\n"},
]


def write(
    path: Path, entries: Sequence[dict[str, Any]] = ENTRIES, *, keep: bool = False
) -> Journal:
    journal = Journal(path)
    journal.open(keep=keep)
    journal.append([*entries])
    journal.close()
    return journal


def test_entries_come_back_in_their_order(tmp_path: Path) -> None:
    assert write(tmp_path / "journal").read() == ENTRIES
    assert Journal(tmp_path / "missing").read() == []


def test_a_line_is_a_checksum_and_an_object(tmp_path: Path) -> None:
    write(tmp_path / "journal", ENTRIES[:1])
    assert (tmp_path / "journal").read_bytes() == b'2190c46a {"plan": "abc"}\n'


def test_no_flipped_bit_is_believed(tmp_path: Path) -> None:
    """Each bit of a journal, one at a time: the entries before its line are kept, and no other is made up."""
    path = tmp_path / "journal"
    write(path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for place in range(len(whole)):
        line = next(n for n in range(len(lines)) if place < sum(map(len, lines[: n + 1])))
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            assert Journal(path).read() == ENTRIES[:line], (place, bit)


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_truncated_entry_of_a_journal_is_dropped_and_overwritten(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "journal"
    write(path)
    path.write_bytes(path.read_bytes()[:-cut])
    kept = Journal(path).read()
    assert kept == ENTRIES[: len(kept)]
    assert len(kept) < len(ENTRIES)
    assert write(path, [{"n": 3}], keep=True).read() == [*kept, {"n": 3}]


def test_a_new_journal_forgets_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    assert write(tmp_path / "journal", [{"n": 3}]).read() == [{"n": 3}]


def test_closing_again_is_harmless(tmp_path: Path) -> None:
    journal = write(tmp_path / "journal")
    journal.close()
    assert not journal.is_open


def test_changed_parts_of_a_plan_are_named_with_their_values() -> None:
    assert (
        changes({"--dtype": "bf16", "files": "3"}, {"--dtype": "None", "files": "3"})
        == "--dtype is None, was bf16"
    )
    assert changes({"a.bin": 64 * "0"}, {"a.bin": 64 * "1"}) == "a.bin has changed"
    assert changes({"a": "1"}, {"b": "1"}) == "b was not part of it; a is no longer part of it"
    assert changes("abc", {"a": "1"}) == "another version of megaconv wrote its journal"
    many = {str(number): "1" for number in range(9)}
    assert (
        changes(many, dict.fromkeys(many, "2"))
        == "0 is 2, was 1; 1 is 2, was 1; 2 is 2, was 1; and 6 more"
    )
