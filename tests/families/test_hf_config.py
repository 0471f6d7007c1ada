"""config.json in two versions: read, written, refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaconv.errors import (
    CheckpointError,
    CorruptCheckpoint,
    NotExpressible,
    UnknownFamily,
    UnsupportedInput,
)
from megaconv.families import family, family_of_hf
from megaconv.families.parts.hf_config import as_file, load_config
from megaconv.families.parts.whole_model import whole_config_json
from megaconv.model.config import ModelConfig
from megaconv.model.fields import STRUCTURE, changed, fields_of
from tests.config_models import (
    LLAMA,
    SCALED,
    SCALINGS,
    Raw,
    configs,
    in_new_keys,
    in_old_keys,
    raw_config,
    raw_gpt2,
    read,
)
from tests.models import write_llama
from tests.runs import assert_refused, run


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("name", SCALED)
def test_old_and_new_keys_mean_the_same_model(name: str, scaling: Raw | None) -> None:
    old, new = (
        in_old_keys(raw_config(name), 5e5, scaling),
        in_new_keys(raw_config(name), 5e5, scaling),
    )
    config = read(old)
    assert config == read(new)
    assert (config.family, config.positions.theta, config.dtype) == (name, 5e5, "bfloat16")
    assert config.positions.scaling == (
        None if scaling in (None, {"rope_type": "default"}) else scaling
    )


def test_the_oldest_keys_for_rope_scaling_are_understood() -> None:
    old = read(in_old_keys(raw_config("llama"), 1e4, {"type": "linear", "factor": 2.0}))
    assert old.positions.scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("word", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_read_in_every_spelling(key: str, word: str) -> None:
    assert read(raw_config("llama", **{key: word})).dtype == "bfloat16"


def test_a_cast_is_written_under_both_keys_of_the_dtype() -> None:
    both = read(raw_config("llama", dtype="bfloat16", torch_dtype="bfloat16"))
    written = json.loads(family("llama").config_json(changed(both, {"dtype": "float32"})))
    assert (written["dtype"], written["torch_dtype"]) == ("float32", "float32")


@pytest.mark.parametrize(("eos", "expected"), [(2, 2), ([2, 7], (2, 7)), ([2], (2,)), (None, None)])
def test_end_of_sequence_tokens_may_be_several(eos: object, expected: object) -> None:
    config = read(raw_config("llama", eos_token_id=eos))
    assert config.eos_token_id == expected
    assert family("llama").write_hf(config)["eos_token_id"] == eos


def test_an_architecture_without_a_name_is_known_by_its_model_type() -> None:
    raw = raw_config("qwen2")
    del raw["architectures"]
    assert read(raw).family == "qwen2"


# There and back.


@given(
    configs(),
    st.none() | st.integers(0, 9),
    st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1).map(tuple),
)
@settings(max_examples=200, deadline=None)
def test_a_written_config_json_is_read_back_as_the_same_model(
    config: ModelConfig, bos: int | None, eos: Any
) -> None:
    config = changed(config, {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": bos})
    written = family(config.family).write_hf(config)
    assert read(json.loads(json.dumps(written))) == config


# Refusals.


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (
            {"quantization_config": {"quant_method": "hqq"}},
            UnsupportedInput,
            r"quantized \(hqq\); convert an unquantized copy",
        ),
        ({"quantization_config": {"bits": 4}}, UnsupportedInput, "quantized"),
        ({"partial_rotary_factor": 0.5}, NotExpressible, r"partial_rotary_factor 0\.5"),
        (
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "default",
                    "partial_rotary_factor": 0.5,
                }
            },
            NotExpressible,
            "partial_rotary",
        ),
        ({"hidden_act": "gelu"}, UnknownFamily, "hidden_act 'gelu'"),
        (
            {"hidden_size": None},
            CorruptCheckpoint,
            "hidden_size should be a positive number, found None",
        ),
        (
            {"num_hidden_layers": 0},
            CorruptCheckpoint,
            "num_hidden_layers should be a positive number, found 0",
        ),
        (
            {"vocab_size": "131"},
            CorruptCheckpoint,
            "vocab_size should be a positive number, found '131'",
        ),
        (
            {"eos_token_id": float("nan")},
            CorruptCheckpoint,
            "eos_token_id should be the number of a",
        ),
        (
            {"eos_token_id": [2, float("nan")]},
            CorruptCheckpoint,
            "eos_token_id should list numbers",
        ),
        (
            {"eos_token_id": "</s>"},
            CorruptCheckpoint,
            "eos_token_id should be the number of a token",
        ),
        ({"bos_token_id": True}, CorruptCheckpoint, "bos_token_id should be the number of a token"),
        ({"pad_token_id": [0]}, CorruptCheckpoint, "pad_token_id should be the number of a token"),
        ({"num_attention_heads": True}, CorruptCheckpoint, "num_attention_heads should be"),
        ({"num_key_value_heads": "4"}, CorruptCheckpoint, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, CorruptCheckpoint, "num_key_value_heads"),
        ({"rope_scaling": "linear"}, CorruptCheckpoint, "rope_scaling"),
        ({"rope_theta": "big"}, CorruptCheckpoint, "rope_theta"),
        ({"rms_norm_eps": None}, CorruptCheckpoint, "rms_norm_eps"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_a_config_that_cannot_be_is_refused(
    name: str, keys: Raw, error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(raw_config(name, **keys))


def test_fewer_layer_types_than_layers_are_refused() -> None:
    raw = raw_config("qwen2", layer_types=["sliding_attention"], use_sliding_window=True)
    with pytest.raises(CorruptCheckpoint, match="layer_types"):
        read(raw)


@pytest.mark.parametrize(
    ("name", "features", "message"),
    [
        (
            "llama",
            {"attention.qk_norm": True},
            "attention.qk_norm is True, which LlamaForCausalLM's config.json can't represent",
        ),
        ("llama", {"layers.window": 8}, "layers.window is 8"),
        ("llama", {"attention.qkv_bias": True}, "attention.o_bias is False"),
        ("llama", {"attention.o_bias": True}, "attention.o_bias is True"),
        ("mistral", {"attention.qkv_bias": True}, "attention.qkv_bias is True"),
        ("mistral", {"mlp.bias": True}, "mlp.bias is True"),
        (
            "mixtral",
            {"layers.window": (None, 8, None, None)},
            r"layers.window is \(None, 8, None, None\)",
        ),
        (
            "qwen2",
            {"attention.qkv_bias": True, "attention.o_bias": True},
            "attention.o_bias is True",
        ),
        ("qwen2", {"attention.qkv_bias": True, "mlp.bias": True}, "mlp.bias is True"),
        (
            "qwen2",
            {"attention.qkv_bias": True, "attention.qk_norm": True},
            "attention.qk_norm is True",
        ),
        ("qwen3", {"attention.qk_norm": True, "mlp.bias": True}, "mlp.bias is True"),
        (
            "qwen3",
            {"attention.qk_norm": True, "attention.qkv_bias": True},
            "attention.o_bias is False",
        ),
        ("mixtral", {"attention.qkv_bias": True}, "attention.qkv_bias is True"),
        ("mixtral", {"layers.mlp": ("experts", "dense", "dense", "dense")}, "layers.mlp is"),
        ("mixtral", {"experts.shared_ffn": 8}, "experts.shared_ffn is 8"),
        (
            "mixtral",
            {"experts.renormalize": False},
            "experts.renormalize is False, .* it would be True there",
        ),
        ("qwen2_moe", {"experts.scale": 2.0}, "experts.scale is 2.0"),
        ("qwen2_moe", {"experts.shared_gate": False}, "experts.shared_gate is False"),
        ("qwen3_moe", {"experts.shared_ffn": 8}, "experts.shared_ffn is 8"),
        ("qwen3_moe", {"experts.groups": 2, "experts.group_topk": 1}, "experts.groups is 2"),
        ("qwen3_moe", {"layers.window": (None, 8, None, None)}, "layers.window is"),
        ("glm4_moe", {"experts.ffn": 8, "experts.shared_ffn": 12}, "experts.shared_ffn is 12"),
        ("glm4_moe", {"layers.mlp": ("experts", "dense", "experts", "dense")}, "layers.mlp is"),
        ("deepseek_v3", {"layers.window": 8}, "layers.window is 8"),
        ("gpt2", {"attention.kv_heads": 2}, "attention.kv_heads is 2"),
        ("gpt2", {"attention.head_dim": 3}, "attention.head_dim is 3"),
    ],
)
def test_a_feature_without_a_place_in_config_json_is_refused(
    name: str, features: Raw, message: str
) -> None:
    with pytest.raises(NotExpressible, match=message):
        family(name).write_hf(
            changed(read(raw_gpt2() if name == "gpt2" else raw_config(name)), features)
        )


@pytest.mark.parametrize(
    ("keys", "asked", "near"),
    [
        ({"architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM", ""),
        ({"architectures": [], "model_type": "rwkv"}, "rwkv", ""),
        (
            {"architectures": ["Phi3SmallForCausalLM"]},
            "Phi3SmallForCausalLM",
            "like it that are: Phi3ForCausalLM",
        ),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest_one_and_the_list(
    keys: Raw, asked: str, near: str
) -> None:
    with pytest.raises(UnknownFamily) as caught:
        family_of_hf(raw_config("llama") | keys, "m/config.json")
    message = str(caught.value)
    assert message.startswith(f"m/config.json: architecture {asked} is not supported")
    assert "`megaconv formats` lists all" in message
    assert near in message if near else "like it" not in message
    assert len(message) < 300


def test_a_config_json_that_names_no_architecture_is_refused_in_these_words() -> None:
    unnamed = raw_config("llama") | {"architectures": None, "model_type": None}
    with pytest.raises(UnknownFamily, match=r"config\.json: has neither architectures nor model_"):
        family_of_hf(unnamed, "m/config.json")


@pytest.mark.parametrize("content", ["", "[1]", "{", "null", '"x"', "\xff"])
def test_a_config_file_that_is_no_json_object_is_corrupt(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(CorruptCheckpoint, match=r"config\.json"):
        load_config(path)


# The config.json that is shipped.


def test_a_models_own_keys_are_kept_and_only_the_dtype_is_brought_up_to_date() -> None:
    raw = raw_config("llama", dtype="float32", custom={"a": 1}, torch_dtype_note="x")
    config = changed(read(raw), {"dtype": "bfloat16"})
    shipped = json.loads(family("llama").config_json(config))
    assert shipped == raw | {"dtype": "bfloat16"}


def test_without_a_config_of_its_own_a_model_gets_a_complete_config() -> None:
    shipped = json.loads(family("llama").config_json(replace(LLAMA, hf=None)))
    assert shipped["torch_dtype"] == "bfloat16"
    assert read(shipped) == LLAMA


def test_a_models_own_keys_follow_what_has_changed_since() -> None:
    raw = in_new_keys(raw_config("llama", custom=1), 1e4, None)
    config = changed(read(raw), {"positions.theta": 5e5, "norm.epsilon": 3e-6})
    shipped = json.loads(family("llama").config_json(config))
    assert (shipped["rope_theta"], shipped["rms_norm_eps"], shipped["custom"]) == (5e5, 3e-6, 1)
    assert "rope_parameters" not in shipped
    assert read(shipped) == config


def test_a_config_describes_at_least_what_decides_about_tensors() -> None:
    assert set(STRUCTURE) <= set(fields_of(LLAMA))


def test_half_a_character_in_a_configuration_is_written_as_it_was_spelled() -> None:
    assert json.loads(as_file({"bos_token": "\ud800", "other": "é"})) == {
        "bos_token": "\ud800",
        "other": "é",
    }
    assert "é".encode() in as_file({"other": "é"})
    whole = whole_config_json({"model_type": "x", "use_cache": "\ud800"}, "bfloat16")
    assert json.loads(whole) == {
        "model_type": "x",
        "use_cache": "\ud800",
        "torch_dtype": "bfloat16",
    }


@pytest.mark.parametrize("saver", ["core", "hf"])
def test_a_token_that_is_no_number_is_refused_with_the_path_of_its_file(
    saver: str, tmp_path: Path
) -> None:
    """Its end of texts was left out without a word in Megatron's checkpoints."""
    model = write_llama(tmp_path / "hf", layers=1)
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": float("nan")}))
    outcome = run("convert", model, tmp_path / "out", "--saver", saver)
    assert_refused(
        outcome, 3, f"{file}: eos_token_id should be the number of a token or null, found nan"
    )
