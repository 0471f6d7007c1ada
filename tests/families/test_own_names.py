"""Models that no family describes: their tensors keep their names, in every format that can hold such names."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.adapters.file_paths import FilePaths
from megaconv.errors import UnknownFamily, UnsupportedInput
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER = SIZES | {"intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    # tensors without an axis, and with four
    "clip": {
        "text_config": TOWER | {"vocab_size": 64},
        "vision_config": TOWER | {"image_size": 32, "patch_size": 16},
    },
    # tensors of integers
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    # an encoder and a decoder, tensors with three axes
    "whisper": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 100,
        "max_source_positions": 20,
        "max_target_positions": 20,
        "pad_token_id": 0,
    },
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of transformers."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(3)
    config = AutoConfig.for_model(request.param, **MODELS[request.param])
    path = tmp_path_factory.mktemp(request.param) / "model"
    AutoModel.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return write_llama(tmp_path_factory.mktemp("models") / "hf")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(ours[name], tensor), name


def unlisted(source: Path, target: Path) -> Path:
    """A copy whose architecture no family has."""
    shutil.copytree(source, target)
    for file in target.rglob("config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["Nova"]}))
    return target


@pytest.mark.oracle
def test_transformers_loads_the_same_model_from_other_files(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    out = tmp_path / "out"
    outcome = run(
        *("convert", "--load-dir", model, "--saver", "hf", "--save-dir", out),
        *("--max-shard-size", "5KB", "--verify"),
    )
    assert outcome.status == 0, outcome.err
    assert "tensors keep their names and shapes" in outcome.err
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert_equal(weights(out), weights(model))
    ours, theirs = (AutoModel.from_pretrained(path).state_dict() for path in (out, model))
    assert_equal(ours, theirs)
    assert run("verify", out).status == 0
    assert run("diff", model, out).out == f"the same: {len(weights(model))} tensors are equal\n"
    shas = {run("fingerprint", path).out for path in (model, out)}
    assert len(shas) == 1


def test_torch_loads_a_distributed_checkpoint_of_it_which_is_read_back(
    model: Path, tmp_path: Path
) -> None:
    megaconv.convert(model, tmp_path / "dcp", saver="dcp", verify=True)
    expected = weights(model)
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert_equal(found, expected)
    megaconv.convert(tmp_path / "dcp", tmp_path / "back", saver="hf")
    assert_equal(weights(tmp_path / "back"), expected)


def test_a_cast_changes_floating_point_tensors_alone(model: Path, tmp_path: Path) -> None:
    megaconv.convert(model, tmp_path / "out", saver="hf", dtype="bf16")
    found = weights(tmp_path / "out")
    for name, tensor in weights(model).items():
        cast = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert found[name].dtype == cast.dtype, name
        assert torch.equal(found[name], cast), name
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert (raw.get("dtype") or raw["torch_dtype"]) == "bfloat16"


def test_weights_of_a_quantization_that_is_not_read_are_copied(hf: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    raw = json.loads((source / "config.json").read_text())
    quantized = raw | {"quantization_config": {"quant_method": "hqq", "bits": 4}}
    (source / "config.json").write_text(json.dumps(quantized))
    packed = weights(hf) | {
        "model.layers.0.mlp.up_proj.qweight": torch.arange(6, dtype=torch.int32)
    }
    save_file(packed, source / "model.safetensors")
    megaconv.convert(source, tmp_path / "out", saver="hf", verify=True)
    assert_equal(weights(tmp_path / "out"), packed)
    assert json.loads((tmp_path / "out/config.json").read_text()) == quantized
    for words in (("hf", "--dtype", "fp32"), ("core",)):
        outcome = run("convert", source, tmp_path / "other", "--saver", *words)
        assert_refused(outcome, 3, "quantized (hqq)")


def as_hqq(hf: Path, directory: Path, words: list[int]) -> Path:
    """A copy of a model that says that its weights are quantized by a method that isn't read."""
    shutil.copytree(hf, directory)
    raw = json.loads((directory / "config.json").read_text())
    settings = {"quantization_config": {"quant_method": "hqq", "bits": 4}}
    (directory / "config.json").write_text(json.dumps(raw | settings))
    stored = {"model.layers.1.mlp.up_proj.W_q": torch.tensor(words, dtype=torch.uint8)}
    save_file(weights(hf) | stored, directory / "model.safetensors")
    return directory


