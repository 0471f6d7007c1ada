"""Apertus: the four numbers of each layer's activation, and Apertus 1.5, whose head lacks rows for tokens of images and sound."""

from pathlib import Path

import pytest
import torch

import megaconv
from megaconv.errors import CheckpointError, CorruptCheckpoint
from megaconv.families import family
from megaconv.model.meaning import lost_fields
from tests.config_models import raw_config
from tests.transformers_oracle import CONVERTED, compute, create, load
from tests.whole_models import assert_same_files, raw_config_of, weights, write_model_files

pytestmark = pytest.mark.oracle
BETA = "model.layers.1.mlp.act_fn.beta"
PREDICTED = 120
"""Tokens that the head of the Apertus 1.5 has rows for. The model has 131 tokens."""
TOKENS = torch.randint(7, 100, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Apertus whose activations have numbers of their own in each layer."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("apertus")
    create(CONVERTED["apertus"], root / "usual")
    tensors = weights(root / "usual")
    for layer in range(4):
        tensors[f"model.layers.{layer}.mlp.act_fn.beta"] = torch.tensor(0.3 + layer / 10)
        tensors[f"model.layers.{layer}.mlp.act_fn.eps"] = torch.tensor(-0.1 * layer - 0.05)
    return write_model_files(root / "hf", tensors, raw_config_of(root / "usual"))


def test_every_number_of_an_activation_is_kept(source: Path, tmp_path: Path) -> None:
    megaconv.convert(source, tmp_path / "dcp", saver="dcp", workers=1)
    megaconv.convert(tmp_path / "dcp", tmp_path / "hf", saver="hf", verify=True, workers=1)
    assert_same_files(tmp_path / "hf", source)
    assert weights(tmp_path / "hf")[BETA].shape == ()
    assert torch.equal(compute(load(tmp_path / "hf"), TOKENS), compute(load(source), TOKENS))


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (None, "missing"),
        (torch.ones(1), r"is \[1\], expected \[\]"),
        (torch.ones(2), r"is \[2\], expected \[\]"),
    ],
)
def test_a_number_that_is_missing_or_has_another_shape_is_refused_by_name(
    stored: torch.Tensor | None, words: str, source: Path, tmp_path: Path
) -> None:
    tensors = weights(source)
    del tensors[BETA]
    damaged = tensors if stored is None else tensors | {BETA: stored}
    hf = write_model_files(tmp_path / "hf", damaged, raw_config_of(source))
    with pytest.raises(CheckpointError, match=f"act_fn.beta.*{words}|{words}.*act_fn.beta"):
        megaconv.convert(hf, tmp_path / "out", saver="hf", workers=1)


def test_keys_of_published_files_are_read_and_other_values_of_them_refused() -> None:
    table, raw = family("apertus"), raw_config("apertus")
    published = {"mlp_bias": False, "post_norm": False, "qk_norm": True}
    assert not lost_fields(table.read_hf(raw), table.read_hf(raw | published))
    for key, value in published.items():
        with pytest.raises(CheckpointError, match=f"{key} {not value}"):
            table.read_hf(raw | {key: not value})


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Apertus 1.5 with its tokenizers of images and sound."""
    text = raw_config_of(source) | {"model_type": "apertus1p5_text", "output_vocab_size": PREDICTED}
    raw = {"architectures": ["Apertus1p5ForConditionalGeneration"], "model_type": "apertus1p5",
           "text_config": text, "vision_config": {}, "audio_config": {}, "tie_word_embeddings": False}  # fmt: skip
    tensors = {}
    for name, tensor in weights(source).items():
        tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:PREDICTED].clone()
    for tokenizer in ("vision", "audio"):
        tensors[f"model.{tokenizer}_tokenizer.quantize.weight"] = torch.randn(3, 5)
    return write_model_files(tmp_path_factory.mktemp("whole") / "hf", tensors, raw)


def test_the_language_model_of_apertus_1_5_computes_the_first_logits_and_goes_back(
    source: Path, whole: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    report = megaconv.convert(whole, text, saver="hf", text_only=True, workers=1)
    assert report.header.config.family == "apertus1p5_text"
    found, expected = load(source), load(source)
    alone = weights(text)
    assert alone["lm_head.weight"].shape[0] == PREDICTED
    found.lm_head = torch.nn.Linear(64, PREDICTED, bias=False)
    found.load_state_dict(alone)
    assert torch.equal(compute(found, TOKENS), compute(expected, TOKENS)[..., :PREDICTED])
    megaconv.convert(text, tmp_path / "back", saver="hf", base=whole, workers=1)
    megaconv.convert(whole, tmp_path / "copy", saver="hf", verify=True, workers=1)
    for output in ("back", "copy"):
        assert_same_files(tmp_path / output, whole)


def test_a_head_with_more_rows_than_tokens_is_refused() -> None:
    table, raw = family("apertus1p5_text"), raw_config("apertus1p5_text")
    with pytest.raises(CorruptCheckpoint, match="output_vocab_size 132 is more than vocab_size"):
        table.read_hf(raw | {"output_vocab_size": 132})
    assert not table.read_hf(raw | {"output_vocab_size": None}).head.unpredicted
