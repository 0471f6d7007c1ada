"""Dory: the published size, three forms of names and two of numbers of layers, and refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.meaning import lost_fields
from megatron_lite.models.trainable import check_computed
from tests.config_models import raw_config
from tests.transformers_oracle import CONVERTED, assert_comes_back, compute, create, load
from tests.whole_models import elements_by_table, elements_of_class

DEFAULT: dict[str, Any] = {"architectures": ["DoryForCausalLM"], "model_type": "dory"}
"""The class's own sizes, which are those of nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16."""
NAMES = [name for name in CONVERTED if name.split(",")[0] == "dory"]
WHOLE = {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
KINDS = ["sliding_attention", "full_attention"]


def described(**keys: Any) -> ModelConfig:
    return family("dory").read_hf(raw_config("dory", **keys))


def write(weights: dict[str, torch.Tensor], source: Path, directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.oracle
def test_the_default_model_has_as_many_elements_as_transformers_class() -> None:
    transformers = pytest.importorskip("transformers")
    counted = elements_by_table("dory", DEFAULT)
    assert counted == elements_of_class("DoryForCausalLM", transformers.DoryConfig())
    assert counted / 1e9 == pytest.approx(3.975, abs=0.001)


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_what_transformers_saves_afterwards_is_the_same_model(
    name: str, saver: str, tmp_path: Path
) -> None:
    create(CONVERTED[name], tmp_path / "hf")
    assert_comes_back(tmp_path / "hf", saver, tmp_path)


@pytest.mark.oracle
def test_all_forms_of_names_are_read_and_the_published_one_is_written(tmp_path: Path) -> None:
    """What transformers saves, its state dictionary, and the output, which counts each layer as two."""
    source = tmp_path / "hf"
    create(CONVERTED["dory"], source)
    saved = load_file(source / "model.safetensors")
    assert "backbone.layers.1.self_attn.g_proj.weight" in saved
    of_class = write(dict(load(source).state_dict()), source, tmp_path / "class")
    assert "model.layers.1.self_attn.gate_proj.weight" in load_file(of_class / "model.safetensors")
    megaconv.convert(source, tmp_path / "out", saver="hf")
    published = load_file(tmp_path / "out" / "model.safetensors")
    names = {"backbone.embeddings.weight", "backbone.layers.2.mixer.g_proj.weight"}
    assert names | {"backbone.layers.3.mlp_alpha"} <= published.keys()
    assert not any(re.search("self_attn|lambda|embed_tokens", name) for name in published)
    for form in (of_class, tmp_path / "out"):
        assert megaconv.diff(form, source).same


@pytest.mark.oracle
def test_a_missing_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    create(CONVERTED["dory"], tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    rate = weights.pop("backbone.layers.1.lambda_2")
    source = write(weights, tmp_path / "hf", tmp_path / "less")
    with pytest.raises(CheckpointError, match=r"1 tensor is missing: backbone\.layers\.3\.mlp_alpha"):  # fmt: skip
        megaconv.convert(source, tmp_path / "out", saver="hf")
    further = {"backbone.layers.1.lambda_2": rate, "backbone.layers.1.lambda_3": rate.clone()}
    source = write(weights | further, tmp_path / "hf", tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"backbone\.layers\.1\.lambda_3"):
        megaconv.convert(source, tmp_path / "out", saver="hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.oracle
def test_new_tokens_get_rows_and_scales_of_their_logits(tmp_path: Path) -> None:
    create(CONVERTED["dory"], tmp_path / "hf")
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", vocab_size=140)
    tokens = torch.arange(7, 31)[None]
    before, after = (compute(load(tmp_path / name), tokens) for name in ("hf", "out"))
    assert after.shape[-1] == 140
    torch.testing.assert_close(after[..., :131], before)


@pytest.mark.oracle
def test_megatron_and_training_are_refused(tmp_path: Path) -> None:
    create(CONVERTED["dory"], tmp_path / "hf")
    with pytest.raises(CheckpointError, match="DoryForCausalLM has no names in Megatron's formats"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="core")
    with pytest.raises(CheckpointError, match="a dory is converted, but can't be trained yet"):
        check_computed(described())


def test_both_ways_to_count_layers_mean_the_same() -> None:
    plain = described(**WHOLE, layer_types=KINDS * 2)
    assert plain == described()
    assert (plain.layer_count, plain.loops.before, plain.loops.after) == (4, 1, 1)
    assert plain.layers_with("window") == (0, 2)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"layer_types": None, **WHOLE},
        {"layer_types": KINDS * 2, **WHOLE, "n_recurrent_layers": None},
        {"n_recurrent_loops": 5, "recurrent_kv_cache_mode": "last_loop"},
        {"initializer_range": 0.2, "ngpt_alpha_init": 0.4},
    ],
)
def test_keys_mean_what_transformers_class_says(keys: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    raw = {key: value for key, value in raw_config("dory", **keys).items() if value is not None}
    saved = json.loads(transformers.DoryConfig(**raw).to_json_string(use_diff=False))
    table = family("dory")
    assert not lost_fields(table.read_hf(raw), table.read_hf(saved))


def test_a_new_config_counts_layers_as_published_ones() -> None:
    table = family("dory")
    written = table.write_hf(described())
    assert json.loads(json.dumps(written)) == written
    assert [written[key] for key in WHOLE] == [8, 2, 4, 2]
    assert written["layer_types"] == ["sliding_attention", "mlp", "full_attention", "mlp"] * 2
    assert not lost_fields(described(), table.read_hf(written))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layer_types": ["sliding_attention", "mlp", "mlp", "full_attention"] * 2}, "layer_types should have mlp in each second place"),
        ({"layer_types": ["sliding_attention", "mlp"] * 2}, "layer_types lists 2 layers, the model has 4"),
        ({"layer_types": ["conv", "mlp"] * 4}, "layer_types has 'conv'"),
        ({"n_input_layers": 3}, "n_input_layers is 3, but layer_types counts attention and MLPs as two layers; expected an even number"),
        ({"n_recurrent_layers": 2}, "n_input_layers 1, n_recurrent_layers 1 and n_output_layers 1 should add up to"),
        ({"n_recurrent_layers": 0}, "n_recurrent_layers should be a positive number"),
        ({"n_output_layers": -2}, "n_output_layers should be 0 or more, found -2"),
        ({"n_recurrent_loops": 0}, "n_recurrent_loops should be a positive number"),
        ({"recurrent_kv_cache_mode": "all"}, "recurrent_kv_cache_mode 'all' is not supported"),
        ({"initializer_range": 0.0}, "initializer_range 0.0 is not supported"),
        ({"ngpt_alpha_init": "slow"}, "ngpt_alpha_init should be a number"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters should have full_attention and sliding_attention"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling .* is not supported"),
    ],
)  # fmt: skip
def test_a_config_that_no_dory_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        described(**keys)
    assert "\n" not in str(refused.value)
