"""The tokenizer of a GGUF file, restored: files that llama.cpp's converter made, and megaconv's own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import megaconv
from formats import gguf_header
from formats.errors import CorruptCheckpoint
from megaconv.gguf.stored_tokenizer import LONG, tokenizer_files, unread_tokenizer
from megaconv.gguf.tokenizer import PATTERNS, PREFIX
from tests.conftest import FIXTURES
from tests.gguf.test_gguf_llama_cpp import TEXTS, byte_level
from tests.models import write_llama
from tests.runs import run

pytestmark = pytest.mark.oracle
CASES = [
    case
    for case in sorted(FIXTURES.glob("gguf-*/*.gguf"))
    if (case.parent / "hf").is_dir() and "q8_0" not in case.name
]
HARD = (
    *TEXTS,
    "  two spaces",
    "tabs\t\tand\n\nlines \n",
    "<s> a </s>",
    "a<|im_start|>user\nhi<|im_end|><|endoftext|>b",
)


def tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def described(case: Path, path: Path) -> tuple[str | Path, ...]:
    """The option for a file that doesn't say how it scales positions. The directory has no tokenizer."""
    config = case.parent / "hf/config.json"
    if "llama3" not in case.name:
        return ()
    (path / "config").mkdir()
    shutil.copy(config, path / "config")
    return "--config", path / "config"


def restored(case: Path, path: Path) -> Path:
    """The Hugging Face directory of a GGUF file alone."""
    path.mkdir()
    alone = Path(shutil.copy(case, path / "model.gguf"))
    outcome = run("convert", alone, path / "hf", "--saver", "hf", *described(case, path))
    assert outcome.status == 0, outcome.err
    return path / "hf"


BYTE_LEVEL = [case for case in CASES if "bpe" in case.name]
PIECES = [case for case in CASES if "spm" in case.name]


@pytest.mark.parametrize("case", BYTE_LEVEL, ids=lambda case: case.parent.name)
def test_tokens_are_those_of_the_original_model(case: Path, tmp_path: Path) -> None:
    found, expected = tokenizer(restored(case, tmp_path / "in")), tokenizer(case.parent / "hf")
    for text in HARD:
        ours = found.encode(text, add_special_tokens=False)
        assert ours == expected.encode(text, add_special_tokens=False), text
        assert found.decode(ours) == expected.decode(ours)
    assert (found.eos_token_id, found.eos_token) == (expected.eos_token_id, expected.eos_token)


@pytest.mark.parametrize("case", PIECES, ids=lambda case: case.parent.name)
def test_pieces_are_those_of_the_original_model(case: Path, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor as Processor

    place = restored(case, tmp_path / "in")
    found = Processor(model_file=str(place / "tokenizer.model"))
    expected = Processor(model_file=str(case.parent / "hf/tokenizer.model"))
    # This file says that no space is put before a text. The original puts one.
    has_no_space = gguf_header.read(case).keys.get(PREFIX + "add_space_prefix") is False
    for text in HARD:
        if has_no_space:
            assert found.decode(found.encode(text)) == text
        else:
            assert found.encode(text) == expected.encode(text), text
    loaded = tokenizer(place)
    for text in ("Hello world", "x = y\n"):
        ids = loaded.encode(text, add_special_tokens=False)
        assert loaded.decode(ids).lstrip() == text
    assert loaded("a").input_ids[0] == loaded.bos_token_id == found.bos_id()
    assert loaded.eos_token_id == found.eos_id()


def test_llama_3_begins_a_text_as_in_llama_cpp_and_keeps_its_template(tmp_path: Path) -> None:
    case = next(case for case in CASES if "llama3" in case.name)
    found, original = tokenizer(restored(case, tmp_path / "in")), tokenizer(case.parent / "hf")
    assert found("a").input_ids == [found.bos_token_id, *original("a").input_ids]
    assert found("a", "b").input_ids.count(found.bos_token_id) == 2
    assert found.chat_template == original.chat_template


@pytest.mark.parametrize("name", ["qwen2", "gpt-2", "starcoder", "gpt-4o", "deepseek-v3"])
def test_every_known_way_to_split_text_comes_back(name: str, tmp_path: Path) -> None:
    from tokenizers.normalizers import NFC

    patterns = next(patterns for patterns, known in PATTERNS.items() if known == name)
    source = write_llama(tmp_path / "hf", vocab=512)
    made = byte_level(patterns, 400, ["<|end|>"])
    made.normalizer = NFC() if name == "qwen2" else None
    made.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}'
    )
    megaconv.convert(source, tmp_path / "gguf", saver="gguf")
    found = tokenizer(restored(next((tmp_path / "gguf").glob("*.gguf")), tmp_path / "in"))
    for text in (*HARD, "x<|end|>y"):
        assert found.encode(text) == made.encode(text).ids, text
    assert found.eos_token == "<|end|>"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.parent.name)
def test_a_gguf_of_a_gguf_has_the_same_tokenizer(case: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(case, tmp_path / "model.gguf"))
    outcome = run(
        *("convert", alone, tmp_path / "out", "--saver", "gguf", "--option", "gguf_type=q8_0"),
        *described(case, tmp_path),
    )
    assert outcome.status == 0, outcome.err
    before = gguf_header.read(case, LONG).keys
    after = gguf_header.read(next((tmp_path / "out").glob("*.gguf")), LONG).keys
    names = {name for name in (*before, *after) if name.startswith("tokenizer.")}
    other = {name for name in names if before.get(name) != after.get(name)}
    # No file of Hugging Face's tokenizers has the end of a turn, and Llama 3's default is written out.
    assert other <= {
        PREFIX + "eot_token_id",
        PREFIX + "add_bos_token",
        PREFIX + "add_eos_token",
        PREFIX + "unknown_token_id",
    }


def keys_of(name: str, **changes: Any) -> dict[str, Any]:
    case = next(case for case in CASES if name in case.name)
    found = dict(gguf_header.read(case, LONG).keys)
    found |= {PREFIX + key: value for key, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": None}, "it has none"),
        ({"model": "none"}, "it has none"),
        ({"model": "bert"}, "of the kind 'bert'"),
        ({"pre": "mine"}, "'mine', is not known"),
    ],
)
def test_other_tokenizers_are_left_out_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    assert reason in unread_tokenizer(keys_of("gpt2", **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"tokens": None}),
        ("gpt2", {"tokens": [1, 2]}),
        ("gpt2", {"token_type": [1, 1]}),
        ("gpt2", {"merges": None}),
        ("gpt2", {"merges": ["a b c"]}),
        ("llama-spm", {"scores": [0.5] * 319 + [1]}),
        ("llama-spm", {"scores": [0.5]}),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"model\.gguf: tokenizer\.ggml"):
        tokenizer_files(keys_of(name, **changes), "model.gguf")


def test_numbers_of_special_tokens_that_do_not_exist_are_left_out() -> None:
    keys = keys_of("llama3", bos_token_id=9_999, eos_token_id="x", padding_token_id=-1)
    files = tokenizer_files(keys, "model.gguf")
    assert (
        not {"bos_token", "eos_token", "pad_token"}
        & json.loads(files["tokenizer_config.json"]).keys()
    )
    single = json.loads(files["tokenizer.json"])["post_processor"]["single"]
    assert single == [{"Sequence": {"id": "A", "type_id": 0}}]
