"""The key/value heads of Gemma 4's layers without a window: transformers computes the same from the config.json that is written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.families import family, read_config
from tests.config_models import raw_config
from tests.transformers_oracle import GEMMA_4, Variant, compute, create, load

FAMILIES = ("gemma4_text", "gemma4_unified_text")
EACH = pytest.mark.parametrize("name", FAMILIES)
FULL = {"head_dim": 16, "num_key_value_heads": 2}
LISTED = {"per_layer_config": {"1": FULL, "3": FULL}}
SIZES: tuple[dict[str, Any], ...] = (
    {**LISTED, "attention_k_eq_v": False},
    {**LISTED, "attention_k_eq_v": True},
    {"num_global_key_value_heads": 2, "attention_k_eq_v": False},
)


@pytest.mark.oracle
@EACH
@pytest.mark.parametrize("sizes", SIZES, ids=["listed", "listed, keys as values", "ignored"])
def test_transformers_computes_the_same_from_a_config_json_of_our_own(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    other = {"hidden_size_per_layer_input": 0} if name == "gemma4_text" else {}
    create(Variant(name, {**GEMMA_4, **other, **sizes}), tmp_path / "hf")
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf")
    found, config = read_config(tmp_path / "hf" / "config.json")
    (tmp_path / "out" / "config.json").write_bytes(found.config_json(replace(config, hf=None)))
    tokens = torch.randint(7, 100, (2, 24), generator=torch.Generator().manual_seed(3))
    expected = compute(load(tmp_path / "hf"), tokens)
    assert torch.equal(compute(load(tmp_path / "out"), tokens), expected)


@EACH
def test_sizes_are_listed_only_if_the_keys_of_published_files_do_not_give_them(name: str) -> None:
    for sizes, keys in (
        ({"num_global_key_value_heads": 2, "attention_k_eq_v": True}, "num_global_key_value_heads"),
        ({**LISTED, "attention_k_eq_v": False}, "per_layer_config"),
    ):
        read = family(name).read_hf(raw_config(name, **GEMMA_4, **sizes))
        written = json.loads(family(name).config_json(replace(read, hf=None)))
        assert written.keys() & {"num_global_key_value_heads", "per_layer_config"} == {keys}
        assert family(name).read_hf(written).layers == read.layers
