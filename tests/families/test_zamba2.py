"""Zamba 2: published sizes, transformers' own save, copies of shared tensors, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from megaconv.model.table import canonical_shapes
from tests.families.test_published_models import PUBLISHED
from tests.transformers_oracle import CONVERTED, assert_comes_back, create, load
from tests.whole_models import elements_by_table, elements_of_class

MIDDLE: dict[str, Any] = PUBLISHED["Zyphra/Zamba2-2.7B"]["config"]
LARGE: dict[str, Any] = PUBLISHED["Zyphra/Zamba2-7B"]["config"]
SHARED = (
    "feed_forward.gate_up_proj",
    "self_attn.k_proj",
    "feed_forward.gate_up_proj_adapter_list.0.0",
)
NAMES = [name for name in CONVERTED if name.startswith("zamba2")]


@pytest.mark.oracle
@pytest.mark.parametrize(("raw", "billions"), [(MIDDLE, 2.66), (LARGE, 7.36)])
def test_published_models_have_as_many_elements_as_transformers_class(
    raw: dict[str, Any], billions: float
) -> None:
    transformers = pytest.importorskip("transformers")
    counted = elements_by_table("zamba2", raw)
    config = transformers.AutoConfig.for_model(**raw)
    assert counted == elements_of_class("Zamba2ForCausalLM", config)
    assert counted / 1e9 == pytest.approx(billions, abs=0.005)


def test_the_first_layer_with_a_block_holds_it() -> None:
    model = family("zamba2").read_hf(LARGE)
    assert model.layers_with("block") == (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77)
    assert model.layers_with("holds_block") == (6, 11)
    assert model.block_places[77] == {"block_holder": 6, "block_use": 12}
    shapes = canonical_shapes(family("zamba2").rows, model)
    assert shapes["layers.6.block.attn.q.weight"] == (7168, 7168)
    assert shapes["layers.77.block.adapter.gate.weight"] == (14336, 128)
    assert "layers.77.block.attn.q.weight" not in shapes


def test_without_words_the_model_has_the_layers_of_the_2_7b() -> None:
    without = {key: value for key, value in MIDDLE.items() if key != "layers_block_type"}
    table = family("zamba2")
    assert table.read_hf(without).layers == table.read_hf(MIDDLE).layers


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_saves_after_dcp_is_the_same_model(name: str, tmp_path: Path) -> None:
    create(CONVERTED[name], tmp_path / "hf")
    assert_comes_back(tmp_path / "hf", "dcp", tmp_path)


def write_state_dictionary(source: Path) -> dict[str, torch.Tensor]:
    """Replace the weights of a model by its state dictionary, which holds shared tensors in each layer. Returns it."""
    weights = {name: value.clone() for name, value in load(source).state_dict().items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return weights


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_a_state_dictionary_with_copies_of_shared_tensors_is_the_same_model(
    name: str, tmp_path: Path
) -> None:
    create(CONVERTED[name], tmp_path / "hf")
    once = load_file(tmp_path / "hf" / "model.safetensors")
    assert len(write_state_dictionary(tmp_path / "hf")) > len(once) + 10
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", verify=True, workers=1)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == once.keys()
    assert all(torch.equal(written[name], value) for name, value in once.items())


@pytest.mark.oracle
@pytest.mark.parametrize("kind", SHARED)
def test_a_copy_with_other_values_ends_the_run(kind: str, tmp_path: Path) -> None:
    create(CONVERTED["zamba2"], tmp_path / "hf")
    weights = write_state_dictionary(tmp_path / "hf")
    copy = f"model.layers.3.shared_transformer.{kind}.weight"
    weights[copy][-1, -1] += 1
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"the copy {copy} .* has other values"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", workers=1)
    assert not (tmp_path / "out").exists()


def test_megatron_and_quantization_are_refused_by_name(tmp_path: Path) -> None:
    create(CONVERTED["zamba2"], tmp_path / "hf")
    with pytest.raises(CheckpointError, match="Zamba2ForCausalLM has no names in Megatron's formats"):  # fmt: skip
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="core")
    with pytest.raises(CheckpointError, match="zamba2, whose layers share matrices"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", quantize="fp8-block")


def test_an_inspection_names_the_blocks(tmp_path: Path) -> None:
    create(CONVERTED["zamba2"], tmp_path / "hf")
    lines = dict(megaconv.inspect(tmp_path / "hf").lines())
    assert lines["blocks"] == "2 shared by 3 layers, adapters of rank 6"
    assert "pattern" not in lines


def test_a_new_config_has_the_words_that_all_releases_read() -> None:
    table = family("zamba2")
    written = table.write_hf(table.read_hf({**MIDDLE, "layers_block_type": ["linear_attention"] * 53 + ["hybrid"]}))  # fmt: skip
    assert written["layers_block_type"] == ["mamba"] * 53 + ["hybrid"]
    assert json.loads(json.dumps(written)) == written


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layers_block_type": ["mamba"]}, "layers_block_type lists 1 layer, the model has 54"),
        ({"layers_block_type": ["attention"] * 54}, "layers_block_type has 'attention'"),
        ({"hybrid_layer_ids": [1, 2]}, r"hybrid_layer_ids is \[1, 2\], but the other keys make it"),
        ({"num_hidden_layers": 55}, "layers_block_type lists 54 layers, the model has 55"),
        ({"mamba_headdim": 32}, "mamba_headdim is 32, but the other keys make it 64"),
        ({"kv_channels": 160}, "kv_channels is 160, but the other keys make it 80"),
        ({"attention_head_dim": 80}, "attention_head_dim is 80, but the other keys make it 160"),
        ({"num_attention_heads": 30, "num_key_value_heads": 30}, "num_attention_heads 30 doesn't divide 5120"),
        ({"num_key_value_heads": 8, "use_shared_attention_adapter": True}, "expected the same with use_shared_attention_adapter"),
        ({"n_mamba_heads": 81}, "n_mamba_heads 81 doesn't divide 5120"),
        ({"add_bias_linear": True}, "add_bias_linear True is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False is not supported"),
        ({"use_long_context": True}, "use_long_context True is not supported"),
        ({"mamba_d_conv": 3}, "mamba_d_conv 3 is not supported"),
        ({"time_step_min": 0.01}, "time_step_min 0.01 is not supported"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit \[0.0, 0.1\] is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"num_mem_blocks": 0}, "num_mem_blocks should be a positive number, found 0"),
        ({"adapter_rank": -1}, "adapter_rank should be a positive number, found -1"),
    ],
)  # fmt: skip
def test_a_config_that_no_zamba_2_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("zamba2").read_hf(MIDDLE | keys)


@pytest.mark.oracle
def test_a_classifier_goes_through_dcp_and_back(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification as Classifier

    create(CONVERTED["zamba2"], tmp_path / "hf", Classifier, num_labels=3)
    megaconv.convert(tmp_path / "hf", tmp_path / "dcp", saver="dcp")
    megaconv.convert(tmp_path / "dcp", tmp_path / "back", saver="hf", config=tmp_path / "hf")
    tokens = torch.arange(1, 13)[None]
    first, second = (
        Classifier.from_pretrained(tmp_path / name)(tokens).logits for name in ("hf", "back")
    )
    assert first.shape == (1, 3)
    torch.testing.assert_close(first, second, atol=0, rtol=0)
