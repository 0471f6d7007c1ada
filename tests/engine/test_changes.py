"""The `changes` of a report: a model's layers, experts, vocabulary and average, as values for programs."""

import json
from pathlib import Path

import pytest

import megaconv
from tests.engine.test_new_tokenizer import write_tokenizer
from tests.models import write_llama
from tests.runs import run

STAYS = {"average": None, "layers": None, "experts": None, "vocab": None}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_llama(tmp_path_factory.mktemp("llama") / "hf", layers=2, vocab=270)
    return write_tokenizer(made)


def test_a_plain_conversion_changes_nothing(llama: Path, tmp_path: Path) -> None:
    report = megaconv.convert(llama, tmp_path / "out", saver="hf", dry_run=True)
    assert report.to_json()["changes"] == STAYS


def test_the_json_of_convert_has_all_changes(llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", layers=2, vocab=270, seed=3)
    words = ["--average", f"{other}:0.25", "--layers", "1,0,1", "--num-experts", 4]
    vocabulary = ["--vocab-size", 275, "--new-rows", "zero"]
    outcome = run(
        "convert", llama, tmp_path / "out", "--saver", "hf", "--json", *words, *vocabulary
    )
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["changes"] == {
        "average": {
            "method": "linear",
            "models": [{"model": str(llama), "share": 0.75}, {"model": str(other), "share": 0.25}],
        },
        "layers": {"before": 2, "after": 3, "chosen": [1, 0, 1]},
        "experts": {"before": 0, "after": 4, "per_token": 2, "granularity": 1, "experts_of": []},
        "vocab": {
            "before": 270,
            "after": 275,
            "copied": 270,
            "filled": 5,
            "new_rows": "zero",
            "tokenizer": None,
            "special_tokens": {},
        },
    }


def test_rows_and_special_tokens_of_a_new_tokenizer_are_values(llama: Path, tmp_path: Path) -> None:
    new = write_tokenizer(tmp_path / "new", tuple(f"<tool_{n}>" for n in range(12)))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<tool_9>"}
    (new / "tokenizer_config.json").write_text(json.dumps(settings))
    words = {"saver": "hf", "tokenizer": new, "dry_run": True}

    found = megaconv.convert(llama, tmp_path / "out", **words).changes.vocab
    assert found is not None
    assert (found.copied, found.filled, found.new_rows, found.tokenizer) == (
        270,
        5,
        "mean",
        str(new),
    )
    assert found.special_tokens == {"eos_token_id": {"before": [2], "after": [272, 2]}}

    filled = megaconv.convert(llama, tmp_path / "out", new_rows="zero", **words).changes.vocab
    assert filled is not None
    assert (filled.before, filled.after, filled.copied, filled.filled) == (270, 275, 263, 12)


def test_fewer_rows_are_copied_and_none_filled(llama: Path, tmp_path: Path) -> None:
    words = {"saver": "hf", "vocab_size": 266, "dry_run": True}
    found = megaconv.convert(llama, tmp_path / "out", **words).changes.vocab
    assert found is not None
    assert (found.after, found.copied, found.filled, found.new_rows) == (266, 266, 0, None)


def test_the_model_that_differences_are_added_to_has_no_share(llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", layers=2, vocab=270, seed=3)
    words = ["average", llama, f"{other}:0.5", "--save-dir", tmp_path / "out", "--method", "ties"]
    outcome = run(*words, "--density", 0.2, "--json")
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["changes"]["average"] == {
        "method": "ties",
        "models": [{"model": str(llama), "share": None}, {"model": str(other), "share": 0.5}],
    }
