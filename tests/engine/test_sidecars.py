"""The small files that travel along: tokenizers and processors of every kind, never weights, code never unsaid."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import megaconv
from formats.ceilings import SIDECAR_BYTES
from megaconv import hub
from megaconv.engine.sidecars import CHAT_TEMPLATES, find_sidecars, is_sidecar
from tests.models import write_llama
from tests.runs import assert_refused, run

TRAVELLING = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v3", "tokenizer.tiktoken", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "vocab.bpe", "encoder.json", "merges.txt",  # GPT-2, Qwen, BERT
    "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model", "source.spm", "target.spm",  # T5, XLM-R, Marian
    "qwen.tiktoken", "tiktoken.model", "tekken.json", "bpe.codes", "dict.txt", "normalizer.json",  # Qwen, Kimi, Mistral, PhoBERT, Whisper
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "image_processor_config.json",
    "feature_extractor_config.json", "generation_config.json", "chat_template.json", "chat_template.jinja",
    "LICENSE", "LICENSE.txt", "license.md", "LICENCE", "Llama-LICENSE.txt", "NOTICE", "Notice.txt", "USE_POLICY.md", "COPYING",
)  # fmt: skip
STAYING = (
    "model.safetensors", "pytorch_model.bin", "tokenizer.safetensors", "tokenizer.bin", "sentencepiece.pt", "vocab.npy",
    "model.safetensors.index.json", "consolidated.00.pth", "model.gguf", "tf_model.h5", "model.onnx",
    "modeling_custom.py", "tokenization_custom.py", "tokenizer_custom.py", "TOKENIZER.PY",
    "config.json", "params.json", "megaconv.json", "quantize_config.json", "hf_quant_config.json", "README.md", "training_args.bin",
)  # fmt: skip


@pytest.mark.parametrize("name", TRAVELLING)
def test_files_that_a_model_needs_are_copied_with_its_weights(name: str) -> None:
    assert is_sidecar(name)


@pytest.mark.parametrize("name", STAYING)
def test_weights_code_and_what_is_written_anew_stay(name: str) -> None:
    assert not is_sidecar(name)


@pytest.mark.parametrize("name", [name for name in TRAVELLING if name != "Llama-LICENSE.txt"])
def test_files_that_are_copied_are_downloaded(name: str) -> None:
    assert any(fnmatchcase(name, pattern) for pattern in hub._PATTERNS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = write_llama(tmp_path / "source", layers=1)
    for name in (*TRAVELLING, "modeling_custom.py", "tokenization_custom.py", "README.md"):
        (source / name).write_text(f"this is {name}")
    (source / CHAT_TEMPLATES).mkdir()
    (source / CHAT_TEMPLATES / "tool_use.jinja").write_text("{{ messages }}")
    return source


def test_everything_comes_back_from_megatron_and_from_metas_files(
    model: Path, tmp_path: Path
) -> None:
    expected = {*TRAVELLING, f"{CHAT_TEMPLATES}/tool_use.jinja"}
    assert set(find_sidecars(model)) == expected
    for saver in ("core", "llama_mistral", "dcp"):
        megaconv.convert(model, tmp_path / saver, saver=saver)
        config = model if saver == "dcp" else None
        megaconv.convert(tmp_path / saver, tmp_path / f"{saver}-hf", saver="hf", config=config)
        for name in expected:
            assert (tmp_path / f"{saver}-hf" / name).read_bytes() == (model / name).read_bytes()
        assert megaconv.verify(tmp_path / f"{saver}-hf").files >= len(expected)


def test_code_that_does_not_travel_is_named(model: Path, tmp_path: Path) -> None:
    outcome = run("convert", "--load-dir", model, "--saver", "core", "--save-dir", tmp_path / "out")
    assert outcome.status == 0
    assert outcome.err.startswith(
        "code is never copied: modeling_custom.py, tokenization_custom.py; if you need and trust it, copy it to the output yourself"
    )
    assert not list((tmp_path / "out").rglob("*.py"))
    assert (
        run(
            "convert",
            "--load-dir",
            tmp_path / "out",
            "--saver",
            "hf",
            "--save-dir",
            tmp_path / "back",
        ).err
        == ""
    )


def test_a_file_that_is_too_large_for_a_tokenizer_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, size in (("tokenizer.json", SIDECAR_BYTES), ("vocab.txt", SIDECAR_BYTES + 1)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    assert list(find_sidecars(tmp_path)) == ["tokenizer.json"]
    assert f"vocab.txt: has {SIDECAR_BYTES + 1:,} bytes" in caplog.text


def test_a_directory_or_a_pipe_of_such_a_name_does_not_travel(tmp_path: Path) -> None:
    import os

    (tmp_path / "tokenizer").mkdir()
    os.mkfifo(tmp_path / "tokenizer.json")
    assert find_sidecars(tmp_path) == {}


@pytest.mark.parametrize(
    "content",
    [
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "<!doctype html><title>Log in</title>",
    ],
)
def test_a_tokenizer_that_was_never_really_fetched_is_an_error_and_a_licence_may_be_a_page(
    content: str, model: Path, tmp_path: Path
) -> None:
    (model / "LICENSE").write_text(content)
    assert run("convert", model, tmp_path / "first", "--saver", "hf").status == 0
    (model / "tokenizer.json").write_text(content)
    assert_refused(
        run("convert", model, tmp_path / "second", "--saver", "core"),
        3,
        "tokenizer.json: is a",
        "not the file itself",
    )
    assert not (tmp_path / "second").exists()
