"""DBRX: the two places of the base of rope, keys in objects, experts that share tensors, and adapters of its names."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family, read_config
from megaconv.model.meaning import lost_fields
from tests.families.test_published_models import PUBLISHED
from tests.runs import run
from tests.transformers_oracle import BEYOND_MEGATRON, compute, create, load, rope

INSTRUCT: dict[str, Any] = PUBLISHED["databricks/dbrx-instruct"]["config"]
TOKENS = torch.randint(7, 100, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("dbrx") / "hf"
    create(BEYOND_MEGATRON["dbrx"], path)
    return path


def with_config(source: Path, target: Path, **keys: Any) -> Path:
    """The model with other keys in its config.json. A key of None is left out."""
    raw = json.loads((source / "config.json").read_text()) | keys
    target.mkdir()
    (target / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if value is not None})
    )
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    return target


@pytest.mark.oracle
def test_transformers_computes_with_the_base_that_a_published_file_has_inside(
    source: Path, tmp_path: Path
) -> None:
    """Without megaconv, transformers 5 takes 10000 for such a file. A new config.json has the base in both places."""
    inside = {"kv_n_heads": 4, "clip_qkv": 0.7, "rope_theta": 700.0}
    published = with_config(
        source, tmp_path / "in", attn_config=inside, rope_parameters=None, num_key_value_heads=None
    )
    megaconv.convert(published, tmp_path / "out", saver="hf")
    found, config = read_config(published / "config.json")
    (tmp_path / "out" / "config.json").write_bytes(found.config_json(replace(config, hf=None)))
    expected = compute(load(source, attn_config=inside, **rope(700.0)), TOKENS)
    assert torch.equal(compute(load(tmp_path / "out"), TOKENS), expected)
    assert not torch.equal(compute(load(source), TOKENS), expected)


@pytest.mark.oracle
def test_what_transformers_saves_again_is_the_same_model(source: Path, tmp_path: Path) -> None:
    megaconv.convert(source, tmp_path / "out", saver="hf")
    load(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert megaconv.diff(tmp_path / "again", source).same


def test_a_published_file_says_the_same_with_the_keys_that_transformers_adds() -> None:
    table = family("dbrx")
    added = {
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "max_position_embeddings": 32768,
    }
    found = table.read_hf(INSTRUCT)
    assert not lost_fields(found, table.read_hf(INSTRUCT | added))
    assert (found.positions.theta, found.attention.clip, found.experts.renormalize) == (
        500000,
        8,
        True,
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_theta": 10000.0}, "rope_theta is 500000 in attn_config and 10000.0 outside"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 500000 in attn_config"),
        ({"num_key_value_heads": 4}, "attn_config has kv_n_heads 8, and num_key_value_heads is 4"),
        ({"attn_config": [8]}, r"attn_config should be an object, found \[8\]"),
        ({"attn_config": {"kv_n_heads": 7}}, "kv_n_heads 7 doesn't divide n_heads 48"),
        ({"attn_config": {"kv_n_heads": 0}}, "kv_n_heads should be a positive number, found 0"),
        ({"attn_config": {"clip_qkv": 0}}, "clip_qkv should be a positive number"),
        ({"n_heads": 49}, "n_heads 49 doesn't divide d_model 6144"),
        ({"ffn_config": "silu"}, "ffn_config should be an object, found 'silu'"),
        ({"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn .*'gelu'.*only"),
        ({"ffn_config": {"moe_normalize_expert_weights": 2}}, "moe_normalize_expert_weights 2"),
        ({"ffn_config": {"moe_top_k": "4"}}, "moe_top_k should be a positive number, found '4'"),
        ({"ffn_config": {"moe_num_experts": 4, "moe_top_k": 5}}, "moe_top_k|experts"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({"vocab_size": None}, "vocab_size should be a positive number, found None"),
    ],
)
def test_a_config_that_no_dbrx_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("dbrx").read_hf(INSTRUCT | keys)


def test_an_adapter_of_the_fused_projection_is_merged(source: Path, tmp_path: Path) -> None:
    module = "transformer.blocks.1.norm_attn_norm.attn.Wqkv"
    random = torch.Generator().manual_seed(1)
    before = load_file(source / "model.safetensors")
    weight = before[f"{module}.weight"]
    rows, columns = weight.shape
    a, b = torch.randn(2, columns, generator=random), torch.randn(rows, 2, generator=random)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["Wqkv"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    name = f"base_model.model.{module}.lora_"
    save_file({f"{name}A.weight": a, f"{name}B.weight": b}, adapter / "adapter_model.safetensors")
    done = run("merge", source, adapter, "--save-dir", tmp_path / "out")
    assert done.status == 0, done.err
    after = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(after[f"{module}.weight"], weight + 2 * (b @ a))
    same = [key for key in before if torch.equal(before[key], after[key])]
    assert set(before) - set(same) == {f"{module}.weight"}


def test_experts_that_share_a_transposed_tensor_are_not_quantized(
    source: Path, tmp_path: Path
) -> None:
    """No engine reads a scale for them."""
    with pytest.raises(CheckpointError, match=r"can't hold .*experts\.mlp\.w2"):
        megaconv.convert(source, tmp_path / "out", saver="hf", quantize="fp8-per-channel")


def test_mlx_refuses_a_model_without_limits(source: Path, tmp_path: Path) -> None:
    plain = with_config(source, tmp_path / "in", attn_config={"kv_n_heads": 4, "rope_theta": 5e3})
    with pytest.raises(CheckpointError, match=r"--saver mlx: .* always limits q, k and v"):
        megaconv.convert(plain, tmp_path / "out", saver="mlx")


def test_missing_keys_have_the_defaults_of_the_class() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.DbrxConfig()
    found = family("dbrx").read_hf({"model_type": "dbrx", "vocab_size": 32000})
    sizes = (found.hidden, found.layer_count, found.attention.heads, found.attention.kv_heads)
    assert sizes == (theirs.d_model, theirs.n_layers, theirs.n_heads, theirs.num_key_value_heads)
    experts = theirs.ffn_config
    assert (found.experts.count, found.experts.per_token, found.experts.ffn) == (
        experts.moe_num_experts,
        experts.moe_top_k,
        experts.ffn_hidden_size,
    )
