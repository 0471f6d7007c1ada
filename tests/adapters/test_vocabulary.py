"""Adapters that change the vocabulary: more tokens than the base has, and rows of single tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from tests.adapters.test_adapters import PREFIX, edited
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

RESIZED, TIED = FIXTURES / "peft-llama-resized-saved", FIXTURES / "peft-llama-resized-tied"
TOKENS = FIXTURES / "peft-llama-tokens"
TOKENS_ADDED = 9
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("case", [RESIZED, TIED, TOKENS], ids=lambda case: case.name)
def test_a_resized_vocabulary_is_padded_for_megatron_and_comes_back(
    case: Path, tmp_path: Path
) -> None:
    """megaconv computes the fingerprint of peft's own merged model on the other side."""
    report = megaconv.convert(
        case / "base", tmp_path / "core", saver="core", tp=2, adapters=[str(case / "adapter")]
    )
    assert report.fingerprint == megaconv.fingerprint(case / "merged")
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    back, merged = (
        json.loads((path / "config.json").read_text())
        for path in (tmp_path / "back", case / "merged")
    )
    keys = ("vocab_size", "tie_word_embeddings")
    assert [back[key] for key in keys] == [merged[key] for key in keys]


def test_the_output_has_the_tokenizer_of_the_resized_vocabulary(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", edited(RESIZED / "adapter", tmp_path / "adapter")
    base.mkdir()
    for file in (RESIZED / "base").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    (base / "tokenizer.json").write_text('{"of": "base"}')
    (adapter / "tokenizer.json").write_text('{"of": "adapter"}')
    outcome = run("merge", base, adapter, "--save-dir", tmp_path / "out")
    assert f"tokens instead of {_vocab(RESIZED)}; the tokenizer is the adapter's" in outcome.err
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == {"of": "adapter"}


def test_a_tokenizer_that_is_nowhere_is_asked_for(tmp_path: Path) -> None:
    outcome = run("merge", RESIZED / "base", RESIZED / "adapter", "--save-dir", tmp_path / "out")
    assert "copy the one of the training to the output" in outcome.err


def test_a_vocabulary_that_did_not_change_keeps_the_base_s_tokenizer(tmp_path: Path) -> None:
    adapter = edited(TOKENS / "adapter", tmp_path / "adapter")
    (adapter / "tokenizer.json").write_text("{}")
    outcome = run("merge", TOKENS / "base", adapter, "--save-dir", tmp_path / "out")
    assert "instead of" not in outcome.err
    assert not (tmp_path / "out/tokenizer.json").exists()


def _vocab(case: Path) -> int:
    found: int = json.loads((case / "base/config.json").read_text())["vocab_size"]
    return found


def _without_head(tensors: Tensors) -> Tensors:
    return {name: each for name, each in tensors.items() if "lm_head" not in name}


def _without_embedding(tensors: Tensors) -> Tensors:
    return {name: each for name, each in tensors.items() if "embed_tokens" not in name}


def _one_row_less(tensors: Tensors) -> Tensors:
    cut = f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta"
    return {**tensors, cut: tensors[cut][:-1]}


def _without_rows(tensors: Tensors) -> Tensors:
    return {name: each for name, each in tensors.items() if "token_adapter" not in name}


def _without_rows_of_head(tensors: Tensors) -> Tensors:
    return {name: each for name, each in tensors.items() if "lm_head.token_adapter" not in name}


def _of_a_norm(tensors: Tensors) -> Tensors:
    rows = tensors[f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta"]
    return {**tensors, f"{PREFIX}model.norm.token_adapter.trainable_tokens_delta": rows}


def _whole_numbers(tensors: Tensors) -> Tensors:
    rows = f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta"
    return {**tensors, rows: tensors[rows].to(torch.int32)}


@pytest.mark.parametrize(
    ("case", "settings", "change", "words"),
    [
        (RESIZED, {}, _without_embedding,
         ("a vocabulary of 108 tokens, the base of 99, and no model.embed_tokens.weight of 108",)),
        (RESIZED, {}, _without_head, ("a vocabulary of 108 tokens, the base of 99, and no lm_head.weight of 108",)),
        (TIED, {}, _without_head, ("and no lm_head.weight of 108",)),
        (TOKENS, {}, _without_rows_of_head, ("in trainable_token_indices for lm_head",)),
        (TOKENS, {"trainable_token_indices": [3]}, _without_rows, ("has no rows of the tokens in trainable_token_indices",)),
        (TOKENS, {}, _of_a_norm,
         ("rows of single tokens for model.norm.weight, which is neither an embedding nor a head",)),
        (TOKENS, {}, _whole_numbers, ("has rows of int32 for lm_head.weight",)),
        (TOKENS, {}, _one_row_less, ("has rows [2, 32]", "trainable_token_indices lists 3 tokens")),
        (TOKENS, {"trainable_token_indices": {"embed_tokens": [3, 99], "lm_head": [3, 9, 7]}}, dict,
         ("has a row for token 99", "has 99 tokens")),
        (TOKENS, {"trainable_token_indices": ["x"]}, dict, ("is no list of tokens",)),
        (TOKENS, {"trainable_token_indices": None}, dict, ("lists 0 tokens",)),
    ],
)  # fmt: skip
def test_a_vocabulary_that_does_not_fit_is_refused(
    case: Path,
    settings: dict[str, Any],
    change: Callable[[Tensors], Tensors],
    words: tuple[str, ...],
    tmp_path: Path,
) -> None:
    adapter = edited(case / "adapter", tmp_path / "adapter", settings, change)
    outcome = run("merge", case / "base", adapter, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, *words)


def test_rows_of_tokens_of_a_model_without_a_family_are_merged(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoModel.from_pretrained(TOKENS / "base").save_pretrained(tmp_path / "base")
    adapter = edited(
        TOKENS / "adapter", tmp_path / "adapter", {"trainable_token_indices": {"embed_tokens": [3, 5]}},
        tensors=lambda held: {name.replace(".model.model.", ".model."): each for name, each in held.items() if "lm_head" not in name},
    )  # fmt: skip
    outcome = run("merge", tmp_path / "base", adapter, "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome
    found = load_file(tmp_path / "out/model.safetensors")["embed_tokens.weight"]
    expected = load_file(TOKENS / "merged/model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(found, expected)


def test_a_resized_vocabulary_of_a_bare_model_is_refused_with_a_remedy(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    bare = transformers.AutoModel.from_pretrained(RESIZED / "base")
    bare.save_pretrained(tmp_path / "base")

    def of_bare_model(held: Tensors) -> Tensors:
        bare_names = {name.replace(".model.model.", ".model."): each for name, each in held.items()}
        return _without_head(bare_names)

    adapter = edited(RESIZED / "adapter", tmp_path / "adapter", {}, of_bare_model)
    outcome = run("merge", tmp_path / "base", adapter, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, "has 108 rows, the base's has 99", "resize_token_embeddings")


def test_rows_of_single_tokens_have_no_weight(tmp_path: Path) -> None:
    outcome = run(
        "merge", TOKENS / "base", f"{TOKENS / 'adapter'}:0.5", "--save-dir", tmp_path / "out"
    )
    assert outcome.status != 0
    assert "which have no weight" in outcome.err


def test_rows_of_single_tokens_are_not_translated(tmp_path: Path) -> None:
    outcome = run(
        "convert", "--loader", "peft", "--load-dir", TOKENS / "adapter", "--config", TOKENS / "base",
        "--saver", "core", "--ckpt-format", "torch_dist", "--save-dir", tmp_path / "out",
    )  # fmt: skip
    assert outcome.status != 0
    assert "rows of single tokens" in outcome.err


def test_a_tied_head_stays_tied_if_the_adapter_stores_it_twice(tmp_path: Path) -> None:
    stored = load_file(TIED / "adapter/adapter_model.safetensors")
    assert any(name.startswith(f"{PREFIX}lm_head.") for name in stored)
    run("merge", TIED / "base", TIED / "adapter", "--save-dir", tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]
