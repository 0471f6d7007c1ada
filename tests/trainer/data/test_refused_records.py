"""JSON that is nested too deeply, numbers that no float holds and half characters are refused in one line by every reader of records."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from formats.errors import CheckpointError, CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.forms import read_tools
from megatron_lite.data.recipes.answers import _records
from megatron_lite.data.recipes.questions import read_questions
from megatron_lite.data.recipes.select import read_scores
from megatron_lite.data.recipes.values import number_at
from megatron_lite.data.tasks import passages
from megatron_lite.inference.questions import read_prompts
from megatron_lite.inference.retrieved import read_retrieved
from megatron_lite.inference.scoring import _rows

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "read",
    [
        lambda path: list(_records(path)),
        lambda path: list(read_questions(path)),
        lambda path: read_scores(path, "score"),
        lambda path: passages.read_questions(str(path)),
        lambda path: list(read_prompts(str(path))),
        lambda path: read_retrieved(str(path)),
        lambda path: list(_rows(None, str(path), [DEEP])),  # type: ignore[arg-type]
    ],
    ids=["answers", "questions", "select", "passages", "prompts", "retrieved", "score"],
)
def test_deep_json_is_refused_by_the_name_of_its_file(
    read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text(DEEP + "\n")
    with pytest.raises(CheckpointError, match=r"deep\.jsonl"):
        read(path)


def test_deep_json_of_tools_is_refused() -> None:
    with pytest.raises(BadRecord, match=r"tools. are not JSON"):
        read_tools({"tools": DEEP})


def test_a_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="line 1: score should be a number, found 999"):
        number_at({"score": 10**400 - 1}, "score", "line 1")


def test_half_a_character_in_a_row_to_score_is_refused_by_its_line(tmp_path: Path) -> None:
    opened = SimpleNamespace(tokenizer=HalfRefused())
    rows = _rows(opened, "rows.jsonl", ["", '{"text": "bad \\ud800"}'])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^rows\.jsonl:2: .* half of a surrogate pair"):
        list(rows)


class HalfRefused:
    """A tokenizer that refuses a text in words of its package."""

    begin = ()

    def tokenize(self, text: str) -> list[int]:
        raise ValueError("unable to cast")
