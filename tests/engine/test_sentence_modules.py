"""Models of sentence-transformers: the modules behind the transformer travel along, and weights of others are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

import megaconv
from tests.models import write_llama
from tests.runs import run

SENTENCES = ["a cab", "bad bead"]


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    """A Qwen 3 that embeds a text by its last token, as Qwen3-Embedding, under the names of a bare model."""
    sentences = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    torch.manual_seed(1)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=8, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    Qwen3Model(config).save_pretrained(tmp_path / "bare")
    words = Tokenizer(models.WordLevel({name: at for at, name in enumerate("abcde ?_")}, "?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, pad_token="_").save_pretrained(tmp_path / "bare")
    transformer = modules.Transformer(str(tmp_path / "bare"), max_seq_length=16)
    chain = [transformer, modules.Pooling(32, "lasttoken"), modules.Normalize()]
    sentences.SentenceTransformer(modules=chain, device="cpu").save(str(tmp_path / "embedder"))
    return tmp_path / "embedder"


def embeddings(model: Path) -> torch.Tensor:
    sentences = pytest.importorskip("sentence_transformers")
    made: torch.Tensor = sentences.SentenceTransformer(str(model), device="cpu").encode(
        SENTENCES, convert_to_tensor=True
    )
    return made


def test_an_embedder_gives_the_same_embeddings_as_before(embedder: Path, tmp_path: Path) -> None:
    megaconv.convert(embedder, tmp_path / "copy", saver="hf")
    assert torch.equal(embeddings(tmp_path / "copy"), embeddings(embedder))


def test_an_embedder_comes_back_from_megatron_with_its_modules(
    embedder: Path, tmp_path: Path
) -> None:
    config = embedder / "config.json"
    named = json.loads(config.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    config.write_text(json.dumps(named))  # as Qwen3-Embedding on the Hub
    megaconv.convert(embedder, tmp_path / "core", saver="core", tp=2)
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert torch.equal(embeddings(tmp_path / "back"), embeddings(embedder))


def test_modules_with_weights_of_their_own_are_named(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", layers=1)
    (source / "value_head.safetensors").write_bytes(b"")
    (source / "2_Dense").mkdir()
    (source / "2_Dense/config.json").write_text("{}")
    (source / "2_Dense/model.safetensors").write_bytes(b"")
    kinds = {
        "1_Pooling": "models.Pooling",
        "2_Dense": "models.Dense",
        "3_Normalize": "models.Normalize",
    }
    listed = [{"path": path, "type": kind} for path, kind in kinds.items()]
    (source / "modules.json").write_text(json.dumps(listed))
    outcome = run("convert", source, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0, outcome
    assert (
        "modules beside the model are not converted: value_head.safetensors, 2_Dense/model.safetensors, 1_Pooling/; copy them"
        in outcome.err
    )
    assert (tmp_path / "out/2_Dense/config.json").is_file()


@pytest.mark.parametrize("name", ["1_Pooling", "additional_chat_templates"])
def test_a_directory_that_is_a_link_is_never_copied(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The files behind a link may be private."""
    source, private = write_llama(tmp_path / "source", layers=1), tmp_path / "private"
    (source / "modules.json").write_text("[]")
    private.mkdir()
    for file in ("config.json", "a.jinja"):
        (private / file).write_text("{}")
    (source / name).symlink_to(private)
    outcome = run("convert", source, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0, outcome
    assert f"{source / name}: is a link to a directory" in caplog.text
    assert not (tmp_path / "out" / name).exists()


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", 7, ["1_Pooling"]])
def test_a_module_with_an_impossible_path_is_named_and_never_opened(
    path: Any, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "source", layers=1)
    (source / "modules.json").write_text(json.dumps([{"path": path, "type": "models.Pooling"}]))
    outcome = run("convert", source, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0, outcome
    assert "modules beside the model are not converted" in outcome.err
