"""Adapters that mlx-lm trained: merged as `mlx_lm.fuse` merges them, and translated for peft.

tests/fixtures/mlx/adapter-<kind> is an adapter as mlx-lm 0.32.2 saves it, with random values, of the model `llama` of
`mlx_oracle.py`. fused.safetensors has the weights that mlx-lm's `fuse` made of it, in float32.
"""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from tests.conftest import FIXTURES
from tests.mlx_oracle import cases, write_source
from tests.runs import assert_refused, run

KINDS = ("lora", "dora")
Q_PROJ = "model.layers.3.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("models") / "base", cases()["llama"]["config"])


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return copytree(FIXTURES / "mlx" / "adapter-lora", tmp_path / "adapter")


def edit(adapter: Path, **changes: Any) -> None:
    """Change keys of adapter_config.json, or of lora_parameters if they are there."""
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        place = config["lora_parameters"] if key in config["lora_parameters"] else config
        place[key] = value
    path.write_text(json.dumps(config))


def rewrite(adapter: Path, **changes: "torch.Tensor | None") -> None:
    path = adapter / "adapters.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def _merged(base: Path, adapter: Path, target: Path) -> Path:
    """A directory of the base in float32, with an adapter merged into it."""
    megaconv.convert(base, target, saver="hf", dtype="fp32", adapters=[adapter])
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_of_mlx(kind: str, base: Path, tmp_path: Path) -> None:
    source = FIXTURES / "mlx" / f"adapter-{kind}"
    target = _merged(base, source, tmp_path / "merged")
    merged, before = (load_file(path / "model.safetensors") for path in (target, base))
    fused = load_file(source / "fused.safetensors")
    for name, tensor in merged.items():
        expected = fused.get(name, before[name].float())
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6 if name in fused else 0)
        assert name not in fused or (tensor - before[name].float()).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_peft_gets_the_same_function(kind: str, base: Path, tmp_path: Path) -> None:
    source = FIXTURES / "mlx" / f"adapter-{kind}"
    megaconv.convert(source, tmp_path / "peft", loader="peft", saver="peft", config=base)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 10, kind == "dora")
    merged = [
        load_file(_merged(base, adapter, tmp_path / name) / "model.safetensors")
        for name, adapter in (("a", source), ("b", tmp_path / "peft"))
    ]
    torch.testing.assert_close(merged[0], merged[1], rtol=0, atol=0)


def test_an_adapter_of_a_quantized_base_is_merged_into_its_values(
    base: Path, tmp_path: Path
) -> None:
    """`mlx_lm.lora` usually trains on a base in 4 bits."""
    options = {"bits": "4", "group_size": "32"}
    megaconv.convert(base, tmp_path / "mlx", saver="mlx", options=options)
    megaconv.convert(tmp_path / "mlx", tmp_path / "plain", saver="hf")
    adapter = FIXTURES / "mlx" / "adapter-lora"
    expected = megaconv.convert(tmp_path / "plain", tmp_path / "a", saver="hf", adapters=[adapter])
    found = megaconv.convert(tmp_path / "mlx", tmp_path / "b", saver="hf", adapters=[adapter])
    assert found.fingerprint == expected.fingerprint


