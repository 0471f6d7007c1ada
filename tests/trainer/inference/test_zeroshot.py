"""Texts, windows and what counts of them are Megatron's; sums are those of the whole text's log-probabilities."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.inference.evaluation.windows import Window
from megatron_lite.inference.evaluation.zeroshot import (
    lambada,
    lambada_window,
    text_of,
    wikitext,
    wikitext_text,
    wikitext_windows,
)
from tests.trainer.inference.models import slots_of, tiny

FIXTURE = Path(__file__).parents[1] / "fixtures" / "zeroshot"
EXPECTED: dict[str, Any] = json.loads((FIXTURE / "expected.json").read_text())
LENGTH = EXPECTED["seq_length"]


class Bytes:
    """1 + each byte of UTF-8."""

    vocab_size = 257
    eod = 0

    def tokenize(self, text: str) -> list[int]:
        return [1 + byte for byte in text.encode()]


def padded(window: Window) -> tuple[list[int], list[int]]:
    """A window in Megatron's form: (length + 1 tokens, the mask of labels that count)."""
    room = LENGTH + 1 - len(window.tokens)
    before = len(window.tokens) - 1 - window.counted
    return [*window.tokens, *[0] * room], [0] * before + [1] * window.counted + [0] * room


def words() -> str:
    return (FIXTURE / "wiki.test.tokens").read_text()


def test_the_text_is_joined_as_megatron_does() -> None:
    assert wikitext_text(words()) == EXPECTED["detokenized"]
    assert text_of(Path("/data/wiki/ptb.txt"))("5 N $ 1 it 's") == "51 $1 it's"


@pytest.mark.parametrize(
    "case", EXPECTED["wikitext"], ids=lambda case: f"stride {case['overlapping_eval']}"
)
def test_windows_of_wikitext_are_those_of_megatron(case: dict[str, Any]) -> None:
    tokens = Bytes().tokenize(wikitext_text(words()))
    windows = list(wikitext_windows(tokens, LENGTH, case["overlapping_eval"]))
    assert len(windows) == case["sequences"]
    assert (
        sum(window.counted for window in windows)
        == len(tokens) - 1
        == case["num_tokenized_tokens"] - 1
    )
    assert len(words().strip().split(" ")) == case["num_original_tokens"]
    for row, text, mask in zip(case["rows"], case["text"], case["pad_mask"], strict=True):
        assert padded(windows[row]) == (text, mask)


@pytest.mark.parametrize("case", EXPECTED["lambada"], ids=lambda case: f"strict {case['strict']}")
def test_windows_of_lambada_are_those_of_megatron(case: dict[str, Any]) -> None:
    texts = [
        json.loads(line)["text"]
        for line in (FIXTURE / "lambada_test.jsonl").read_text().splitlines()
    ]
    found = [
        padded(lambada_window(text, Bytes().tokenize, strict=case["strict"])) for text in texts
    ]
    rows = case.get("rows", range(len(found)))
    assert [found[row] for row in rows] == list(zip(case["text"], case["pad_mask"], strict=True))


@pytest.mark.oracle
def test_measures_are_those_of_the_model() -> None:
    """With a stride of one, each token is predicted from all tokens that fit before it."""
    theirs = tiny(vocab_size=257)
    model, tokens = slots_of(theirs), Bytes().tokenize(wikitext_text(words()))
    found = wikitext(model, Bytes(), FIXTURE / "wiki.test.tokens", LENGTH)  # type: ignore[arg-type]
    total = 0.0
    for first in range(0, len(tokens) - 1, LENGTH):
        total -= float(
            model.score([tokens[first : first + LENGTH + 1]])[0].log_probs.double().sum()
        )
    loss, ratio = total / (len(tokens) - 1), (len(tokens) - 1) / 122
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["word_perplexity"] == pytest.approx(math.exp(min(20, loss * ratio)), rel=1e-6)
    strict = lambada(model, Bytes(), FIXTURE / "lambada_test.jsonl", strict=True)  # type: ignore[arg-type]
    loose = lambada(model, Bytes(), FIXTURE / "lambada_test.jsonl", strict=False)  # type: ignore[arg-type]
    assert (
        strict["examples"]
        == loose["examples"]
        == len((FIXTURE / "lambada_test.jsonl").read_text().splitlines())
    )


def test_other_line_ends_within_a_text_of_lambada_end_no_line(tmp_path: Path) -> None:
    """The second line is the first bad one."""
    text = '{"text": "fine\u2028other words"}\n{"txt": "none"}\n'
    (tmp_path / "lambada.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(CorruptCheckpoint, match=":2: expected"):
        lambada(slots_of(None), Bytes(), tmp_path / "lambada.jsonl", strict=True)  # type: ignore[arg-type]


def test_zero_shot_data_without_an_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lambada.jsonl").write_text('{"text": "fine words"}\n{"txt": "none"}\n')
    with pytest.raises(CorruptCheckpoint, match=":2"):
        lambada(slots_of(None), Bytes(), tmp_path / "lambada.jsonl", strict=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="wiki"):
        text_of(Path("/data/test.txt"))
