"""LongCat-Flash: the three forms of its files, layers for further tokens, adapters, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import CheckpointError, NotExpressible
from megaconv.families import family
from megaconv.model.meaning import lost_fields
from tests.families.test_published_models import PUBLISHED
from tests.runs import run
from tests.transformers_oracle import CONVERTED, compute, create, load

CHAT: dict[str, Any] = PUBLISHED["meituan-longcat/LongCat-Flash-Chat"]["config"]
TOKENS = torch.randint(7, 100, (2, 24), generator=torch.Generator().manual_seed(3))
IDLE = tuple(f".experts.{expert}." for expert in (4, 5))
"""The experts of the model below that return their input."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("longcat") / "hf"
    create(CONVERTED["longcat_flash"], path)
    return path


def write(directory: Path, tensors: dict[str, torch.Tensor], source: Path, **keys: Any) -> Path:
    """Write tensors with the config.json of another directory, and other keys."""
    directory.mkdir()
    raw = json.loads((source / "config.json").read_text()) | keys
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def published_form(source: Path) -> dict[str, torch.Tensor]:
    """The tensors without those that nothing computes with."""
    found = load_file(source / "model.safetensors")
    return {name: each for name, each in found.items() if not any(idle in name for idle in IDLE)}


@pytest.mark.oracle
def test_published_and_packed_files_are_the_same_model(source: Path, tmp_path: Path) -> None:
    """What nothing computes with has no influence: transformers computes the same with zeros in its place."""
    published = write(tmp_path / "published", published_form(source), source)
    load(source).save_pretrained(tmp_path / "packed", save_original_format=False)
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    assert packed["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 48, 64)
    made = {
        path.name: megaconv.convert(path, tmp_path / f"{path.name} out", saver="hf", verify=True)
        for path in (published, tmp_path / "packed")
    }
    assert made["published"].fingerprint == made["packed"].fingerprint
    out = load_file(tmp_path / "packed out" / "model.safetensors")
    assert out.keys() == published_form(source).keys()
    idle = {
        f"model.layers.{layer}.mlp{expert}{part}_proj.weight": torch.zeros(24, 64)
        for layer in range(2)
        for expert in IDLE
        for part in ("gate", "up")
    }
    filled = write(tmp_path / "filled", out | idle, source)
    assert torch.equal(compute(load(filled), TOKENS), compute(load(source), TOKENS))


def test_layers_for_predicting_further_tokens_are_left_out(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"model.mtp.layers.0.eh_proj.weight": torch.ones(64, 128)}
    published = write(tmp_path / "in", published_form(source) | extra, source)
    megaconv.convert(published, tmp_path / "out", saver="hf")
    assert "layers for multi-token prediction" in caplog.text
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == published_form(source).keys()


def test_a_missing_expert_is_named(source: Path, tmp_path: Path) -> None:
    tensors = published_form(source)
    del tensors["model.layers.1.mlp.experts.3.gate_proj.weight"]
    damaged = write(tmp_path / "in", tensors, source)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.gate_proj"):
        megaconv.convert(damaged, tmp_path / "out", saver="hf")


def test_an_adapter_of_the_second_attention_is_merged(source: Path, tmp_path: Path) -> None:
    module = "model.layers.1.self_attn.1.kv_b_proj"
    random = torch.Generator().manual_seed(1)
    before = load_file(source / "model.safetensors")
    outputs, inputs = before[f"{module}.weight"].shape
    a, b = torch.randn(2, inputs, generator=random), torch.randn(outputs, 2, generator=random)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["kv_b_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    name = f"base_model.model.{module}.lora_"
    save_file({f"{name}A.weight": a, f"{name}B.weight": b}, adapter / "adapter_model.safetensors")
    done = run("merge", source, adapter, "--save-dir", tmp_path / "out")
    assert done.status == 0, done.err
    after = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(after[f"{module}.weight"], before[f"{module}.weight"] + 2 * (b @ a))
    assert {key for key in before if not torch.equal(before[key], after[key])} == {
        f"{module}.weight"
    }


@pytest.fixture
def published(source: Path, tmp_path: Path) -> Path:
    return write(tmp_path / "published", published_form(source), source)


STACKED = [("deepspeed", {}, "experts=separate"), ("dcp", {"names": "transformers-stacked"}, "names=transformers")]  # fmt: skip


@pytest.mark.oracle
def test_a_module_of_transformers_loads_all_experts_with_rows_of_zeros_behind_them(
    source: Path, published: Path, tmp_path: Path
) -> None:
    megaconv.convert(published, tmp_path / "ds", saver="deepspeed", verify=True)
    file = tmp_path / "ds" / "global_step0" / "mp_rank_00_model_states.pt"
    held = torch.load(file, weights_only=True)["module"]
    model = load(source)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert model.load_state_dict(held, strict=False).unexpected_keys == []
    for name, tensor in held.items():
        filled = len(tensor) if not name.endswith("gate_up_proj") else model.config.n_routed_experts
        assert torch.equal(tensor[:filled], whole[name][:filled])
        assert not tensor[filled:].any()


@pytest.mark.parametrize(("saver", "options", "remedy"), STACKED)
def test_a_tensor_of_all_experts_holds_the_published_model_and_no_stored_idle_experts(
    saver: str, options: dict[str, str], remedy: str, source: Path, published: Path, tmp_path: Path
) -> None:
    megaconv.convert(published, tmp_path / "out", saver=saver, options=options, verify=True)
    with pytest.raises(NotExpressible, match=f"experts that compute nothing.*{remedy} keeps them"):
        megaconv.convert(source, tmp_path / "other", saver=saver, options=options)
    assert not (tmp_path / "other").exists()


def test_keys_that_transformers_adds_say_the_same() -> None:
    added = {
        "num_hidden_layers": 56,
        "head_dim": 64,
        "qk_head_dim": 192,
        "num_key_value_heads": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
    }
    table = family("longcat_flash")
    found = table.read_hf(CHAT)
    assert not lost_fields(found, table.read_hf(CHAT | added))
    assert (found.layer_count, found.layers_with("moe")) == (56, tuple(range(0, 56, 2)))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_hidden_layers": 28}, "num_layers is 28 and num_hidden_layers 28; expected 56"),
        ({"num_layers": 0}, "num_layers should be a positive number, found 0"),
        ({"head_dim": 128}, "head_dim is 128, but .* make it 64"),
        ({"qk_head_dim": 128}, "qk_head_dim is 128, but .* make it 192"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8, and num_attention_heads 64"),
        ({"q_lora_rank": None}, "q_lora_rank should be a positive number, found None"),
        ({"zero_expert_type": "drop"}, "zero_expert_type 'drop' is not supported"),
        ({"zero_expert_num": -1}, "zero_expert_num"),
        ({"router_bias": True}, "router_bias True is not supported"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora False is not supported"),
        ({"moe_topk": 769}, "769 of 512 experts"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor 0.* expected a positive number"),
        ({"num_experts_per_tok": 8}, "moe_topk is 12 and num_experts_per_tok 8"),
        ({"num_attention_heads": None}, "num_attention_heads should be a positive number"),
    ],
)
def test_a_config_that_no_longcat_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family("longcat_flash").read_hf(CHAT | keys)


def test_mlx_takes_the_published_form_alone(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--saver mlx: .* which mlx-lm refuses"):
        megaconv.convert(source, tmp_path / "out", saver="mlx")
    published = write(tmp_path / "in", published_form(source), source)
    megaconv.convert(published, tmp_path / "out", saver="mlx", verify=True)
