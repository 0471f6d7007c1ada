"""The rules of a tokenizer.model that reach a GGUF file: the space before a text, the kind of the model, special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaconv.gguf.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, Piece, model_of
from tests.families.test_families import write_model
from tests.gguf.test_gguf import written
from tests.models import write_llama
from tests.runs import assert_refused, run

PIECES = (Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL),
          Piece("<0x0A>", 0.0, BYTE), Piece("\u2581a", -1.0, NORMAL))  # fmt: skip
UNIGRAM = b"\x12\x02\x18\x01"
"""A trainer_spec (field 2) with the model_type 1 (field 3). The last one in a file counts."""
SPACE = "tokenizer.ggml.add_space_prefix"


def tokenizer(*, space_first: bool) -> bytes:
    ids = {"unknown": 0, "bos": 1, "eos": 2, "padding": None}
    return model_of(PIECES, ids, space_first=space_first, fewer_spaces=False)


def values_of(source: Path, tmp_path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    return written(source, tmp_path / "out").values


@pytest.mark.parametrize(
    ("in_model", "settings", "expected"),
    [
        (True, {}, None),
        (False, {}, False),
        (True, {"add_prefix_space": False}, False),
        (False, {"add_prefix_space": True}, None),
    ],
)
def test_the_space_before_a_text_is_that_of_the_tokenizer(
    in_model: bool, settings: dict[str, Any], expected: bool | None, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "in")
    (source / "tokenizer.model").write_bytes(tokenizer(space_first=in_model))
    assert values_of(source, tmp_path, settings).get(SPACE) is expected


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_no_gemma_puts_a_space_before_a_text(family: str, tmp_path: Path) -> None:
    """llama.cpp's converter writes the same for each of them."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8}
    write_model(tmp_path / "in", family, **sizes, query_pre_attn_scalar=8, sliding_window=7)
    (tmp_path / "in" / "tokenizer.model").write_bytes(tokenizer(space_first=True))
    assert values_of(tmp_path / "in", tmp_path, {})[SPACE] is False


def test_a_unigram_model_is_refused(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "in")
    (source / "tokenizer.model").write_bytes(tokenizer(space_first=True) + UNIGRAM)
    command = ("convert", source, tmp_path / "out", "--saver", "gguf")
    assert_refused(run(*command), 2, "tokenizer.model: is no BPE", "--option tokenizer=none")


def test_a_special_token_is_the_one_that_the_tokenizer_names(tmp_path: Path) -> None:
    """config.json has another end of a text than a tokenizer of chats. llama.cpp's converter takes the tokenizer's."""
    source = write_llama(tmp_path / "in")
    (source / "tokenizer.model").write_bytes(tokenizer(space_first=True))
    added = {"5": {"content": "<|im_end|>", "special": True}}
    settings = {"eos_token": "<|im_end|>", "added_tokens_decoder": added}
    values = values_of(source, tmp_path, settings)
    assert values["tokenizer.ggml.eos_token_id"] == 5
    assert values["tokenizer.ggml.bos_token_id"] == 1
