"""Models of families with experts whose config.json has `num_experts` 0: transformers makes all of their layers dense."""

from dataclasses import replace
from pathlib import Path

import pytest

import megaconv
from megaconv.errors import CorruptCheckpoint
from megaconv.families import families
from tests.config_models import raw_config
from tests.trainer.parallel.changed_configurations import TOKENS, logits_of_the_trainer
from tests.transformers_oracle import BEYOND_MEGATRON, MIXTURES, NAMED, compute, create, load

FAMILIES = ("flint", "qwen2_moe", "qwen3_moe", "qwen3_next")


@pytest.mark.oracle
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_without_experts_is_converted_and_computed_as_transformers_does(
    name: str, tmp_path: Path
) -> None:
    variant = (BEYOND_MEGATRON | MIXTURES | NAMED)[name]
    source = tmp_path / "hf"
    create(replace(variant, settings={**variant.settings, "num_experts": 0}), source)
    assert not megaconv.open(source).config.layers_with("moe")
    megaconv.convert(source, tmp_path / "core", saver="core", tp=2)
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert megaconv.diff(tmp_path / "back", source).same
    expected, found = compute(load(tmp_path / "back"), TOKENS), logits_of_the_trainer(source)
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_number_of_experts_that_no_model_has_is_refused_by_its_key(name: str) -> None:
    for count in (-1, "many", 4.0):
        with pytest.raises(CorruptCheckpoint, match="num_experts should be a number, found"):
            families()[name].read_hf(raw_config(name, num_experts=count))
