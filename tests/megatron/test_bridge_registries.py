"""Every name that we write for Transformer Engine's layers, and of models that see, as Megatron-Bridge's own registries know it.

It needs the environment of test_bridge_loads.py. What test_bridge_names.py has from its sources, here its code is asked.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import megaconv
from tests.bridge_process import NEEDS_BRIDGE, ask
from tests.families.test_language_models_inside import MODELS, create
from tests.megatron.test_oracles import References, references

__all__ = ["references"]

pytestmark = NEEDS_BRIDGE
LANGUAGE_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaBridge", {}),
    "qwen2, tied": ("Qwen2Bridge", {}),
    "qwen3": ("Qwen3Bridge", {}),
    "mistral": ("MistralBridge", {}),
    "qwen3_moe": ("Qwen3MoEBridge", {"moe_grouped_gemm": True}),
    "deepseek_v3, yarn": ("DeepSeekV3Bridge", {"moe_grouped_gemm": True}),
}
"""Variant -> (its bridge, how it is written)."""
WHOLES = {"qwen2_5_vl": "Qwen25VLBridge", "gemma3": "Gemma3VLBridge", "glm4v_moe": "GLM45VBridge"}


def named_in(directory: Path) -> set[str]:
    found: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {*tensors.keys()}
    return found


def written_in(directory: Path) -> list[str]:
    """Names of tensors in the rank files of one rank."""
    (file,) = directory.glob("release/mp_rank_00/model_optim_rng.pt")
    model = torch.load(file, weights_only=False)["model"]
    return [
        name
        for name, tensor in model.items()
        if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state")
    ]


@pytest.fixture(scope="module")
def answers(
    references: References, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """(the model's directory, Hugging Face's names by Megatron's) of every model."""
    folder = tmp_path_factory.mktemp("registries")
    models = {name: references(name).directory for name in LANGUAGE_MODELS}
    for name in WHOLES:
        create(MODELS[name], folder / f"{name} hf")
        models[name] = folder / f"{name} hf"
    jobs = []
    for name, bridge, how in (
        *((name, *both) for name, both in LANGUAGE_MODELS.items()),
        *((name, bridge, {"moe_grouped_gemm": "moe" in name}) for name, bridge in WHOLES.items()),
    ):
        megaconv.convert(models[name], folder / name, saver="core", **how)
        jobs.append({"bridge": bridge, "names": written_in(folder / name)})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    said, warnings = ask("tests.bridge_registries", folder / "jobs.json")
    assert len(said) == len(jobs), warnings[-4000:]
    return {
        name: (models[name], reply)
        for name, reply in zip([*LANGUAGE_MODELS, *WHOLES], said, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *WHOLES])
def test_megatron_bridge_knows_every_name_and_from_them_comes_to_every_tensor_of_the_model(
    name: str, answers: Any
) -> None:
    model, names = answers[name]
    # Megatron-Bridge assumes that Gemma's head is tied.
    optional = re.compile(r"(?:.*\.)?(?:output_layer|lm_head)\.weight")
    assert [
        word for word, found in names.items() if found is None and not optional.fullmatch(word)
    ] == []
    reached = {word for found in names.values() for word in found or ()}
    assert {word for word in named_in(model) if not optional.fullmatch(word)} <= reached