def test_the_language_model_of_a_multimodal_model_has_its_own_names(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    expected = megaconv.convert(base, tmp_path / "a", saver="hf", adapters=[adapter])
    tensors = load_file(adapter / "adapters.safetensors")
    inside = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(inside, adapter / "adapters.safetensors")
    found = megaconv.convert(base, tmp_path / "b", saver="hf", adapters=[adapter])
    assert found.fingerprint == expected.fingerprint


def test_a_tied_head_gets_the_change_of_the_embedding(tmp_path: Path) -> None:
    """As in mlx-lm: LoRAEmbedding.as_linear is the head of a tied model."""
    config = cases()["llama, tied"]["config"]
    base = write_source(tmp_path / "base", config)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"rank": 2, "scale": 2.0, "dropout": 0.0}
    (adapter / "adapter_config.json").write_text(json.dumps({"lora_parameters": settings}))
    a, b = torch.ones(config["vocab_size"], 2), torch.ones(2, config["hidden_size"])
    matrices = {"model.embed_tokens.lora_a": a, "model.embed_tokens.lora_b": b}
    save_file(matrices, adapter / "adapters.safetensors")
    merged = load_file(_merged(base, adapter, tmp_path / "merged") / "model.safetensors")
    before = load_file(base / "model.safetensors")
    expected = before["model.embed_tokens.weight"].float() + 2 * a @ b
    torch.testing.assert_close(merged["model.embed_tokens.weight"], expected, rtol=0, atol=1e-6)
    assert "lm_head.weight" not in merged
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type 'full'; only lora and dora are adapters"),
        ({"rank": 0}, "lora_parameters.rank should be a positive number, found 0"),
        ({"rank": 10**400}, "lora_parameters.rank should be a positive number, found 1000"),
        ({"rank": True}, "lora_parameters.rank should be a positive number, found True"),
        ({"scale": "2"}, "lora_parameters.scale should be a positive number, found '2'"),
        ({"dropout": 2}, "lora_parameters.dropout should be a number from 0 to 1, found 2"),
        ({"lora_parameters": None}, "lora_parameters should be an object, found None"),
        ({"rank": 8}, "has matrices of rank 4 and 4; its configuration says 8"),
        ({"fine_tune_type": "dora"}, "magnitude"),
    ],
)
def test_wrong_settings_are_refused(
    changes: dict[str, Any], words: str, adapter: Path, base: Path, tmp_path: Path
) -> None:
    edit(adapter, **changes)
    refused = run("convert", base, tmp_path / "out", "--saver", "hf", "--adapter", adapter)
    assert_refused(refused, 3, words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{Q_PROJ}.lora_b": None}, "has only one of its two matrices"),
        ({f"{Q_PROJ}.lora_a": torch.zeros(4)}, "is [4], expected 2 dimensions"),
        ({f"{Q_PROJ}.lora_a": torch.zeros(2, 64, 4)}, "adapts all experts of a layer at once"),
        ({f"{Q_PROJ}.lora_a": torch.zeros(64, 4, dtype=torch.int32)}, "has a tensor of int32; expected"),
        ({f"language_model.{Q_PROJ}.lora_a": torch.zeros(64, 4),
          f"language_model.{Q_PROJ}.lora_b": torch.zeros(4, 64)}, f"of {Q_PROJ} with language_model. before its name, and without"),
        ({f"{Q_PROJ}.weight": torch.zeros(4)}, "is a kind of adapter tensor that is not supported"),
        ({"model.layers.9.mlp.up_proj.lora_a": torch.zeros(64, 4),
          "model.layers.9.mlp.up_proj.lora_b": torch.zeros(4, 88)}, "model.layers.9.mlp.up_proj"),
    ],
)  # fmt: skip
def test_tensors_of_another_kind_are_refused(
    changes: dict[str, Any], words: str, adapter: Path, base: Path, tmp_path: Path
) -> None:
    rewrite(adapter, **changes)
    refused = run("convert", base, tmp_path / "out", "--saver", "hf", "--adapter", adapter)
    assert_refused(refused, 3, words)


def test_an_adapter_without_tensors_is_refused(adapter: Path, base: Path, tmp_path: Path) -> None:
    save_file({}, adapter / "adapters.safetensors")
    refused = run("convert", base, tmp_path / "out", "--saver", "hf", "--adapter", adapter)
    assert_refused(refused, 3, "adapters.safetensors: holds no tensors; copy the adapter again")


def test_missing_weights_are_named(adapter: Path, base: Path, tmp_path: Path) -> None:
    (adapter / "adapters.safetensors").unlink()
    refused = run("convert", base, tmp_path / "out", "--saver", "hf", "--adapter", adapter)
    assert_refused(refused, 3, "has the adapter_config.json of mlx-lm, and no adapters.safetensors")
