"""The `changes` of a report: a model's layers, experts, vocabulary and average, as values for programs."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import megaconv
from tests.engine.test_new_tokenizer import write_tokenizer
from tests.models import write_llama
from tests.runs import run

STAYS = {"average": None, "layers": None, "experts": None, "channels": None, "vocab": None}


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
        "experts": {
            "before": 0,
            "after": 4,
            "per_token": 2,
            "granularity": 1,
            "experts_of": [],
            "kept": None,
        },
        "channels": None,
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


@pytest.mark.parametrize(
    ("wide", "change"),
    [
        ((".layers.1.", "embed", "lm_head"), {"layers": "1"}),
        ((".mlp.",), {"num_experts": 8}),
        (("embed", "lm_head"), {"vocab_size": 2000}),
    ],
)
def test_config_json_has_the_dtype_of_most_of_the_changed_weights(
    wide: tuple[str, ...], change: dict[str, Any], tmp_path: Path
) -> None:
    """As of any model that megaconv reads. transformers loads all weights in this dtype."""
    mixed = write_llama(tmp_path / "mixed", layers=8, hidden=64, ffn=16)
    file = mixed / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if any(map(name.count, wide)):
            tensors[name] = tensors[name].float()
    save_file(tensors, file, metadata={"format": "pt"})
    assert megaconv.inspect(mixed).header.config.dtype == "bfloat16"
    megaconv.convert(mixed, tmp_path / "out", saver="hf", **change)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("torch_dtype", config.get("dtype")) == "float32"
    assert megaconv.inspect(tmp_path / "out").header.config.dtype == "float32"
