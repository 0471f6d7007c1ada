"""Molmo 2 as a whole: transformers computes the same logits from what we write, for text and for images."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.families import family
from megaconv.model.fields import fields_of
from tests.families.test_language_models_inside import assert_same_weights
from tests.families.test_whole_models import state

transformers = pytest.importorskip("transformers")

TOKENS, ADDED = 97, 7
PATCHES, IMAGE = 4, 99
"""Patches of an image, and the token that stands for two of them. It is one of the added tokens."""
TEXT: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": TOKENS,
    "additional_vocab_size": ADDED, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 16}
VISION = {**HEADS, "intermediate_size": 24, "num_hidden_layers": 2, "image_size": [28, 28]}
ADAPTER = {
    **HEADS,
    "intermediate_size": 24,
    "text_hidden_size": 32,
    "vision_feature_layer": [1, 0],
}
AS_PUBLISHED = {
    "additional_vocab_size": 128, "attention_dropout": 0.0, "embedding_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288, "layer_norm_eps": 1e-06,
    "max_position_embeddings": 36864, "model_type": "molmo2_text", "norm_after": False, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "qk_norm_type": "qwen3", "qkv_bias": False, "residual_dropout": 0.0,
    "rope_scaling": None, "rope_scaling_layers": None, "rope_theta": 1000000.0, "use_cache": True, "use_qk_norm": True,
    "vocab_size": 151936,
}  # fmt: skip
"""The keys of the remote code's configuration."""

FORMS = (
    "published",
    *(pytest.param(form, marks=pytest.mark.slow) for form in ("halved", "class")),
)


def create(directory: Path, form: str) -> None:
    """Save a small one. form: the names and shapes of its tensors."""
    torch.manual_seed(20)
    parts = {"text_config": TEXT, "vision_config": VISION, "adapter_config": ADAPTER}
    config = transformers.Molmo2Config(**parts, image_patch_id=IMAGE)
    model = transformers.Molmo2ForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(directory, save_original_format=form != "class")
    if form == "published":
        file = directory / "model.safetensors"
        save_file(with_whole_tables(load_file(file)), file)


def with_whole_tables(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a published file: transformers 5.23 writes the embedding in two halves instead."""
    names = [f"model.transformer.wte.{name}" for name in ("embedding", "new_embedding")]
    joined = torch.cat([tensors[name] for name in names])
    assert len(joined) == TOKENS + ADDED
    parts = (joined[:TOKENS].clone(), joined[TOKENS:].clone())
    return {**tensors, **dict(zip(names, parts, strict=True))}


def logits(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a text, and of a text with an image."""
    kind = transformers.Molmo2ForConditionalGeneration
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    seeded = torch.Generator().manual_seed(4)
    text = torch.randint(0, TOKENS, (1, 12), generator=seeded)
    seen = text.clone()
    seen[0, 2:4] = IMAGE
    image = {
        "pixel_values": torch.randn(1, PATCHES, 3 * 14 * 14, generator=seeded),
        "image_token_pooling": torch.tensor([[0, 1], [2, 3]]),
        "image_grids": torch.tensor([[1, 2, 0, 0]]),
        "mm_token_type_ids": (seen == IMAGE).int(),
    }
    with torch.no_grad():
        return model(input_ids=text).logits, model(input_ids=seen, **image).logits


def assert_same_logits(directory: Path, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert all(map(torch.equal, logits(directory), expected))


@pytest.mark.oracle
@pytest.mark.parametrize("form", FORMS)
def test_transformers_computes_the_same_logits_after_every_way(form: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    create(source, form)
    expected = logits(source)
    assert (expected[0] - expected[1]).abs().max() > 0.1
    megaconv.convert(source, tmp_path / "hf", saver="hf", verify=True, workers=1)
    ways: dict[str, dict[str, Any]] = {
        "core": {"saver": "core", "tp": 2, "pp": 2},
        "torch_dist": {"saver": "core", "tp": 2, "ckpt_format": "torch_dist"},
        "dcp": {"saver": "dcp"},
        "text": {"saver": "core", "text_only": True, "tp": 2},
    }
    for name, options in ways.items():
        base = {"base": source} if name == "text" else {}
        megaconv.convert(source, tmp_path / name, workers=1, **options)
        megaconv.convert(
            tmp_path / name, tmp_path / f"{name} hf", saver="hf", verify=True, workers=1, **base
        )
    for name in ("hf", *(f"{name} hf" for name in ways)):
        assert_same_weights(tmp_path / name, source)
        assert_same_logits(tmp_path / name, expected)


@pytest.mark.oracle
def test_the_language_model_alone_loads_as_transformers_text_model(tmp_path: Path) -> None:
    create(tmp_path / "source", "published")
    megaconv.convert(tmp_path / "source", tmp_path / "text", saver="hf", text_only=True, workers=1)
    alone = transformers.AutoModel.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    assert type(alone) is transformers.Molmo2TextModel
    head = load_file(tmp_path / "text/model.safetensors")["lm_head.weight"]
    tokens = torch.randint(0, TOKENS + ADDED, (2, 12), generator=torch.Generator().manual_seed(5))
    whole = transformers.Molmo2ForConditionalGeneration.from_pretrained(
        tmp_path / "source", dtype=torch.float32
    )
    with torch.no_grad():
        found = alone(input_ids=tokens).last_hidden_state @ head.T
        torch.testing.assert_close(found, whole.eval()(input_ids=tokens).logits)


def test_the_keys_of_the_remote_code_describe_the_same_model() -> None:
    table = family("molmo2_text")
    published = table.read_hf(AS_PUBLISHED)
    assert (published.vocab, published.predicted) == (151936 + 128, 151936)
    ours = transformers.Molmo2TextConfig(
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    theirs = json.loads(ours.to_json_string(use_diff=False))
    assert fields_of(table.read_hf({**theirs, "dtype": None})) == fields_of(published)


def test_megatrons_head_is_padded_to_the_rows_of_its_embedding(tmp_path: Path) -> None:
    create(tmp_path / "source", "published")
    options: dict[str, Any] = {
        "saver": "core",
        "text_only": True,
        "make_vocab_size_divisible_by": 8,
    }
    report = megaconv.convert(tmp_path / "source", tmp_path / "core", workers=1, **options)
    assert any("rows for the model's 7 tokens of images" in notice for notice in report.notices)
    model = state(tmp_path / "core", "mp_rank_00")["model"]
    embedding, head = (
        model[name] for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    )
    assert embedding.shape == head.shape == (TOKENS + ADDED, 32)
    assert torch.equal(head[TOKENS:], head[TOKENS - 1 : TOKENS].expand(ADDED, 32))
