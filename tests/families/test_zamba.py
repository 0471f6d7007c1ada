"""Zamba 1: the published size, the pattern of layers, copies of the shared block, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from tests.config_models import raw_config
from tests.transformers_oracle import CONVERTED, assert_comes_back, create, load
from tests.whole_models import elements_by_table, elements_of_class

PUBLISHED: dict[str, Any] = {
    "architectures": ["ZambaForCausalLM"], "model_type": "zamba", "vocab_size": 32000, "hidden_size": 3712,
    "intermediate_size": 14848, "num_hidden_layers": 76, "num_attention_heads": 16, "num_key_value_heads": 16,
}  # fmt: skip
"""Zyphra/Zamba-7B-v1, whose sizes are the defaults of transformers' class."""
NAMES = [name for name in CONVERTED if name.split(",")[0] == "zamba"]


@pytest.mark.oracle
def test_the_published_model_has_as_many_elements_as_transformers_class() -> None:
    transformers = pytest.importorskip("transformers")
    counted = elements_by_table("zamba", PUBLISHED)
    config = transformers.AutoConfig.for_model(**PUBLISHED)
    assert counted == elements_of_class("ZambaForCausalLM", config)
    assert counted / 1e9 == pytest.approx(7.23, abs=0.01)


@pytest.mark.oracle
@pytest.mark.parametrize("layers", [3, 4, 9, 76])
@pytest.mark.parametrize(("period", "first"), [(6, 4), (2, 0), (1, 0), (3, 5)])
def test_without_words_the_pattern_gives_the_layers(layers: int, period: int, first: int) -> None:
    transformers = pytest.importorskip("transformers")
    keys = {"num_hidden_layers": layers, "attn_layer_period": period, "attn_layer_offset": first}
    words = transformers.ZambaConfig(**keys).layers_block_type
    expected = tuple(layer for layer, word in enumerate(words) if word == "hybrid")
    assert family("zamba").read_hf(PUBLISHED | keys).layers_with("block") == expected


def test_the_first_layer_with_the_block_holds_it() -> None:
    model = family("zamba").read_hf(PUBLISHED)
    assert model.layers_with("holds_block") == (2,)
    assert model.block_places[7]["block_holder"] == 2


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_what_transformers_saves_afterwards_is_the_same_model(
    name: str, saver: str, tmp_path: Path
) -> None:
    create(CONVERTED[name], tmp_path / "hf")
    assert_comes_back(tmp_path / "hf", saver, tmp_path)


@pytest.mark.oracle
def test_copies_of_the_block_are_compared_and_left_out(tmp_path: Path) -> None:
    """A state dictionary holds the block in each layer that has it."""
    create(CONVERTED["zamba"], tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    once = load_file(path)
    weights = {name: value.clone() for name, value in load(tmp_path / "hf").state_dict().items()}
    assert len(weights) > len(once) + 10
    save_file(weights, path, metadata={"format": "pt"})
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", verify=True, workers=1)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == once.keys()
    assert all(torch.equal(written[name], value) for name, value in once.items())
    copy = "model.layers.3.shared_transf.self_attn.k_proj.weight"
    weights[copy][-1, -1] += 1
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"the copy {copy} .* has other values"):
        megaconv.convert(tmp_path / "hf", tmp_path / "never", saver="hf", workers=1)
    assert not (tmp_path / "never").exists()


@pytest.mark.oracle
def test_a_classifier_goes_through_dcp_and_back(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification as Classifier

    create(CONVERTED["zamba"], tmp_path / "hf", Classifier, num_labels=3)
    megaconv.convert(tmp_path / "hf", tmp_path / "dcp", saver="dcp")
    megaconv.convert(tmp_path / "dcp", tmp_path / "back", saver="hf", config=tmp_path / "hf")
    tokens = torch.arange(1, 13)[None]
    first, second = (
        Classifier.from_pretrained(tmp_path / name)(tokens).logits for name in ("hf", "back")
    )
    assert first.shape == (1, 3)
    assert torch.equal(first, second)


@pytest.mark.oracle
def test_megatron_is_refused_and_an_inspection_names_the_block(tmp_path: Path) -> None:
    create(CONVERTED["zamba"], tmp_path / "hf")
    with pytest.raises(CheckpointError, match="ZambaForCausalLM has no names in Megatron's formats"):  # fmt: skip
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="core")
    assert dict(megaconv.inspect(tmp_path / "hf").lines())["blocks"] == "1 shared by 3 layers"


def test_a_new_config_has_the_words_that_all_releases_read() -> None:
    table = family("zamba")
    written = table.write_hf(table.read_hf(PUBLISHED | {"num_hidden_layers": 4}))
    assert written["layers_block_type"] == ["mamba", "mamba", "hybrid", "mamba"]
    assert json.loads(json.dumps(written)) == written


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layers_block_type": ["mamba"]}, "layers_block_type lists 1 layer, the model has 4"),
        ({"layers_block_type": ["attention"] * 4}, "layers_block_type has 'attention'"),
        ({"layers_block_type": None, "attn_layer_period": 0}, "attn_layer_period should be a positive number"),
        ({"layers_block_type": None, "attn_layer_offset": "x"}, "attn_layer_offset should be a number from 0, found 'x'"),
        ({"layers_block_type": None, "num_hidden_layers": 2}, "layers_block_type lists 3 layers, the model has 2"),
        ({"attention_hidden_size": 32}, "attention_hidden_size is 32, but the other keys make it 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 doesn't divide num_attention_heads 8"),
        ({"n_mamba_heads": 5}, "n_mamba_heads 5 doesn't divide 64"),
        ({"n_mamba_heads": 0}, "n_mamba_heads should be a positive number"),
        ({"mamba_dt_rank": "wide"}, "mamba_dt_rank should be a positive number, found 'wide'"),
        ({"hidden_mamba_act": "gelu"}, "hidden_mamba_act 'gelu' is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False is not supported"),
    ],
)  # fmt: skip
def test_a_config_that_no_zamba_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("zamba").read_hf(raw_config("zamba", **keys))
