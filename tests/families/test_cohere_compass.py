"""Cohere Compass: the language model of North Micro Vision alone and inside, and ropes that no such model has."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import CheckpointError, NotExpressible
from megaconv.families import family
from megaconv.model.fields import changed
from megaconv.model.meaning import lost_fields
from tests.config_models import raw_config
from tests.whole_models import assert_same_files, load_class, logits_of_text

NAME = "cohere_compass_text"
TEXT: dict[str, Any] = {
    "model_type": NAME, "vocab_size": 131, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "layer_norm_eps": 1e-3, "logit_scale": 0.5, "sliding_window": 7, "bos_token_id": 1, "eos_token_id": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": None,
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0, "mrope_section": [2, 1, 1]},
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
}  # fmt: skip
"""As in published files, whose rope_parameters have the last two keys in addition."""
VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "depth": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip


@pytest.mark.oracle
def test_transformers_computes_the_same_with_the_whole_model_and_its_language_model(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(20)
    config = transformers.CohereCompassConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=127, video_token_id=128, vision_start_token_id=129,
        vision_end_token_id=130,
    )  # fmt: skip
    model = transformers.CohereCompassForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    source, whole, text, back = (tmp_path / name for name in ("hf", "whole", "text", "back"))
    model.save_pretrained(source)
    megaconv.convert(source, whole, saver="hf", verify=True, workers=1)
    megaconv.convert(source, text, saver="hf", verify=True, workers=1, text_only=True)
    megaconv.convert(text, back, saver="hf", workers=1, base=source)
    for output in (whole, back):
        assert_same_files(output, source)
    expected = logits_of_text(load_class(source, "CohereCompassForConditionalGeneration"))
    alone = load_class(text, "CohereCompassForCausalLM")
    assert torch.equal(logits_of_text(alone), expected)


def test_two_keys_beside_the_ropes_change_nothing_as_in_transformers() -> None:
    table = family(NAME)
    ropes = {key: TEXT["rope_parameters"][key] for key in ("full_attention", "sliding_attention")}
    assert not lost_fields(table.read_hf(TEXT), table.read_hf(TEXT | {"rope_parameters": ropes}))


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"rope_parameters": None}, "rope_parameters should have full_attention, which may be null, found None"),
    ({"rope_parameters": {"full_attention": None}}, "should have sliding_attention, which may be null"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4},
                          "sliding_attention": {"rope_theta": 2e4, "rope_type": "linear", "factor": 2.0}}},
     "rope scaling of layers with a window alone is not supported"),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"logit_scale": 0}, "logit_scale should be a number but 0"),
)  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_settings_that_no_such_model_has_are_refused_by_name(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family(NAME).read_hf(raw_config(NAME, **keys))


def test_layers_of_one_kind_that_rotate_in_part_are_refused() -> None:
    table = family(NAME)
    config = changed(table.read_hf(raw_config(NAME)), {"layers.rotates": (True, True, False, True)})
    with pytest.raises(NotExpressible, match=r"layers\.rotates differs among the layers of"):
        table.write_hf(config)
