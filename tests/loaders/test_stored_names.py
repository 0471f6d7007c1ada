"""Names of tensors that torch's wrappers, bare models and tied weights leave in files: the weights are the model's own."""

import json
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


def of_trl(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As TRL's AutoModelForCausalLMWithValueHead has them under DeepSpeed."""
    head = {"v_head.summary.weight": torch.zeros(1, 32), "v_head.summary.bias": torch.zeros(1)}
    return {f"pretrained_model.{name}": tensor for name, tensor in tensors.items()} | head


@pytest.mark.parametrize("wrapper", ["", "module."], ids=["plain", "parallel"])
def test_a_value_head_is_left_out_and_named(
    wrapper: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = of_trl(load_file(MODEL / "model.safetensors"))
    wrapped = {f"{wrapper}{name}": tensor for name, tensor in tensors.items()}
    source = with_tensors(tmp_path / "trl", wrapped)
    assert megaconv.fingerprint(source) == megaconv.fingerprint(MODEL)
    assert f"a value head is not converted: {wrapper}v_head.summary.bias, " in caplog.text


@pytest.mark.parametrize("key", ["state_dict", "module", "model"])
@pytest.mark.parametrize("prefix", ["", "model."], ids=["plain", "of Lightning"])
def test_weights_inside_of_a_training_state_are_found(
    key: str, prefix: str, tmp_path: Path
) -> None:
    source = with_tensors(tmp_path / "state", {})
    (source / "model.safetensors").unlink()
    tensors = load_file(MODEL / "model.safetensors")
    state = {key: {prefix + name: each for name, each in tensors.items()}, "epoch": 3}
    torch.save(state, source / "pytorch_model.bin")
    assert megaconv.fingerprint(source) == megaconv.fingerprint(MODEL)


def test_a_training_state_with_two_sets_of_weights_is_refused(tmp_path: Path) -> None:
    source = with_tensors(tmp_path / "state", {})
    (source / "model.safetensors").unlink()
    tensors = load_file(MODEL / "model.safetensors")
    torch.save({"module": tensors, "model": tensors}, source / "pytorch_model.bin")
    assert_refused(run("fingerprint", source), 3, "'module' is not a tensor; expected a dictionary")


def test_accelerates_full_state_of_fsdp_is_read(tmp_path: Path) -> None:
    source = with_tensors(tmp_path / "fsdp", {})
    (source / "model.safetensors").unlink()
    torch.save(load_file(MODEL / "model.safetensors"), source / "pytorch_model_fsdp.bin")
    assert megaconv.fingerprint(source) == megaconv.fingerprint(MODEL)


def shards(directory: Path, stem: str, count: int) -> list[Path]:
    """A model in several files without an index, as torchtune writes it."""
    source = with_tensors(directory, {})
    (source / "model.safetensors").unlink()
    tensors = list(load_file(MODEL / "model.safetensors").items())
    files = [source / f"{stem}-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
    for at, file in enumerate(files):
        save_file(dict(tensors[at::count]), file)
    return files


def test_complete_shards_need_no_index(tmp_path: Path) -> None:
    shards(tmp_path / "tune", "ft-model", 3)
    assert megaconv.fingerprint(tmp_path / "tune") == megaconv.fingerprint(MODEL)


def test_shards_of_which_one_is_missing_or_repeated_are_refused(tmp_path: Path) -> None:
    shards(tmp_path / "missing", "model", 3)[1].unlink()
    outcome = run("convert", tmp_path / "missing", tmp_path / "out", "--saver", "hf")
    assert_refused(outcome, 3, "model.safetensors.index.json is missing")
    first, _, last = shards(tmp_path / "twice", "model", 3)
    last.write_bytes(first.read_bytes())
    outcome = run("convert", tmp_path / "twice", tmp_path / "out", "--saver", "hf")
    assert_refused(outcome, 3, "which another shard holds too")


def test_two_files_for_one_shard_are_refused(tmp_path: Path) -> None:
    (only,) = shards(tmp_path / "twice", "model", 1)
    (only.parent / "model-1-of-1.safetensors").write_bytes(only.read_bytes())
    outcome = run("convert", tmp_path / "twice", tmp_path / "out", "--saver", "hf")
    assert_refused(outcome, 3, "model.safetensors.index.json is missing")


def test_a_tied_head_with_values_of_its_own_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tensors = load_file(TIED / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    source = with_tensors(tmp_path / "apart", tensors, TIED)
    outcome = run("convert", source, tmp_path / "out", "--saver", "hf")
    assert_refused(outcome, 3, "set tie_word_embeddings to false in config.json")
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    megaconv.convert(source, tmp_path / "out", saver="hf")
    assert torch.equal(logits(tmp_path / "out"), logits(source))


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
