"""Layer files of Megatron-DeepSpeed's pipelines, made by hand of legacy Megatron's own rank files: none by the software was at hand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from formats import torch_zip
from formats.tensor import read_tensor
from megaconv.megatron.states.legacy_names import MODEL, flatten
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

FIRST_LAYER = 3


def write_layer_files(fixture: str, step: Path) -> Path:
    """A pipeline's modules of each tensor rank, behind the numbers that Megatron-DeepSpeed gives them."""
    step.mkdir(parents=True)
    for rank in (0, 1):
        modules: dict[int, dict[str, torch.Tensor]] = {}
        layers = 0
        for stage in (0, 1):
            (file,) = (FIXTURES / fixture).rglob(
                f"mp_rank_{rank:02d}_{stage:03d}/model_optim_rng.pt"
            )
            state: Any = torch_zip.read(file)
            names = dict(flatten(state["model"]))
            for name, value in names.items():
                found = re.fullmatch(rf"{MODEL}\.encoder\.layers\.(\d+)\.(.*)", name)
                if name.endswith("_extra_state") or name.startswith("word_embeddings_for_head"):
                    continue
                if found:
                    place, bare = (
                        FIRST_LAYER + layers + int(found[1]),
                        found[2].replace("_norm.", "_layernorm."),
                    )
                elif name.startswith(f"{MODEL}.embedding."):
                    place, bare = 1, name.removeprefix(f"{MODEL}.embedding.")
                elif ".final_norm." in name:
                    place, bare = 90, name.rpartition(".")[2]
                else:
                    place, bare = 91, "lm_head.weight"
                tensor = (
                    torch.from_numpy(read_tensor(value))
                    .view(getattr(torch, value.dtype))
                    .reshape(value.shape)
                )
                modules.setdefault(place, {})[bare] = tensor.clone()
            layers += 1 + max(
                (int(m[1]) for name in names if (m := re.search(r"layers\.(\d+)", name))),
                default=-1,
            )
        for place, tensors in modules.items():
            torch.save(tensors, step / f"layer_{place:02d}-model_{rank:02d}-model_states.pt")
    torch.save({"iteration": 5, "checkpoint_version": 3.0}, step / "mp_rank_00_model_states.pt")
    return step


@pytest.mark.parametrize("fixture", ["legacy-llama-tp2pp2", "legacy-gpt2-tp2pp2"])
def test_the_model_is_the_one_whose_files_they_were_made_of(fixture: str, tmp_path: Path) -> None:
    step = write_layer_files(fixture, tmp_path / "in" / "global_step5")
    (tmp_path / "in" / "latest").write_text("global_step5")
    original = FIXTURES / fixture / "checkpoint"
    megaconv.convert(original, tmp_path / "hf", saver="hf")
    for path in (step, tmp_path / "in"):
        found = megaconv.fingerprint(path, config=tmp_path / "hf")
        assert found.weights == megaconv.fingerprint(original).weights
    outcome = run("inspect", step, "--config", tmp_path / "hf")
    assert "layer files of a Megatron-DeepSpeed pipeline" in outcome.out
    assert_refused(run("fingerprint", step), 2, "give --config")


def test_a_module_or_a_layer_that_is_missing_is_named(tmp_path: Path) -> None:
    step = write_layer_files("legacy-llama-tp2pp2", tmp_path / "in")
    megaconv.convert(FIXTURES / "legacy-llama-tp2pp2/checkpoint", tmp_path / "hf", saver="hf")
    inspect = ("fingerprint", step, "--config", tmp_path / "hf")
    (step / "layer_04-model_01-model_states.pt").unlink()
    assert_refused(
        run(*inspect), 3, "tensor rank 1 has none of layer_04-model_00-model_states.pt's module"
    )
    (step / "layer_04-model_00-model_states.pt").unlink()
    assert_refused(
        run(*inspect), 3, "the file of the layer after layer_03-model_00-model_states.pt is missing"
    )


def test_modules_of_other_software_are_refused_by_their_names(tmp_path: Path) -> None:
    step = write_layer_files("legacy-llama-tp2pp2", tmp_path / "in")
    megaconv.convert(FIXTURES / "legacy-llama-tp2pp2/checkpoint", tmp_path / "hf", saver="hf")
    torch.save({"norm.scale": torch.ones(32)}, step / "layer_90-model_00-model_states.pt")
    assert_refused(
        run("fingerprint", step, "--config", tmp_path / "hf"),
        3,
        "layer_90-model_00",
        "norm.scale",
        "GPT-NeoX",
    )
