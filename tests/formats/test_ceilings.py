"""No ceiling hits a real model: each is at least four times what the largest published model or file has."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from formats import ceilings as of_files
from megaconv.model import ceilings as of_models
from megaconv.model.ceilings import require_countable

PUBLISHED_FILES = {
    "CONFIG_BYTES": 1_700_000,  # config.json of an image classifier with the 21,841 classes of ImageNet-22k, in both directions
    "TRACKER_BYTES": 12,  # iter_0000000 as a number, or `release`
    "INDEX_BYTES": 24_000_000,  # Kimi K2 in 4 bits: 60 layers · 384 experts · 3 matrices of three tensors each, 110 bytes a name
    "HEADER_BYTES": 6_000_000,  # 40,000 tensors in one file, 150 bytes each
    "HEADER_VALUES": 300_000,  # 25,000 tensors in one file, twelve separators each
    "RECORD_BYTES": 62_000_000,  # Kimi K2 with optimizer state: 70,000 parameters, four tensors of each, 220 bytes a tensor
    "SIGNATURE_BYTES": 2_200_000,  # a run of 10,000 files, 220 bytes each
    "TREE_BYTES": 2_400_000,  # 4,000 arrays of a tree of DeepSeek-V3 with optimizer state, experts stacked, 600 bytes each
    "JSON_DEPTH": 12,  # the metadata of an Orbax tree; a tokenizer has eight
    "SIDECAR_BYTES": 35_000_000,  # tokenizer.json of PaliGemma 2; Gemma 3's has 33,384,568
    "PICKLE_BYTES": 38_700_000,  # .metadata of Kimi K2 with optimizer state: 276,000 chunks of 140 bytes
    "DIRECTORY_BYTES": 7_700_000,  # a rank file of 70,000 storages, 110 bytes each
    "GGUF_HEADER_BYTES": 20_000_000,  # Gemma 4: 262,144 words with scores and types, 514,906 merges
    "GGUF_ENTRIES": 2_000,  # tensors of DeepSeek-V3
    "GGUF_STRINGS": 262_144 + 514_906,  # Gemma 4's words and merges
    "YAML_BYTES": 30_000,  # run_config.yaml
    "YAML_VALUES": 2_000,  # run_config.yaml
    "YAML_DEPTH": 8,  # model.yaml of NeMo
    "YAML_NUMBER": 25,  # a float64 in full
    "LISTED_OBJECTS": 350_000,  # Kimi K2 with optimizer state in zarr: 276,000 chunks and 70,000 `.zarray`
    "AXES": 5,  # a convolution over video
    "AXIS": 1 << 40,  # a parameter buffer of a trillion elements
}  # fmt: skip

PUBLISHED_MODELS = {
    "LAYERS": 128,  # HRM-Text; Llama 3.1 405B has 126
    "EXPERTS": 16_384,  # Doge; Switch-C has 2,048
    "ALL_EXPERTS": 108 * 512,  # a hybrid of 108 layers with 512 experts; Qwen3.5-397B: 60 · 512
    "WIDTH": 73_728,  # the MLP of Nemotron-4 340B; its hidden size is 18,432
    "VOCABULARY": 1_000_000,
    "POSITIONS": 100_000_000,  # LTM-2-mini; Llama 4 Scout has 10,485,760
    "COUNT": 100_000_000,  # tokens of a sequence of LTM-2-mini
    "RANKS": 16_384,  # the devices of Llama 3.1 405B's run
    "ITERATION": 10_000_000,
}

NO_SIZE_OF_FILES = {"JSON_VALUES", "JSON_VALUE_BYTES", "PICKLE_VALUES", "PICKLE_VALUE_BYTES"}
"""Ceilings of values, which follow from the bytes of a file. tests/loaders/test_large_tokenizers.py has the densest
file."""


def numbers(module: object) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if name.isupper() and type(value) is int and name[0] != "_"
    }


def test_every_ceiling_has_the_number_of_the_largest_published_model() -> None:
    assert numbers(of_files) == {*PUBLISHED_FILES, *NO_SIZE_OF_FILES}
    assert numbers(of_models) == {*PUBLISHED_MODELS}


@pytest.mark.parametrize("name", PUBLISHED_FILES)
def test_no_ceiling_on_files_hits_four_times_the_largest_published(name: str) -> None:
    assert getattr(of_files, name) >= 4 * PUBLISHED_FILES[name]


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_no_ceiling_on_models_hits_four_times_the_largest_published(name: str) -> None:
    assert getattr(of_models, name) >= 4 * PUBLISHED_MODELS[name]


def test_a_size_that_each_layer_has_is_not_taken_for_a_number_of_layers() -> None:
    """Gemma 3n, Gemma 4."""
    require_countable(
        {"vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256 * 64}, "x"
    )
    require_countable({"text_config": {"layer_rope_theta": 1e6}}, "x")


WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def described(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration, and those inside it."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from described(value)


def times_four(value: Any) -> Any:
    if type(value) is int:
        return 4 * value
    if isinstance(value, Mapping):
        return {key: times_four(each) for key, each in value.items()}
    return 4 * value if isinstance(value, list) else value


@pytest.mark.slow
def test_no_default_of_a_class_of_transformers_times_four_hits_a_ceiling() -> None:
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    tried = 0
    for kind in mapping:
        try:
            config = json.loads(mapping[kind]().to_json_string())
        except Exception:  # a class that can't be made without arguments
            continue
        tried += 1
        for each in described(config):
            require_countable({key: times_four(value) for key, value in each.items()}, kind)
            sizes = {key: value for key, value in each.items() if type(value) is int}
            assert all(4 * sizes.get(key, 0) <= of_models.WIDTH for key in WIDTHS), kind
            assert all(4 * sizes.get(key, 0) <= of_models.EXPERTS for key in EXPERTS), kind
            assert 4 * sizes.get("vocab_size", 0) <= of_models.VOCABULARY, kind
            assert 4 * sizes.get("max_position_embeddings", 0) <= of_models.POSITIONS, kind
    assert tried > 300
