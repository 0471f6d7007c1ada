"""Gemma 4 12B, which takes images and sound without encoders: transformers computes the same from what is written."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from megaconv.families import family
from tests.config_models import raw_config
from tests.transformers_oracle import GEMMA_4, compute

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGE, SOUND = 120, 121
PATCH = 2 * 2
"""Pixels on a side of a patch after two by two were merged."""
TEXT: dict[str, Any] = {
    **GEMMA_4, "vocab_size": 131, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 96, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
}  # fmt: skip
VISION = {
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 40,
    "mm_posemb_size": 12,
    "output_proj_dims": 40,
}


def make(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(20)
    config = transformers.Gemma4UnifiedConfig(
        text_config=TEXT,
        vision_config=VISION,
        audio_config={"audio_embed_dim": 10},
        image_token_id=IMAGE,
        audio_token_id=SOUND,
    )
    model = transformers.Gemma4UnifiedForConditionalGeneration(config)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 2.0)
    model.save_pretrained(directory)


def load(directory: Path) -> "PreTrainedModel":
    from transformers import Gemma4UnifiedForConditionalGeneration

    model = Gemma4UnifiedForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def logits_with_an_image(model: "PreTrainedModel") -> torch.Tensor:
    """Logits of a row with three patches of an image and two tokens of sound."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(7, 100, (1, 24), generator=generator)
    tokens[0, 4:7], tokens[0, 10:12] = IMAGE, SOUND
    kinds = (tokens == IMAGE).long() + 3 * (tokens == SOUND).long()
    pixels = torch.rand(1, 3, 3 * PATCH * PATCH, generator=generator)
    places = torch.tensor([[[0, 0], [1, 0], [0, 1]]])
    sound = torch.rand(1, 2, 10, generator=generator)
    with torch.no_grad():
        found: torch.Tensor = model(
            input_ids=tokens,
            pixel_values=pixels,
            image_position_ids=places,
            input_features=sound,
            input_features_mask=torch.ones(1, 2, dtype=torch.bool),
            mm_token_type_ids=kinds,
        ).logits
    return found


@pytest.mark.oracle
def test_transformers_computes_the_same_logits_from_a_whole_gemma_4_12b(tmp_path: Path) -> None:
    make(tmp_path / "hf")
    expected = logits_with_an_image(load(tmp_path / "hf"))
    whole = tmp_path / "whole"
    assert megaconv.convert(tmp_path / "hf", whole, saver="hf", verify=True, workers=1).verified
    written, original = (
        load_file(directory / "model.safetensors") for directory in (whole, tmp_path / "hf")
    )
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert torch.equal(logits_with_an_image(load(whole)), expected)


@pytest.mark.oracle
def test_transformers_computes_the_same_logits_from_its_language_model_alone(
    tmp_path: Path,
) -> None:
    make(tmp_path / "hf")
    from transformers import AutoModelForCausalLM

    megaconv.convert(tmp_path / "hf", tmp_path / "text", saver="hf", text_only=True, workers=1)
    tokens = torch.randint(7, 100, (2, 24), generator=torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    assert type(model).__name__ == "Gemma4UnifiedForCausalLM"
    assert torch.equal(compute(model, tokens), compute(load(tmp_path / "hf"), tokens))


def test_missing_keys_have_the_values_of_the_class() -> None:
    raw = raw_config("gemma4_unified_text")
    for key in ("sliding_window", "max_position_embeddings"):
        raw.pop(key, None)
    config = family("gemma4_unified_text").read_hf(raw)
    assert config.window == 1024
    assert config.max_positions == 262144
