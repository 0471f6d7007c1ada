"""Adapters with equal matrices, such as those of zeros for layers without an adapter: one adapter in all formats."""

import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file

import megaconv
from tests.adapters.test_adapters import LINEAR, assert_same_bits, edited
from tests.engine.journeys import ordinary
from tests.engine.test_chains import write_model
from tests.families.test_own_names import write_adapter

Tensors = dict[str, torch.Tensor]


def require_one_adapter(adapter: Path, base: Path, folder: Path) -> Path:
    """Translate it for Megatron-Bridge, back, and again. Each output is what was written, and the same adapter."""
    first, back, second = folder / "bridge", folder / "back", folder / "again"
    megaconv.convert(
        adapter, first, loader="peft", config=base, saver="core", ckpt_format="torch_dist"
    )
    megaconv.convert(first, back, config=base, saver="peft")
    megaconv.convert(
        back, second, loader="peft", config=base, saver="core", ckpt_format="torch_dist"
    )
    expected = megaconv.fingerprint(first, config=base)
    assert megaconv.fingerprint(back, loader="peft", config=base) == expected
    assert megaconv.fingerprint(second, config=base) == expected
    assert megaconv.verify(back, loader="peft", config=base).same
    assert megaconv.verify(second, config=base).same
    return back


def test_layers_without_an_adapter_are_known_again(tmp_path: Path) -> None:
    def of_first_layer(tensors: Tensors) -> Tensors:
        return {name: each for name, each in tensors.items() if ".layers.0." in name}

    layers = [path for path in _paths() if ".layers.0." in path]
    config = {"target_modules": layers}
    adapter = edited(LINEAR / "adapter", tmp_path / "adapter", config, of_first_layer)
    require_one_adapter(adapter, LINEAR / "base", tmp_path)


def _paths() -> set[str]:
    names = load_file(LINEAR / "adapter/adapter_model.safetensors")
    return {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}


def test_a_fused_module_comes_back_beside_separate_ones(tmp_path: Path) -> None:
    """GLM-4's files fuse gate and up, so that they have one A. Bridge's CanonicalLoRA has one for each."""
    base = write_model("glm4", tmp_path / "base", Random(1), {"num_hidden_layers": 1}, ordinary)
    held = load_file(base / "model.safetensors")
    words = ("mlp.gate_up_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    modules = [f"model.layers.0.{word}" for word in words]
    adapter = tmp_path / "adapter"
    write_adapter(adapter, {module: held[f"{module}.weight"] for module in modules})
    back = require_one_adapter(adapter, base, tmp_path)
    assert json.loads((back / "adapter_config.json").read_text())["r"] == 4
    assert_same_bits(
        load_file(back / "adapter_model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
