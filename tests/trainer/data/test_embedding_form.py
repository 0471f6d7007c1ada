"""sentence-transformers' files: what they say of vectors is read, and other modules are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CorruptCheckpoint
from megaconv.errors import NotExpressible, UsageError
from megatron_lite.data.embedding_form import (
    EmbeddingForm,
    form_files,
    read_form,
    read_length,
    text_tokens,
)
from megatron_lite.data.tokenizer import NullTokenizer

POOLING, MODULES, PROMPTS = "1_Pooling/config.json", "modules.json", "config_sentence_transformers.json"  # fmt: skip


def written(directory: Path, **contents: Any) -> dict[str, Path]:
    """Files with these contents, by name."""
    names = {"pooling": POOLING, "modules": MODULES, "prompts": PROMPTS}
    found = {}
    for key, content in contents.items():
        path = directory / names[key].replace("/", "-")
        path.write_text(json.dumps(content))
        found[names[key]] = path
    return found


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_written_files_are_read_again(pooling: str, tmp_path: Path) -> None:
    form = EmbeddingForm(pooling, {"query": "ask: ", "document": ""}, "document")
    files = {}
    for name, content in form_files(form, 32, 128).items():
        files[name] = tmp_path / name.replace("/", "-")
        files[name].write_bytes(content)
    assert read_form(files) == form
    assert read_length(files) == 128


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"embedding_dimension": 32, "pooling_mode": "lasttoken", "include_prompt": False}, "last"),
        ({"embedding_dimension": 32, "pooling_mode": "mean"}, "mean"),
    ],
)
def test_files_of_all_versions_are_read(
    pooling: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """The last two are of sentence-transformers 6."""
    modules = [
        {"type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"type": "sentence_transformers.models.Pooling"},
        {"type": "sentence_transformers.models.Normalize"},
    ]
    assert read_form(written(tmp_path, pooling=pooling, modules=modules)).pooling == expected


def test_a_model_without_the_files_is_pooled_at_its_last_token() -> None:
    assert read_form({}) == EmbeddingForm("last", {})


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"pooling": {"pooling_mode_cls_token": True}}, "supported is the pooling of the last"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "supported is the pooling of the last"),
        (
            {"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}},
            "supported is the pooling of the last",
        ),
        ({"pooling": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt is false"),
        ({"modules": [{"type": "a.Dense"}]}, "the model has a module Dense, which isn't computed"),
    ],
)
def test_other_vectors_are_refused(contents: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(NotExpressible, match=message):
        read_form(written(tmp_path, **contents))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"modules": {"a": 1}}, "should list modules"),
        ({"pooling": [1]}, "is not a JSON object"),
        ({"prompts": {"prompts": {"query": 3}}}, "prompts should be texts by name"),
        ({"prompts": {"default_prompt_name": "query"}}, "default_prompt_name should be the name of a prompt"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(contents: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        read_form(written(tmp_path, **contents))


def test_a_longest_text_without_tokens_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sentence_bert_config.json"
    path.write_text('{"max_seq_length": 0}')
    with pytest.raises(CorruptCheckpoint, match="max_seq_length should be a number of tokens"):
        read_length({path.name: path})


def test_a_text_without_a_token_is_refused() -> None:
    class Empty(NullTokenizer):
        def tokenize(self, text: str) -> list[int]:
            return []

    with pytest.raises(UsageError, match="a text without a token has no embedding"):
        text_tokens(Empty(9), "")
