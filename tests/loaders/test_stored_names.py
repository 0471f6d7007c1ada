"""Names of tensors that torch's wrappers, bare models and tied weights leave in files: the weights are the model's own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModel, AutoModelForCausalLM

import megaconv
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

MODEL = FIXTURES / "peft-llama-all-linear/base"
TIED = FIXTURES / "peft-llama-patterns-rslora-tied/base"
TOKENS = torch.arange(3, 23)[None]


def with_tensors(directory: Path, tensors: dict[str, torch.Tensor], model: Path = MODEL) -> Path:
    """A Hugging Face directory with these tensors, and the config.json of a model."""
    directory.mkdir()
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(
        {name: each.clone() for name, each in tensors.items()}, directory / "model.safetensors"
    )
    return directory


def logits(model: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(model).eval()(TOKENS).logits
    return found


@pytest.mark.parametrize("wraps", ["compiled", "parallel", "both"])
def test_the_prefixes_of_compiled_and_parallel_modules_are_no_part_of_a_name(
    wraps: str, tmp_path: Path
) -> None:
    module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(MODEL)
    if wraps != "parallel":
        module = torch.compile(module)  # type: ignore[assignment]
    if wraps != "compiled":
        module = torch.nn.DataParallel(module)
    source = with_tensors(tmp_path / "wrapped", module.state_dict())
    report = megaconv.convert(source, tmp_path / "core", saver="core", tp=2)
    assert report.fingerprint == megaconv.fingerprint(MODEL)


@pytest.mark.parametrize(
    "wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"]
)
def test_wrappers_of_single_layers_are_no_part_of_a_name(wrapper: str, tmp_path: Path) -> None:
    tensors = {
        name.replace(".self_attn.", f".{wrapper}.self_attn."): tensor
        for name, tensor in load_file(MODEL / "model.safetensors").items()
    }
    source = with_tensors(tmp_path / "wrapped", tensors)
    assert megaconv.fingerprint(source) == megaconv.fingerprint(MODEL)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = load_file(MODEL / "model.safetensors")
    tensors["_orig_mod.model.norm.weight"] = tensors["model.norm.weight"]
    source = with_tensors(tmp_path / "both", tensors)
    outcome = run("convert", source, tmp_path / "out", "--saver", "core")
    assert_refused(outcome, 3, "two names of one tensor", "_orig_mod.model.norm.weight")


def test_a_bare_model_becomes_a_causal_one_whose_head_is_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = AutoModel.from_pretrained(MODEL)
    source = with_tensors(tmp_path / "bare", bare.state_dict())
    megaconv.convert(source, tmp_path / "core", saver="core", tp=2)
    assert "holds a model without a head" in caplog.text
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    back = AutoModel.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(back(TOKENS).last_hidden_state, bare(TOKENS).last_hidden_state)
    head = AutoModelForCausalLM.from_pretrained(tmp_path / "back").lm_head.weight
    assert torch.equal(head, bare.embed_tokens.weight)


def test_a_tied_model_may_be_stored_with_its_head_alone(tmp_path: Path) -> None:
    source = with_tensors(tmp_path / "tied", {}, TIED)
    save_model(AutoModelForCausalLM.from_pretrained(TIED), str(source / "model.safetensors"))
    assert "model.embed_tokens.weight" not in load_file(source / "model.safetensors")
    megaconv.convert(source, tmp_path / "core", saver="core", tp=2)
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf")
    assert torch.equal(logits(tmp_path / "back"), logits(source))
    assert torch.equal(logits(source), logits(TIED))
