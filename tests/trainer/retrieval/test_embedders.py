"""Embedders of texts: an encoder of transformers, a Megatron BERT, sentence-transformers."""

from pathlib import Path

import numpy as np
import pytest

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.retrieval.embedders import EmbedderOptions, open_embedder

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d")
TEXTS = ("a b c", "d", "c b a d a b c d a b", "")
MOST = 8
MEGATRON_BERT = Path(__file__).parents[2] / "fixtures" / "core-bert-tp2pp2" / "checkpoint"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    import torch

    directory = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(directory)
    return directory


def test_vectors_are_means_without_special_tokens(encoder: Path, tmp_path: Path) -> None:
    """The states between [CLS] and [SEP] count, one row at a time, truncated. An empty text is one [PAD]."""
    import torch
    import transformers

    model = transformers.BertModel.from_pretrained(encoder).eval()
    embedder = open_embedder(f"hf:{encoder}", EmbedderOptions(3, MOST, tmp_path / "unused"))
    found = embedder.embed(TEXTS)
    assert (found.dtype, found.shape, embedder.width) == (np.float32, (4, 16), 16)
    for text, vector in zip(TEXTS, found, strict=True):
        tokens = [WORDS.index(word) for word in text.split()][: MOST - 2] or [0]
        with torch.no_grad():
            states = model(torch.tensor([[2, *tokens, 3]])).last_hidden_state[0, 1:-1]
        np.testing.assert_allclose(vector, states.mean(0).numpy(), atol=1e-6)
    assert [embedder.count(text) for text in TEXTS] == [3, 1, 10, 0]


def test_texts_are_cut_to_the_positions_of_a_roberta(encoder: Path, tmp_path: Path) -> None:
    """Its first token has the position 2, behind that of padding."""
    import shutil

    import transformers

    directory = Path(shutil.copytree(encoder, tmp_path / "roberta"))
    config = transformers.RobertaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=MOST + 2,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(directory)
    options = EmbedderOptions(3, 100, tmp_path / "unused")
    long, cut = open_embedder(f"hf:{directory}", options).embed(["d c b a d a b", "d c b a d a"])
    np.testing.assert_array_equal(long, cut)


def test_equal_weights_have_equal_fingerprints(encoder: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(encoder, tmp_path / "copy"))
    one, same = (
        open_embedder(str(place), EmbedderOptions(3, MOST, tmp_path)) for place in (encoder, copy)
    )
    assert one.fingerprint == same.fingerprint
    (copy / "model.safetensors").write_bytes(
        (encoder / "model.safetensors").read_bytes()[:-4] + b"\0\0\0\x3f"
    )
    assert (
        open_embedder(str(copy), EmbedderOptions(3, MOST, tmp_path)).fingerprint != one.fingerprint
    )


def test_a_bert_of_megatron_embeds_too(tmp_path: Path) -> None:
    """It is converted once, and needs a vocabulary. Its vectors are those of transformers' class."""
    import torch
    import transformers

    with pytest.raises(
        UsageError, match="has no tokenizer; give its vocabulary by --retro-bert-vocab-file"
    ):
        open_embedder(str(MEGATRON_BERT), EmbedderOptions(3, MOST, tmp_path / "hf"))
    (tmp_path / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    options = EmbedderOptions(3, MOST, tmp_path / "hf", tmp_path / "words.txt")
    (found,) = open_embedder(str(MEGATRON_BERT), options).embed(TEXTS[:1])
    model = transformers.MegatronBertModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        states = model(torch.tensor([[2, 5, 6, 7, 3]])).last_hidden_state[0, 1:-1]
    np.testing.assert_allclose(found, states.mean(0).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hash:0", "a width of 1 to 65536"),
        ("hash:x", "write hash:WIDTH"),
        ("nothing-here", "there is no directory nothing-here; give hash"),
        ("hf:nothing-here", "there is no directory nothing-here"),
    ],
)
def test_unknown_embedders_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        open_embedder(name, EmbedderOptions(3, MOST, tmp_path))


def test_a_directory_without_an_encoder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    with pytest.raises(CorruptCheckpoint, match="transformers can't"):
        open_embedder(f"hf:{tmp_path}", EmbedderOptions(3, MOST, tmp_path))