def test_a_fingerprint_of_stored_words_and_their_comparison_say_so(
    hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = as_hqq(hf, tmp_path / "a", [1, 2]), as_hqq(hf, tmp_path / "b", [1, 3])
    assert run("fingerprint", a).status == 0
    assert "the fingerprint is of the stored words, not of weights: " in caplog.text
    assert "the weights are quantized (hqq)" in caplog.text
    caplog.clear()
    assert run("diff", a, b).status == 4
    assert "the stored words are compared, not weights: " in caplog.text
    caplog.clear()
    assert run("diff", hf, hf).status == 0
    assert run("fingerprint", hf).status == 0
    assert not caplog.text


def test_words_are_not_compared_with_weights_and_numbers_in_words_not_with_a_tolerance(
    hf: Path, tmp_path: Path
) -> None:
    words = as_hqq(hf, tmp_path / "words", [1, 2])
    assert_refused(run("diff", hf, words), 3, "B keeps its own tensor names", "quantized (hqq)")
    assert_refused(run("diff", words, hf, "--metadata"), 3, "A keeps its own tensor names")
    for option in (("--tolerance", "1"), ("--stats",), ("--html", tmp_path / "page.html")):
        outcome = run("diff", words, words, *option)
        assert_refused(outcome, 3, f"{option[0]}: compares the numbers of weights", "(hqq)")
    assert not (tmp_path / "page.html").exists()


def test_a_multimodal_model_becomes_a_distributed_checkpoint(tmp_path: Path) -> None:
    source = FIXTURES / "whole-qwen2_5_vl"
    megaconv.convert(source, tmp_path / "dcp", saver="dcp")
    megaconv.convert(tmp_path / "dcp", tmp_path / "back", saver="hf")
    assert_equal(weights(tmp_path / "back"), weights(source))
    assert_is_known_again(tmp_path / "back", source)


def assert_is_known_again(output: Path, same: Path) -> None:
    """A multimodal model that was written by its own names is read by its family, and a damaged one is noticed."""
    assert run("verify", output).status == 0
    assert run("diff", output, same).status == 0
    core = output.parent / f"{output.name}-core"
    assert run("convert", output, core, "--saver", "core").status == 0
    assert run("diff", core, same).status == 0
    held = weights(output)
    first = next(iter(held))
    save_file(held | {first: held[first] + 1}, output / "model.safetensors", {"format": "pt"})
    outcome = run("convert", output, output.parent / "other", "--saver", "core")
    assert_refused(outcome, 3, "with other values than were written", first)


def write_adapter(directory: Path, modules: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Write a LoRA of these modules' weights. Returns the merged weights."""
    stored, merged = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for module, weight in modules.items():
        a, b = torch.randn(4, weight.shape[1]), torch.randn(weight.shape[0], 4)
        stored |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        merged[module] = (weight.float() + 8 / 4 * b @ a).to(weight.dtype)
    directory.mkdir()
    in_file = {f"base_model.model.{name}": tensor for name, tensor in stored.items()}
    save_file(in_file, directory / "adapter_model.safetensors")
    words = sorted({module.rpartition(".")[2] for module in modules})
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": words}
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return merged


def test_an_adapter_is_merged_by_the_names_of_its_modules(hf: Path, tmp_path: Path) -> None:
    source, adapter = unlisted(hf, tmp_path / "source"), tmp_path / "adapter"
    name = "model.layers.1.mlp.down_proj"
    held = weights(source)
    merged = write_adapter(adapter, {name: held[f"{name}.weight"]})
    outcome = run("merge", source, adapter, "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    assert_equal(weights(tmp_path / "out"), held | {f"{name}.weight": merged[name]})


@pytest.mark.parametrize(
    ("fixture", "paths"),
    [
        (
            "whole-qwen2_5_vl",
            {
                "model.language_model.layers.0.mlp.down_proj": "model.layers.0.mlp.down_proj",
                "model.visual.blocks.0.attn.proj": "visual.blocks.0.attn.proj",
            },
        ),
    ],
)
def test_an_adapter_of_a_multimodal_model_is_merged(
    fixture: str, paths: dict[str, str], tmp_path: Path
) -> None:
    """The language model and the encoder, under the names of transformers' modules."""
    source, adapter = FIXTURES / fixture, tmp_path / "adapter"
    held = weights(source)
    modules = {module: held[f"{path}.weight"] for module, path in paths.items()}
    merged = write_adapter(adapter, modules)
    outcome = run("convert", source, tmp_path / "core", "--saver", "core", "--adapter", adapter)
    assert_refused(outcome, 2, "only from hf to hf or dcp", "megaconv merge MODEL ADAPTER")
    outcome = run("merge", source, adapter, "--save-dir", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    expected = held | {f"{path}.weight": merged[module] for module, path in paths.items()}
    assert_equal(weights(tmp_path / "out"), expected)
    save_file(expected, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copytree(source, tmp_path / "same")
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "same")
    assert_is_known_again(tmp_path / "out", tmp_path / "same")


@pytest.mark.parametrize(
    ("module", "shape", "words"),
    [
        ("lm_head", (8, 8), "lm_head: the model has no such module; its head is tied to the embedding"),
        ("model.vision_tower.blocks.0.attn.qkv", (8, 8), "modules are found by the names in its files"),
        ("model.visual.patch_embed.proj", (3, 2, 14, 14), "as for a convolution; only adapters with"),
    ],
)  # fmt: skip
def test_an_adapter_of_modules_that_the_files_lack_is_refused_with_the_reason(
    module: str, shape: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "whole-qwen2_5_vl", source)
    held = {name: each for name, each in weights(source).items() if name != "lm_head.weight"}
    save_file(held, source / "model.safetensors", {"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    write_adapter(tmp_path / "adapter", {module: torch.zeros(8, 8)})
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = {name: torch.zeros(shape) for name in load_file(file)}
    save_file(tensors, file)
    outcome = run("merge", source, tmp_path / "adapter", "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, words)


def test_a_module_that_no_path_or_several_paths_could_be_is_not_guessed() -> None:
    paths = FilePaths(["model.layers.0.q.weight", "visual.layers.0.q.weight", "model.head.bias"])
    assert paths.module("model.language_model.layers.0.q") == "model.layers.0.q"
    assert paths.module("model.visual.layers.0.q") == "visual.layers.0.q"
    assert paths.tensor("language_model.head.bias") == "model.head.bias"
    assert paths.module("model.audio.layers.0.q") == "model.audio.layers.0.q"
    twice = FilePaths(["model.layers.0.q.weight", "language_model.layers.0.q.weight"])
    assert twice.module("model.language_model.layers.0.q") == "model.language_model.layers.0.q"
    assert twice.module("model.layers.0.q") == "model.layers.0.q"


@pytest.mark.parametrize(
    "fixture",
    [
        "fsdp-verl-dp3",
        "deepspeed-zero3-llama-dp2/checkpoint",
        "deepspeed-zero1-llama-dp2/checkpoint",
    ],
)
def test_a_sharded_run_becomes_one_model(fixture: str, tmp_path: Path) -> None:
    run_directory = unlisted(FIXTURES / fixture, tmp_path / "run")
    megaconv.convert(FIXTURES / fixture, tmp_path / "known", saver="hf")
    outcome = run("convert", run_directory, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0, outcome.err
    assert_equal(weights(tmp_path / "out"), weights(tmp_path / "known"))


def test_weights_of_torch_become_safetensors(hf: Path, tmp_path: Path) -> None:
    source = unlisted(hf, tmp_path / "source")
    held = weights(source)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    torch.save(held, source / "pytorch_model.bin")
    megaconv.convert(source, tmp_path / "out", saver="hf")
    assert_equal(weights(tmp_path / "out"), held)


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "{hf}", "{out}", "--saver", "core"),
        ("convert", "{hf}", "{out}", "--saver", "gguf"),
        ("convert", "{hf}", "{out}", "--saver", "hf", "--quantize", "fp8"),
        ("convert", "{hf}", "{out}", "--saver", "hf", "--base", "{hf}"),
        ("plan", "{hf}", "--gpus", "8"),
        ("delta", "{hf}", "{known}", "--save-dir", "{out}"),
    ],
    ids=" ".join,
)
def test_all_that_needs_the_meaning_of_tensors_is_refused(
    arguments: tuple[str, ...], hf: Path, tmp_path: Path
) -> None:
    source, out = unlisted(hf, tmp_path / "source"), tmp_path / "out"
    outcome = run(*(word.format(hf=source, known=hf, out=out) for word in arguments))
    assert_refused(outcome, 3, "Nova")
    assert not out.exists()


def test_a_patch_makes_the_newer_model_of_the_older_one(model: Path, tmp_path: Path) -> None:
    newer, patch = tmp_path / "newer", tmp_path / "patch"
    shutil.copytree(model, newer)
    changed = weights(model)
    first = next(name for name, tensor in changed.items() if tensor.is_floating_point())
    changed[first] = changed[first] + 1
    save_file(changed, newer / "model.safetensors", {"format": "pt"})
    raw = json.loads((newer / "config.json").read_text()) | {"note": "newer"}
    (newer / "config.json").write_text(json.dumps(raw))

    outcome = run("delta", model, newer, "--save-dir", patch)
    assert outcome.status == 0, outcome.err
    for base in ((), ("--option", f"base={model}")):
        shown = run("inspect", patch, *base)
        assert shown.status == 0, shown.err
        assert "patch of hf, safetensors" in shown.out
        assert "only by its own names" in shown.out
    outcome = run("apply", model, patch, "--save-dir", tmp_path / "again")
    assert outcome.status == 0, outcome.err
    assert_equal(weights(tmp_path / "again"), changed)
    assert json.loads((tmp_path / "again/config.json").read_text()) == raw
    outcome = run("apply", model, patch, "--save-dir", tmp_path / "dcp", "--saver", "dcp")
    assert outcome.status == 0, outcome.err
    assert run("diff", newer, tmp_path / "dcp").status == 0
    outcome = run("apply", model, patch, "--save-dir", tmp_path / "core", "--saver", "core")
    assert_refused(
        outcome, 3, "is not supported", "--saver hf or dcp copies it under its own names"
    )


def test_an_unsupported_setting_of_a_known_class_is_no_obstacle(hf: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    raw = json.loads((source / "config.json").read_text()) | {"hidden_act": "quick_silu"}
    (source / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnknownFamily, match="hidden_act"):
        megaconv.convert(source, tmp_path / "core", saver="core")
    megaconv.convert(source, tmp_path / "out", saver="hf")
    assert_equal(weights(tmp_path / "out"), weights(hf))
    assert json.loads((tmp_path / "out/config.json").read_text())["hidden_act"] == "quick_silu"


def test_differing_keys_of_the_configuration_are_named(hf: Path, tmp_path: Path) -> None:
    ours, theirs = (unlisted(hf, tmp_path / name) for name in "ab")
    raw = json.loads((theirs / "config.json").read_text()) | {"novelty": 7}
    (theirs / "config.json").write_text(json.dumps(raw))
    assert "configuration: novelty is None in A, 7 in B" in run("diff", ours, theirs).out


def test_inspect_says_where_such_a_model_can_go(hf: Path, tmp_path: Path) -> None:
    source = unlisted(hf, tmp_path / "source")
    assert "only by its own names, to hf and dcp: " in run("inspect", source).out
    found = json.loads(run("inspect", source, "--json").out)
    assert (found["convertible"], found["keeps_names"]) == (False, True)


def write_shards(directory: Path, listed: range) -> Path:
    """A model without a family in three files. listed: the numbers of the files in its index."""
    directory.mkdir()
    raw = {"architectures": ["StrangeForCausalLM"], "model_type": "strange", "hidden_size": 8}
    (directory / "config.json").write_text(json.dumps(raw))
    places = {}
    for number in range(1, 4):
        file, name = f"model-{number:05d}-of-00003.safetensors", f"t{number}.weight"
        save_file({name: torch.ones(2, 3)}, directory / file, {"format": "pt"})
        if number in listed:
            places[name] = file
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (range(1, 3), "names 2 files of the 3 that the names of these files count"),
        (range(3, 4), "names 1 file of the 3"),
        (range(0), "holds no tensors"),
    ],
)
def test_an_index_that_lacks_files_is_refused(listed: range, words: str, tmp_path: Path) -> None:
    """No family says which tensors the model has."""
    path = write_shards(tmp_path / "in", listed)
    assert_refused(run("convert", path, tmp_path / "out", "--saver", "hf"), 3, words)
    assert_refused(run("fingerprint", path), 3, words)


def test_an_index_of_all_files_is_read(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "in", range(1, 4))
    assert run("convert", path, tmp_path / "out", "--saver", "hf").status == 0
    assert len(weights(tmp_path / "out")) == 3


def test_a_name_that_means_something_in_tables_is_refused(hf: Path, tmp_path: Path) -> None:
    source = unlisted(hf, tmp_path / "source")
    save_file({"layers.{l}.weight": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(UnsupportedInput, match=r"layers\.\{l\}\.weight"):
        megaconv.convert(source, tmp_path / "out", saver="hf")
    assert not (tmp_path / "out").exists()
