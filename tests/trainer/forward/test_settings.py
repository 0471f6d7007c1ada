"""Settings of config.json: the trainer computes with each one what transformers computes with it, or refuses it by name.

Each case changes one key of a small model's config.json and keeps its weights.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.errors import CheckpointError
from megaconv.families import families
from megatron_lite.forward.rows import batches, built_in_tokens
from tests.trainer.forward.test_streaming import COMPUTED, streamed, weights_of
from tests.transformers_oracle import (
    GPT_OSS_YARN,
    YARN,
    compute,
    create,
    family_of,
    load,
    model_class,
    read_saved_config,
    rope,
    rope_of,
    two_ropes,
)

pytestmark = pytest.mark.oracle
FIRST_OF_FAMILY = tuple(
    {family_of(variant): name for name, variant in reversed(COMPUTED.items())}.values()
)
"""A small model of each family that the trainer computes."""
TOKENS = 32
TOLERANCE = 1e-4
"""Relative. A setting that counts moves the logits by far more."""


MISSING = object()
"""In place of a value: config.json doesn't have the key."""


def change_config(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    found = json.loads(path.read_text()) | settings
    kept = {key: value for key, value in found.items() if value is not MISSING}
    path.write_text(json.dumps(kept))


def logits_of_transformers(directory: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of the class that transformers chooses for a config.json, with these weights."""
    config = read_saved_config(directory)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    found = model_class(config)
    make = getattr(found, "from_config", None) or getattr(found, "_from_config", found)
    model = make(config).float().eval()
    model.load_state_dict(weights)
    return compute(model, torch.tensor([built_in_tokens(config.vocab_size, TOKENS)]))


def our_logits(directory: Path) -> torch.Tensor:
    engine = streamed(*weights_of(directory))
    (batch,) = batches(engine.config, [built_in_tokens(engine.config.vocab, TOKENS)], 1)
    with torch.no_grad():
        found = engine.logits(batch)
    assert found is not None
    return found


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def saved(name: str, directory: Path) -> dict[str, torch.Tensor]:
    """Save a small model; its weights by the names of transformers' class."""
    create(COMPUTED[name], directory)
    return load(directory).state_dict()


OTHER_WINDOWS = ["full_attention", "sliding_attention"] * 2
COMPUTED_ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "a Mistral with windows on some layers": ("mistral", {"layer_types": OTHER_WINDOWS}),
    "a Mistral with null for layer_types": ("mistral", {"layer_types": None}),
    "a rope object without its base": (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "a length of tokens with a point": (
        "ministral3",
        {"rope_parameters": {**YARN, "rope_theta": 5e3, "llama_4_scaling_beta": 0.1,
                             "original_max_position_embeddings": 24.0}},
    ),
    "a kind of rope under its older name": (
        "gemma4_unified_text",
        two_ropes({"type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e3}, rope_of(700.0)),
    ),
    "a ramp that ends before its first pair": (
        "gpt_oss",
        rope(5000.0, **GPT_OSS_YARN | {"original_max_position_embeddings": 1}),
    ),
}  # fmt: skip
"""(small model, keys of its config.json)."""


@pytest.mark.parametrize("case", COMPUTED_ALIKE)
def test_a_setting_counts_as_in_transformers(case: str, tmp_path: Path) -> None:
    name, settings = COMPUTED_ALIKE[case]
    weights = saved(name, tmp_path)
    before = logits_of_transformers(tmp_path, weights)
    change_config(tmp_path, **settings)
    expected = logits_of_transformers(tmp_path, weights)
    assert case == "a Mistral with null for layer_types" or difference(before, expected) > 1e-3
    assert difference(our_logits(tmp_path), expected) < TOLERANCE


LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 3.0}
PLAIN: dict[str, Any] = {"rope_type": "default"}
LARGE: dict[str, Any] = {"rope_theta": 777.0}
ALONE: dict[str, Any] = {"rope_parameters": MISSING, "rope_theta": 777.0}
OF_KINDS = {
    "full_attention": {"rope_type": "default", "rope_theta": 55.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
}
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("glm4", rope(5000.0, rope_type="proportional", partial_rotary_factor=0.5), "'proportional' of a part of each head"),
    ("ministral3", ALONE, "rope_theta 777 without rope_parameters .* transformers takes 1e\\+06"),
    ("cwm", ALONE, "rope_theta 777 without rope_parameters"),
    ("apertus", ALONE, "rope_theta 777 without rope_parameters"),
    ("bamba", {"rope_parameters": MISSING, "partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 outside of rope_parameters"),
    ("cohere2_moe", {"rope_parameters": MISSING, "rope_scaling": LINEAR}, "rope_scaling without rope_parameters"),
    ("olmo_hybrid", {"rope_parameters": OF_KINDS}, "found one of full_attention and sliding_attention"),
    ("gpt_neo", {"attention_layers": ["local", "global"] * 2}, "attention_layers contradicts attention_types"),
    ("step3p5", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ("gpt_neox", {"head_dim": 16}, "head_dim 16 is not supported in this architecture"),
    ("olmo3", ALONE, "rope_theta 777 without rope_parameters .* transformers 5 takes 500000 for layers with a window"),
    *((name, {**two_ropes(LINEAR, PLAIN), **LARGE}, "no rope_theta for full_attention") for name in ("beam", "mellum", "laguna")),
    ("mellum", {**two_ropes(LINEAR, rope_of(55.0)), **LARGE}, "no rope_theta for full_attention"),
    ("laguna", {**two_ropes(rope_of(55.0, **LINEAR), rope_of(77.0)), "partial_rotary_factor": 0.5}, "no partial_rotary_factor for full"),
    ("mimo_v2_flash", two_ropes(rope_of(55.0, **LINEAR), rope_of(77.0)), "no partial_rotary_factor for full_attention"),
    ("nemotron_h", {"mamba_dt_min": 0.3}, "time_step_min is 0.001 and mamba_dt_min 0.3"),
)  # fmt: skip
"""(small model, keys of its config.json, words of the refusal). transformers computes something else with each."""


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED)
def test_a_setting_that_is_not_computed_is_refused_by_name(
    name: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    weights = saved(name, tmp_path)
    before = logits_of_transformers(tmp_path, weights)
    change_config(tmp_path, **settings)
    assert difference(before, logits_of_transformers(tmp_path, weights)) > 1e-3
    with pytest.raises(CheckpointError, match=words):
        our_logits(tmp_path)


FAILS: tuple[tuple[str, dict[str, Any], str], ...] = (
    *((name, two_ropes(PLAIN, PLAIN), "has no rope_theta for (full|sliding)_attention")
      for name in ("beam", "cohere_compass_text", "mellum", "mimo_v2_flash", "laguna")),
    *((name, two_ropes(rope_of(55.0), None), "has no rope_theta for sliding_attention") for name in ("mellum", "mimo_v2_flash", "laguna")),
    *((name, {"rope_parameters": {}}, "should have") for name in ("beam", "mellum", "mimo_v2_flash", "laguna")),
    *((name, {"rope_scaling": LINEAR}, "rope_scaling .* is not supported")
      for name in ("beam", "cohere_compass_text", "mellum", "mimo_v2_flash", "laguna")),
)  # fmt: skip
"""(small model, keys of its config.json, words of the refusal). transformers can't make a model with them."""


@pytest.mark.parametrize(("name", "settings", "words"), FAILS)
def test_ropes_without_which_transformers_fails_are_refused(
    name: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    weights = saved(name, tmp_path)
    change_config(tmp_path, **settings)
    with pytest.raises((KeyError, TypeError)):
        logits_of_transformers(tmp_path, weights)
    with pytest.raises(CheckpointError, match=words):
        our_logits(tmp_path)


WRITTEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mellum", {}),
    ("ministral3", rope(5000.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.0)),
    ("bamba", rope(5000.0, partial_rotary_factor=1.0)),
    ("cohere2_moe", rope(5000.0, **LINEAR)),
)
"""(small model, keys of its config.json)."""


@pytest.mark.parametrize(("name", "settings"), WRITTEN)
def test_a_config_that_is_written_from_a_description_alone_counts_too(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    weights = saved(name, tmp_path)
    change_config(tmp_path, **settings)
    expected = logits_of_transformers(tmp_path, weights)
    table = families()[family_of(COMPUTED[name])]
    described = table.read_hf(json.loads((tmp_path / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(table.write_hf(described)))
    assert difference(logits_of_transformers(tmp_path, weights), expected) < TOLERANCE


NO_SETTINGS = ("architectures", "model_type", "dtype", "transformers_version", "vocab_size")


def other_value(value: Any) -> Any:
    """Another value of a setting; the value itself if none is plausible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value * 1.7 + 0.1
    if isinstance(value, int):
        return value - 1 if value > 1 else value + 1
    if isinstance(value, dict):
        return {key: other_value(inner) for key, inner in value.items()}
    if value in ("silu", "gelu", "relu2", "gelu_pytorch_tanh", "gelu_new"):
        return "relu"
    return value


def other_configs(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, config.json with another value of the key) for every key of transformers' class."""
    raw = json.loads((directory / "config.json").read_text())
    stated = read_saved_config(directory).to_dict()
    for key, value in {**stated, **raw}.items():
        other = other_value(value)
        if key not in NO_SETTINGS and other != value:
            yield key, {**raw, key: other}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST_OF_FAMILY)
def test_no_setting_is_ignored(name: str, tmp_path: Path) -> None:
    """A setting that transformers can't compute with these weights is left out."""
    weights = saved(name, tmp_path)
    wrong = {}
    for key, raw in other_configs(tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        try:
            expected = logits_of_transformers(tmp_path, weights)
        except (
            Exception
        ):  # of torch, transformers or huggingface_hub, which have errors of their own
            continue
        try:
            far = difference(our_logits(tmp_path), expected)
        except CheckpointError:
            continue
        if not far < TOLERANCE:
            wrong[key] = far
    assert wrong == {}
