"""RecurrentGemma: published sizes, transformers' own save, DCP, and refusals."""

from pathlib import Path
from typing import Any

import pytest

from megaconv.errors import CheckpointError
from megaconv.families import family
from tests.families.test_published_models import PUBLISHED
from tests.transformers_oracle import CONVERTED, assert_comes_back, create
from tests.whole_models import elements_by_table, elements_of_class

SMALL: dict[str, Any] = PUBLISHED["google/recurrentgemma-2b-it"]["config"]
LARGE: dict[str, Any] = PUBLISHED["google/recurrentgemma-9b"]["config"]


@pytest.mark.oracle
@pytest.mark.parametrize(("raw", "billions"), [(SMALL, 2.7), (LARGE, 8.6)])
def test_published_models_have_as_many_elements_as_transformers_class(
    raw: dict[str, Any], billions: float
) -> None:
    transformers = pytest.importorskip("transformers")
    counted = elements_by_table("recurrent_gemma", raw)
    config = transformers.AutoConfig.for_model(**raw)
    assert counted == elements_of_class("RecurrentGemmaForCausalLM", config)
    assert counted / 1e9 == pytest.approx(billions, abs=0.05)


def test_layers_repeat_the_words_of_either_key() -> None:
    small = family("recurrent_gemma").read_hf(SMALL)
    mixers = [kind.mixer for kind in small.layers]
    assert mixers == (["recurrent", "recurrent", "attention"] * 9)[:26]
    assert {kind.window for kind in small.layers} == {None, 2048}
    assert (small.recurrent.head_dim, small.mlp.ffn) == (256, 7680)


@pytest.mark.oracle
def test_what_transformers_saves_after_dcp_is_the_same_model(tmp_path: Path) -> None:
    create(CONVERTED["recurrent_gemma"], tmp_path / "hf")
    assert_comes_back(tmp_path / "hf", "dcp", tmp_path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"block_types": ["attention"]}, "_block_types is .*, but transformers' class computes with block_types"),
        ({"block_types": ["mamba"]}, "block_types should list recurrent and attention, found"),
        ({"_block_types": 3}, "_block_types should list recurrent and attention, found 3"),
        ({"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim False is not supported"),
        ({"head_dim": 128}, "head_dim is 128, but transformers' class divides hidden_size 2560 by 10"),
        ({"intermediate_size": 15361}, "intermediate_size 15361 should be even"),
        ({"lru_width": 2561}, "lru_width 2561 is no multiple of 10"),
        ({"num_key_value_heads": 3}, "num_attention_heads 10 is no multiple of 3"),
        ({"conv1d_width": 0}, "conv1d_width should be a positive number, found 0"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
    ],
)  # fmt: skip
def test_a_config_that_no_recurrent_gemma_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("recurrent_gemma").read_hf(SMALL | keys)
