"""JetMoE: transformers' own save, adapters of keys and values, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from megaconv.model.meaning import lost_fields
from tests.families.test_published_models import PUBLISHED
from tests.runs import run
from tests.transformers_oracle import CONVERTED, create, load
from tests.whole_models import elements_by_table

JETMOE: dict[str, Any] = PUBLISHED["jetmoe/jetmoe-8b"]["config"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("jetmoe") / "hf"
    create(CONVERTED["jetmoe"], path)
    return path


@pytest.mark.oracle
def test_what_transformers_saves_again_is_the_same_model(source: Path, tmp_path: Path) -> None:
    megaconv.convert(source, tmp_path / "dcp", saver="dcp")
    megaconv.convert(tmp_path / "dcp", tmp_path / "out", saver="hf")
    load(tmp_path / "out").save_pretrained(tmp_path / "again", save_original_format=False)
    assert megaconv.diff(tmp_path / "again", source).same


def test_an_adapter_of_keys_and_values_is_merged(source: Path, tmp_path: Path) -> None:
    module = "model.layers.1.self_attention.kv_proj"
    random = torch.Generator().manual_seed(1)
    before = load_file(source / "model.safetensors")
    outputs, inputs = before[f"{module}.weight"].shape
    a, b = torch.randn(2, inputs, generator=random), torch.randn(outputs, 2, generator=random)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["kv_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    name = f"base_model.model.{module}.lora_"
    save_file({f"{name}A.weight": a, f"{name}B.weight": b}, adapter / "adapter_model.safetensors")
    done = run("merge", source, adapter, "--save-dir", tmp_path / "out")
    assert done.status == 0, done.err
    after = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(after[f"{module}.weight"], before[f"{module}.weight"] + 2 * (b @ a))


def test_a_file_of_the_other_number_of_experts_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    raw = json.loads((source / "config.json").read_text()) | {"num_local_experts": 5}
    (tmp_path / "in" / "config.json").write_text(json.dumps(raw))
    (tmp_path / "in" / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.(in|out)put_linear|router"):
        megaconv.convert(tmp_path / "in", tmp_path / "out", saver="hf")


def test_the_published_model_has_as_many_elements_as_its_index_says() -> None:
    total_size = 17044475904  # model.safetensors.index.json of jetmoe/jetmoe-8b, in bf16
    assert elements_by_table("jetmoe", JETMOE) == total_size // 2


def test_keys_that_transformers_adds_say_the_same() -> None:
    added = {
        "num_attention_heads": 32,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    table = family("jetmoe")
    found = table.read_hf(JETMOE)
    assert not lost_fields(found, table.read_hf(JETMOE | added))
    assert (found.norm.epsilon, found.norm.final_epsilon, found.attention.heads) == (1e-6, 1e-5, 32)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"moe_top_k": 4},
            "moe_top_k is 4, but transformers' class computes with num_experts_per_tok 2",
        ),
        ({"n_positions": 8192}, "n_positions is 8192, .* max_position_embeddings 4096"),
        (
            {
                "num_experts_per_tok": 4,
                "moe_top_k": 4,
                "num_attention_heads": 64,
                "moe_num_experts": 16,
            },
            "moe_num_experts is 16",
        ),
        ({"glu": False}, "glu False is not supported"),
        ({"num_attention_heads": 16}, "num_attention_heads is 16, but 16 .* make 32"),
        ({"head_dim": 64}, "kv_channels is 128 and head_dim 64, two names for one thing"),
        ({"kv_channels": 0}, "kv_channels should be a positive number, found 0"),
        ({"num_experts_per_tok": 9, "moe_top_k": 9, "num_attention_heads": 144}, "9 of 8 experts"),
        ({"activation_function": "gelu"}, "activation_function 'gelu' is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps should be a number, found 'small'"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps.* should be 0 or more"),
        ({"hidden_size": None}, "hidden_size should be a positive number, found None"),
    ],
)
def test_a_config_that_no_jetmoe_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("jetmoe").read_hf(JETMOE | keys)
