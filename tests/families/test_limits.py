"""Limits of scores, logits and activations are positive numbers, and layers with a window are counted."""

import math
from typing import Any

import pytest

from megaconv.errors import CorruptCheckpoint
from megaconv.families import families
from tests.config_models import raw_config, read

LIMITS = [
    ("gemma2", "attn_logit_softcapping"),
    ("gemma2", "final_logit_softcapping"),
    ("gemma3n_text", "final_logit_softcapping"),
    ("gemma4_text", "final_logit_softcapping"),
    ("nanochat", "final_logit_softcapping"),
    ("muse_glimmer_text", "final_logit_softcapping"),
    ("mistral_large4_text", "final_logit_softcapping"),
    ("olmo", "clip_qkv"),
    ("gpt_oss", "swiglu_limit"),
    ("deepseek_v4", "swiglu_limit"),
    ("glm5_next_text", "swiglu_limit"),
    ("hy_v4", "swiglu_limit"),
    ("minimax_m3_vl_text", "swiglu_limit"),
]
NO_LIMITS = [-30.0, -1, 0, 0.0, math.nan, math.inf]


@pytest.mark.parametrize("value", NO_LIMITS)
@pytest.mark.parametrize(("name", "key"), LIMITS)
def test_a_limit_that_is_no_positive_number_is_refused(name: str, key: str, value: float) -> None:
    """With 0, transformers computes zeros or NaN, and with a negative limit always the same values."""
    with pytest.raises(
        CorruptCheckpoint, match=rf"config\.json: {key} should be a positive number"
    ):
        families()[name].read_hf(raw_config(name) | {key: value})


@pytest.mark.parametrize(
    ("name", "key"),
    [each for each in LIMITS if each[0] in ("gemma2", "gemma3n_text", "gemma4_text", "nanochat", "olmo")],
)  # fmt: skip
def test_null_switches_a_limit_off(name: str, key: str) -> None:
    config = families()[name].read_hf(raw_config(name) | {key: None})
    assert (config.attention.score_cap, config.head.logit_cap, config.attention.clip).count(
        None
    ) >= 2


@pytest.mark.parametrize("value", [-6.0, math.nan, math.inf])
def test_mpt_refuses_a_clip_below_0_and_0_is_none(value: float) -> None:
    with pytest.raises(CorruptCheckpoint, match="clip_qkv should be a positive number"):
        families()["mpt"].read_hf(raw_config("mpt") | {"attn_config": {"clip_qkv": value}})
    off = families()["mpt"].read_hf(raw_config("mpt") | {"attn_config": {"clip_qkv": 0}})
    assert off.attention.clip is None


@pytest.mark.parametrize("value", [-7.0, math.nan, math.inf])
@pytest.mark.parametrize("key", ["swiglu_limits", "swiglu_limits_shared"])
def test_step_refuses_a_limit_of_a_layer_below_0_and_0_is_none(key: str, value: float) -> None:
    raw = raw_config("step3p5")
    layers: Any = raw["num_hidden_layers"]
    families()["step3p5"].read_hf(raw | {key: [0.0] * layers})
    with pytest.raises(CorruptCheckpoint, match=f"{key} should be a positive number"):
        families()["step3p5"].read_hf(raw | {key: [value] + [0.0] * (layers - 1)})


@pytest.mark.parametrize("value", [-1, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_moe", "dots1"])
def test_the_first_layer_with_a_window_is_no_negative_number(name: str, value: float) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    raw = {**raw_config(name), **windows, "max_window_layers": value}
    with pytest.raises(
        CorruptCheckpoint, match=r"config\.json: max_window_layers should be 0 or more"
    ):
        read(raw)
