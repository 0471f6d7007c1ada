"""Models of families with experts whose layers are all dense: by `num_experts` 0, or as the first layers of a larger model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megaconv
from megaconv.errors import CorruptCheckpoint
from megaconv.families import families
from tests.config_models import raw_config
from tests.families.test_families import write_model
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


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 3, "num_nextn_predict_layers": 0}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    ],
)
@pytest.mark.parametrize("layout", [{}, {"pp": 3}, {"tp": 4}, {"ckpt_format": "torch_dist"}])
def test_a_checkpoint_of_dense_layers_alone_is_resharded(
    family: str, keys: dict[str, Any], layout: dict[str, Any], tmp_path: Path
) -> None:
    source = write_model(tmp_path / "hf", family, **keys)
    megaconv.convert(source, tmp_path / "core", saver="core", tp=2)
    megaconv.convert(tmp_path / "core", tmp_path / "other", saver="core", verify=True, **layout)
    assert megaconv.diff(tmp_path / "other", source).same
