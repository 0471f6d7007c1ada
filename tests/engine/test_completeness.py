"""Megatron to transformers without the original: what will be missing is said first, and what the arguments tell is taken."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.commands.demo import _make_tokenizer
from megaconv.engine.conversion import convert
from megaconv.options import ConvertOptions
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run

CORE = FIXTURES / "core-llama-tp1pp1" / "checkpoint"
"""A checkpoint as Megatron's own --save leaves it, without hf/ beside it."""


def with_arguments(path: Path, **values: Any) -> Path:
    """The model of CORE with args that say more."""
    megaconv.convert(CORE, path, saver="core")
    shutil.rmtree(path / "hf")
    (file,) = path.rglob("model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    vars(state["args"]).update(values)
    torch.save(state, file)
    return path


def write_sentence_pieces(path: Path, *pieces: str) -> None:
    """A SentencePiece model with these pieces and no more: field 1, and in it field 1 the text."""
    content = b""
    for piece in pieces:
        text = piece.encode()
        content += bytes([0x0A, len(text) + 2, 0x0A, len(text)]) + text
    path.write_bytes(content)


def to_hf(source: Path, *options: object) -> tuple[dict[str, Any], Path]:
    """(the JSON report, the output)."""
    out = source.parent / "out"
    outcome = run(
        "convert", "--load-dir", source, "--saver", "hf", "--save-dir", out, "--json", *options
    )
    assert outcome.status == 0, outcome
    found: dict[str, Any] = json.loads(outcome.out)
    return found, out


def test_missing_parts_of_an_output_are_reported_before_the_copy(tmp_path: Path) -> None:
    dry = run(
        "convert", "--load-dir", CORE, "--saver", "hf", "--save-dir", tmp_path / "new", "--dry-run"
    )
    assert "no tokenizer, no generation_config.json, no eos_token_id" in dry.err
    assert "--config ORIGINAL" in dry.err
    said: list[tuple[str, ...]] = []

    def stop(report: Any) -> None:
        said.append(report.missing)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(CORE, tmp_path / "new", "hf", ConvertOptions(), planned=stop)
    assert said == [("tokenizer", "generation_config.json", "eos_token_id")]
    assert not (tmp_path / "new").exists()


def test_the_original_completes_it(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf")
    (hf / "tokenizer.json").write_text("{}")
    megaconv.convert(hf, tmp_path / "core", saver="core", tp=2)
    assert to_hf(tmp_path / "core")[0]["missing"] == []
    shutil.rmtree(tmp_path / "core" / "hf")
    shutil.rmtree(tmp_path / "out")
    assert to_hf(tmp_path / "core", "--config", hf)[0]["missing"] == []


def test_a_directory_of_a_tokenizer_that_the_arguments_name_goes_along(tmp_path: Path) -> None:
    named = tmp_path / "named"
    named.mkdir()
    _make_tokenizer(named)
    (named / "id_rsa").write_text("secret")
    report, out = to_hf(with_arguments(tmp_path / "core", tokenizer_model=str(named)))
    assert report["missing"] == ["generation_config.json"]
    assert any(str(named) in notice and "tokenizer.json" in notice for notice in report["notices"])
    assert (out / "tokenizer.json").read_bytes() == (named / "tokenizer.json").read_bytes()
    assert not (out / "id_rsa").exists()
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


def test_a_sentencepiece_model_that_the_arguments_name_goes_along_with_its_ids(
    tmp_path: Path,
) -> None:
    write_sentence_pieces(tmp_path / "llama.model", "<unk>", "<s>", "</s>", "a")
    report, out = to_hf(
        with_arguments(tmp_path / "core", tokenizer_model=str(tmp_path / "llama.model"))
    )
    assert report["missing"] == ["generation_config.json"]
    assert (out / "tokenizer.model").read_bytes() == (tmp_path / "llama.model").read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(
    "kind", ["a name on the Hub", "a secret", "a link", "a pipe", "no name at all"]
)
def test_a_path_that_is_no_tokenizer_is_named_and_not_taken(tmp_path: Path, kind: str) -> None:
    named = tmp_path / "named" / "tokenizer.model"
    named.parent.mkdir()
    if kind == "a secret":
        named.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        write_sentence_pieces(tmp_path / "elsewhere" / "private.model", "<unk>", "<s>", "</s>")
        named.symlink_to(tmp_path / "elsewhere" / "private.model")
    elif kind == "a pipe":
        os.mkfifo(named)
    word = {"a name on the Hub": "org/name", "no name at all": "x" * 5000}.get(kind, str(named))
    report, out = to_hf(with_arguments(tmp_path / "core", tokenizer_model=word))
    assert report["missing"] == ["tokenizer", "generation_config.json", "eos_token_id"]
    assert any(
        f"names the tokenizer {word}" in n or f"name the tokenizer {word}" in n
        for n in report["notices"]
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "megaconv.json",
        "model.safetensors",
    ]


def test_tokens_without_a_row_are_named(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", layers=1)  # 131 rows
    tokens = [{"id": 130, "content": "<last>"}, {"id": 131, "content": "<new>"}]
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": tokens}))
    (source / "added_tokens.json").write_text(json.dumps({"<newer>": 140}))
    outcome = run("convert", source, tmp_path / "out", "--saver", "core")
    assert (
        "has 2 tokens without a row in the embedding, which has 131 rows: '<new>' is token 131"
        in outcome.err
    )


@pytest.mark.parametrize(
    "content",
    [
        '{"added_tokens": [{"id": 5, "content": "<s>"}]}',
        '{"added_tokens":',
        "[]",
        '{"added_tokens": [{"id": Infinity, "content": ""}]}',
    ],
)
def test_a_tokenizer_that_fits_or_is_unreadable_gives_no_notice(
    content: str, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "source", layers=1)
    (source / "tokenizer.json").write_text(content)
    assert run("convert", source, tmp_path / "out", "--saver", "core").err == ""


def test_a_model_whose_tensors_keep_their_names_gives_no_notice_of_tokens(tmp_path: Path) -> None:
    """No family describes it, so its vocabulary is unknown."""
    source = write_llama(tmp_path / "source", layers=1)
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "unheard", "architectures": ["UnheardForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text('{"added_tokens": [{"id": 5, "content": "<s>"}]}')
    outcome = run("convert", source, tmp_path / "out", "--saver", "hf")
    assert "keep their names and shapes" in outcome.err
    assert "without a row" not in outcome.err
