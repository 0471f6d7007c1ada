"""Models that are converted and not trained: transformers computes the same logits from what we write.

The config.json that it reads is one that we write ourselves, from the description of the model alone.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError, NotExpressible
from megaconv.families import family, read_config
from megaconv.model.fields import lost_fields
from tests.config_models import raw_config
from tests.savers.test_savers import write_model
from tests.transformers_oracle import CONVERTED, compute, create, family_of, load

REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "'all' is not supported"),
    ("gemma4_text", {"num_kv_shared_layers": 4}, "should be a number below 4, found 4"),
    ("gemma4_text", {"num_kv_shared_layers": 3}, "no earlier layer has a window"),
    ("gemma4_text", {"per_layer_config": {"0": {"hidden_size": 5}}}, "has hidden_size, which"),
    ("gemma4_text", {"use_double_wide_mlp": True}, "not supported with enable_moe_block"),
    ("gemma3n_text", {"altup_num_inputs": 2}, "altup_num_inputs 2 is not supported"),
    ("gemma3n_text", {"activation_sparsity_pattern": [0.5]}, "lists 1 layers, the model has 4"),
    ("laguna", {"num_attention_heads_per_layer": [8, 8, 8, 6]}, "has 6; expected a multiple of num_key_value_heads 4"),
    ("laguna", {"num_attention_heads_per_layer": [8]}, "lists 1 layers, the model has 4"),
    ("laguna", {"gating": "per-token"}, "gating 'per-token' is not supported"),
    ("laguna", {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping 30.0 is not supported"),
    ("mimo_v2_flash", {"num_attention_heads": 4}, "num_attention_heads 4 is not a multiple of 8"),
    ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1, 1, 1]}, r"hybrid_layer_pattern is \[0, 1, 1, 1\], but the keys"),
    ("mimo_v2_flash", {"layernorm_epsilon": 1e-2}, "layernorm_epsilon is 0.01, but the keys"),
    ("nemotron_nas", {"block_configs": None}, "block_configs should be a list"),
    (
        "nemotron_nas",
        {"block_configs": [{"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}}] * 4},
        "attention.replace_with_linear True in layer 0, which is not supported",
    ),
    (
        "nemotron_nas",
        {"block_configs": [{"attention": {"no_op": True}, "ffn": {"moe": {"experts": 4}}}] * 4},
        r"ffn.moe .* in layer 0, which is not supported",
    ),
)  # fmt: skip
"""(family, keys of config.json, words of the message)."""


@pytest.mark.parametrize(("name", "keys", "words"), REFUSED)
def test_what_these_families_do_not_have_is_refused_by_name(
    name: str, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family(name).read_hf(raw_config(name, **keys))


def test_keys_of_a_published_mimo_that_repeat_others_are_read() -> None:
    """Its sliding_window_size doesn't count the token itself."""
    repeated = {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 0, 1],
        "swa_num_key_value_heads": 8,
        "swa_v_head_dim": 5,
        "swa_rope_theta": 7000,
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
        "sliding_window_size": 15,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
    }
    table, raw = family("mimo_v2_flash"), raw_config("mimo_v2_flash")
    assert not lost_fields(table.read_hf(raw), table.read_hf(raw | repeated))


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_keys_and_values_that_nothing_computes_with_are_left_out_with_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published models hold them."""
    source = write_model(name, tmp_path / "hf")
    weights = load_file(source / "model.safetensors")
    unused = {
        "model.layers.3.self_attn.k_proj.weight": torch.ones(4, 4),
        "model.layers.3.self_attn.k_norm.weight": torch.ones(4),
    }
    save_file(weights | unused, source / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(source, tmp_path / "out", saver="hf", verify=True, workers=1)
    assert "keys and values of layers that share those of earlier layers" in caplog.text
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("converted")
    for name, variant in CONVERTED.items():
        create(variant, root / name)
    return {name: root / name for name in CONVERTED}


def write_own_config(source: Path, output: Path, **settings: object) -> None:
    """Replace config.json by the one that its description alone gives."""
    path = output / "config.json"
    path.write_text(json.dumps(json.loads((source / "config.json").read_text()) | settings))
    found, config = read_config(path)
    path.write_bytes(found.config_json(replace(config, hf=None)))


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONVERTED)
def test_transformers_computes_the_same_logits_from_what_is_written(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source, output = sources[name], tmp_path / "out"
    assert megaconv.convert(source, output, saver="hf", verify=True, workers=1).verified
    tokens = torch.randint(7, 100, (2, 24), generator=torch.Generator().manual_seed(3))
    expected = compute(load(source), tokens)
    assert torch.equal(compute(load(output), tokens), expected)
    write_own_config(source, output)
    assert torch.equal(compute(load(output), tokens), expected)
    for words, settings in CONVERTED[name].others.items():
        write_own_config(source, output, **settings)
        other = compute(load(output), tokens)
        assert not torch.equal(other, expected), words
        assert torch.equal(compute(load(source, **settings), tokens), other), words


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONVERTED)
def test_every_other_setting_is_another_model(name: str, sources: dict[str, Path]) -> None:
    raw = json.loads((sources[name] / "config.json").read_text())
    table = family(family_of(CONVERTED[name]))
    for words, settings in CONVERTED[name].others.items():
        assert lost_fields(table.read_hf(raw), table.read_hf(raw | settings)), words


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONVERTED)
def test_megatrons_formats_are_refused_at_once(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    for saver in ("core", "legacy"):
        with pytest.raises(NotExpressible, match="has no names in Megatron's formats"):
            megaconv.convert(sources[name], tmp_path / "out", saver=saver)
    assert not list(tmp_path.iterdir())
