"""Zaya: the class's sizes, the numbers of one layer alone, layers that are chosen, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megatron_lite.models.trainable import check_computed
from tests.config_models import raw_config
from tests.transformers_oracle import CONVERTED, assert_comes_back, create
from tests.whole_models import elements_by_table, elements_of_class

DEFAULT: dict[str, Any] = {"architectures": ["ZayaForCausalLM"], "model_type": "zaya"}
"""The class's own sizes, which are those of Zyphra/ZAYA1-8B."""
NAMES = [name for name in CONVERTED if name.split(",")[0] == "zaya"]


def described(**keys: Any) -> ModelConfig:
    return family("zaya").read_hf(raw_config("zaya", **keys))


@pytest.mark.oracle
def test_the_default_model_has_as_many_elements_as_transformers_class() -> None:
    transformers = pytest.importorskip("transformers")
    counted = elements_by_table("zaya", DEFAULT)
    assert counted == elements_of_class("ZayaForCausalLM", transformers.ZayaConfig())
    assert counted / 1e9 == pytest.approx(8.84, abs=0.01)


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_what_transformers_saves_afterwards_is_the_same_model(
    name: str, saver: str, tmp_path: Path
) -> None:
    create(CONVERTED[name], tmp_path / "hf")
    assert_comes_back(tmp_path / "hf", saver, tmp_path)


@pytest.mark.oracle
def test_the_numbers_that_balance_experts_stay_exact_in_bfloat16(tmp_path: Path) -> None:
    create(CONVERTED["zaya"], tmp_path / "hf")
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", dtype="bf16")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    biases = [name for name in before if name.endswith("balancing_biases")]
    assert len(biases) == 4
    assert all(torch.equal(before[name], after[name]) for name in biases)
    assert after["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.oracle
def test_a_missing_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    create(CONVERTED["zaya"], tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    weights = load_file(path)
    scale = "model.layers.1.mlp.gate.router_states_scale"
    save_file(
        {name: value for name, value in weights.items() if name != scale}, path, {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=scale):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf")
    of_first = scale.replace("layers.1", "layers.0")
    save_file({**weights, of_first: weights[scale].clone()}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=of_first):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.oracle
def test_another_first_layer_is_refused(tmp_path: Path) -> None:
    """Layer 0 has no number for a router before it, and each other layer has one."""
    create(CONVERTED["zaya"], tmp_path / "hf")
    with pytest.raises(CheckpointError, match="layers"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", layers=[1, 2])
    assert not (tmp_path / "out").exists()


@pytest.mark.oracle
def test_megatron_and_training_are_refused(tmp_path: Path) -> None:
    create(CONVERTED["zaya"], tmp_path / "hf")
    with pytest.raises(CheckpointError, match="ZayaForCausalLM has no names in Megatron's formats"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="core")
    with pytest.raises(CheckpointError, match="a zaya is converted, but can't be trained yet"):
        check_computed(described())


def test_missing_keys_have_the_values_of_the_class() -> None:
    model = family("zaya").read_hf(DEFAULT)
    assert (model.positions.theta, model.positions.rotary_percent) == (5e6, 0.5)
    assert (model.experts.count, model.experts.router_width, model.tie_embeddings) == (
        16,
        256,
        True,
    )
    assert model.window is None


def test_windows_count_in_the_layers_that_have_them_alone() -> None:
    assert described().layers_with("window") == (1, 3)
    plain = described(layer_types=["hybrid"] * 4, sliding_window=5)
    assert plain.window is None
    assert family("zaya").write_hf(plain)["sliding_window"] is None


def test_the_rope_type_beside_the_ropes_of_published_files_is_left_out() -> None:
    ropes = raw_config("zaya")["rope_parameters"]
    stated = described(rope_parameters={**ropes, "rope_type": "default"})
    assert stated == described()


def test_a_new_config_is_read_back_as_the_same_model() -> None:
    written = family("zaya").write_hf(described())
    assert json.loads(json.dumps(written)) == written
    assert family("zaya").read_hf(written) == described()


ROPE = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layer_types": ["hybrid"]}, "layer_types lists 1 layer, the model has 4"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
        ({"sliding_window": None}, "sliding_window should be a positive number, found None"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"cca_time0": 0}, "cca_time0 should be a positive number, found 0"),
        ({"cca_time1": "two"}, "cca_time1 should be a positive number, found 'two'"),
        ({"router_hidden_size": None, "moe_intermediate_size": 0}, "moe_intermediate_size should be a positive number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 doesn't divide num_attention_heads 8"),
        ({"num_key_value_heads": 1, "head_dim": 5}, "can't have 1 key/value heads of 5 and convolutions over 3 and 2"),
        ({"rope_parameters": ROPE}, "rope_parameters has nothing for hybrid, expected an object with rope_theta"),
        ({"rope_parameters": {"hybrid": ROPE}}, "rope_parameters has nothing for hybrid_sliding"),
        ({"rope_parameters": {"hybrid": ROPE, "hybrid_sliding": {"rope_type": "default"}}}, "no rope_theta for hybrid_sliding"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling .* is not supported"),
    ],
)  # fmt: skip
def test_a_config_that_no_zaya_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        described(**keys)
    assert "\n" not in str(refused.value)
