"""Windows, rotations and bases of rope that differ from layer to layer, as files of either transformers say them."""

import json
from typing import Any

import pytest

from megaconv.errors import CheckpointError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from tests.config_models import raw_config, read

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
TWO = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
}


def ropes(config: ModelConfig) -> tuple[float, float | None, Any]:
    return config.positions.theta, config.positions.local_theta, config.positions.scaling


def test_a_gemma_3_of_transformers_4_has_a_base_for_windows_and_a_scaling_for_the_others() -> None:
    words = {
        "rope_theta": 2e6,
        "rope_local_base_freq": 3e4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    assert ropes(read(raw_config("gemma3_text", **words))) == (
        2e6,
        3e4,
        {"factor": 8.0, "rope_type": "linear"},
    )


def test_a_gemma_3_without_a_word_has_the_bases_of_its_class() -> None:
    assert ropes(read(raw_config("gemma3_text"))) == (1e6, 1e4, None)


@pytest.mark.parametrize(
    ("words", "every"),
    [({}, 6), ({"sliding_window_pattern": 3}, 3), ({"_sliding_window_pattern": 2}, 2)],
)
def test_one_layer_in_so_many_of_a_gemma_3_has_no_window(words: dict[str, int], every: int) -> None:
    config = read(raw_config("gemma3_text", num_hidden_layers=8, sliding_window=16, **words))
    assert value_of(config, "layers.window") == tuple(
        16 if layer % every else None for layer in range(1, 9)
    )


def test_an_olmo_3_of_transformers_4_has_one_base_and_a_scaling_for_layers_without_a_window() -> (
    None
):
    assert ropes(read(raw_config("olmo3", rope_theta=5e5))) == (5e5, None, None)
    assert ropes(read(raw_config("olmo3", rope_theta=5e5, rope_scaling=YARN))) == (5e5, 5e5, YARN)


@pytest.mark.parametrize(("factor", "kept"), [(1.2079441541679836, False), (1.5, True)])
def test_an_attention_factor_that_follows_from_yarns_factor_says_nothing_more(
    factor: float, kept: bool
) -> None:
    config = read(raw_config("olmo3", rope_scaling={**YARN, "attention_factor": factor}))
    assert ("attention_factor" in (config.positions.scaling or {})) == kept


@pytest.mark.parametrize("name", ["olmo3", "gemma3_text"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_theta": 5e5, "rope_type": "default"},
        {**TWO, "sliding_attention": {**YARN, "rope_theta": 7.0}},
        "wrong",
    ],
)
def test_ropes_that_are_of_no_kind_of_layers_or_scaled_in_windows_are_refused(
    name: str, parameters: Any
) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"rope_parameters should have full_attention|layers with a window alone",
    ):
        read(raw_config(name, rope_parameters=parameters))


@pytest.mark.parametrize("name", ["olmo3", "gemma3_text"])
def test_a_config_json_with_two_ropes_stays_as_it_is_and_follows_a_change(name: str) -> None:
    from megaconv.model.fields import changed

    raw = raw_config(name, rope_parameters=TWO)
    config = read(raw)
    assert json.loads(family(name).config_json(config))["rope_parameters"] == TWO
    other = json.loads(family(name).config_json(changed(config, {"positions.local_theta": 9.0})))
    assert other["rope_parameters"] == {
        **TWO,
        "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
    }
    assert ropes(read(other)) == (5e5, 9.0, None)


@pytest.mark.parametrize(
    ("words", "windows"),
    [
        ({}, (8, 8, 8, None, 8)),
        ({"sliding_window_pattern": 2}, (8, None, 8, None, 8)),
        ({"sliding_window_pattern": "LLG"}, (8, 8, None, 8, None)),
        (
            {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
            (None, None, None, None, 8),
        ),
    ],
)
def test_layers_of_an_exaone_4_rotate_where_they_have_a_window(
    words: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = read(raw_config("exaone4", num_hidden_layers=5, sliding_window=8, **words))
    assert value_of(config, "layers.window") == windows
    assert value_of(config, "layers.rotates") == tuple(window is not None for window in windows)


@pytest.mark.parametrize(("window", "rotates"), [(None, True), (8, False)])
def test_layers_of_an_exaone_4_without_windows_rotate_unless_it_speaks_of_a_window(
    window: int | None, rotates: bool
) -> None:
    config = read(raw_config("exaone4", sliding_window=window, layer_types=["full_attention"] * 4))
    assert (value_of(config, "layers.window"), value_of(config, "layers.rotates")) == (
        None,
        rotates,
    )
    assert family("exaone4").read_hf(family("exaone4").write_hf(config)) == config
