"""Llama 3.2 Vision: the Llama inside it, by itself and back in the original, and the whole model between Hugging Face's files.

The oracle is transformers. For a text, MllamaForConditionalGeneration computes the logits that LlamaForCausalLM computes from
our output. With an image, it computes the logits of the original from a model that was put together again.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.families import family
from megaconv.families.parts.language_model import DEFAULTS
from megaconv.families.parts.llama_vision import KIND, llama_config
from tests.runs import run
from tests.transformers_oracle import LLAMA3, rope
from tests.whole_models import (
    assert_same_files,
    elements_by_table,
    elements_of_class,
    load_class,
    logits_of_text,
    raw_config_of,
    tokens,
    weights,
    write_model_files,
)

transformers = pytest.importorskip("transformers")

VOCAB, ADDED, CROSS, LAYERS = 120, 8, [1, 4], 6
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 16384, "cross_attention_layers": CROSS, "rms_norm_eps": 1e-3,
    "bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6, **rope(5000.0, **LLAMA3),
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_global_layers": 2, "attention_heads": 4, "intermediate_size": 40,
    "vision_output_dim": 96, "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0, 2],
}  # fmt: skip
FORMS = ("files", "class")
PREFIX = "language_model.model.layers."
"""The beginning of the names of layers in published files."""


def create(directory: Path, form: str = "files") -> Path:
    """Save a small one, random in every weight.

    form: `files` with the names of published files, which transformers writes too, `class` with those of transformers' class,
    or `text` for the language model by itself.
    """
    torch.manual_seed(20)
    config = transformers.MllamaConfig(
        text_config=dict(TEXT), vision_config=dict(VISION), image_token_index=VOCAB
    )
    model = transformers.MllamaForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    if form == "text":
        alone = transformers.MllamaForCausalLM(config.text_config)
        alone.model.load_state_dict(model.model.language_model.state_dict())
        alone.lm_head.load_state_dict(model.lm_head.state_dict())
        alone.save_pretrained(directory)
        return directory
    model.save_pretrained(directory)
    if form == "class":
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create(tmp_path_factory.mktemp("mllama") / "hf")


def of_whole(directory: Path) -> Any:
    return load_class(directory, "MllamaForConditionalGeneration", attn_implementation="eager")


def logits_of_image(directory: Path) -> torch.Tensor:
    """The logits of a text with an image of two tiles."""
    seeded = torch.Generator().manual_seed(4)
    image = {
        "pixel_values": torch.randn(2, 1, 4, 3, 28, 28, generator=seeded),
        "aspect_ratio_ids": torch.full((2, 1), 2),
        "aspect_ratio_mask": torch.tensor([[[1, 1, 0, 0]]] * 2),
        "cross_attention_mask": torch.tensor([1, 1, 0, 0]).expand(2, 24, 1, 4).clone(),
    }
    seen = tokens().clamp(max=VOCAB - 1)
    seen[:, 2] = VOCAB  # the token of the image, in the rows that only the embedding has
    with torch.no_grad():
        logits: torch.Tensor = of_whole(directory)(input_ids=seen, **image).logits
    return logits


def test_the_image_and_the_last_rows_count(original: Path, tmp_path: Path) -> None:
    """Otherwise the comparisons below would prove nothing about the parts for images."""
    expected = logits_of_image(original)
    tensors, raw = weights(original), raw_config_of(original)
    for name in ("language_model.model.embed_tokens.weight", f"{PREFIX}4.cross_attn_attn_gate"):
        changed = {**tensors, name: tensors[name].clone()}
        changed[name][-ADDED:] += 1
        directory = write_model_files(tmp_path / name, changed, raw)
        assert (logits_of_image(directory) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("form", [*FORMS, "text"])
def test_the_llama_inside_computes_what_transformers_computes_without_images(
    form: str, tmp_path: Path
) -> None:
    source = create(tmp_path / "hf", form)
    report = megaconv.convert(
        source, tmp_path / "alone", saver="hf", text_only=True, verify=True, workers=1
    )
    kind = "MllamaForCausalLM" if form == "text" else "MllamaForConditionalGeneration"
    expected = logits_of_text(load_class(source, kind, attn_implementation="eager"))
    alone = load_class(tmp_path / "alone", "LlamaForCausalLM", attn_implementation="eager")
    assert torch.equal(logits_of_text(alone), expected)
    assert len(alone.model.layers) == LAYERS - len(CROSS)
    assert alone.model.embed_tokens.num_embeddings == VOCAB
    raw = raw_config_of(tmp_path / "alone")
    assert (raw["model_type"], "cross_attention_layers" in raw) == ("llama", False)
    assert report.header.beside["layers with cross-attention"] == 13 * len(CROSS)
    assert report.header.beside["the last 8 rows of the embedding"] == 1


WAYS: dict[str, dict[str, Any]] = {
    "core": {"saver": "core", "tp": 2, "pp": 2},
    "torch_dist": {"saver": "core", "tp": 2, "ckpt_format": "torch_dist"},
    "legacy": {"saver": "legacy", "tp": 2, "allow_lossy": ("rope_scaling",)},
    "gguf": {"saver": "gguf", "options": {"tokenizer": "none"}},
    "mlx": {"saver": "mlx"},
    "hf": {"saver": "hf", "max_shard_size": "40KB"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_every_format_takes_the_llama_and_the_original_takes_it_back(
    form: str, way: str, tmp_path: Path
) -> None:
    source, there, back = create(tmp_path / "source", form), tmp_path / "there", tmp_path / "back"
    written = megaconv.convert(source, there, text_only=True, workers=1, **WAYS[way])
    described = {}
    if way == "gguf":  # its files don't say by which numbers rope is scaled
        described["config"] = tmp_path / "described"
        megaconv.convert(source, described["config"], saver="hf", text_only=True, workers=1)
    again = megaconv.convert(
        there, back, saver="hf", base=source, verify=True, workers=1, **described
    )
    assert written.header.config.family == "llama"
    assert written.fingerprint == again.fingerprint
    assert_same_files(back, source)
    assert raw_config_of(back) == raw_config_of(source)
    assert megaconv.verify(back).same
    assert megaconv.fingerprint(back, text_only=True) == written.fingerprint
    assert megaconv.diff(back, source).same
    if way in ("core", "torch_dist", "hf"):
        assert megaconv.diff(back, there, text_only=True).same


def test_a_trained_llama_goes_back_into_the_original(original: Path, tmp_path: Path) -> None:
    """The tuned weights come from the Llama. Image layers and the last rows of the embedding come from the original."""
    alone = tmp_path / "alone"
    megaconv.convert(original, alone, saver="hf", text_only=True, workers=1)
    tuned = {name: tensor + 0.1 for name, tensor in weights(alone).items()}
    save_file(tuned, alone / "model.safetensors", metadata={"format": "pt"})
    (alone / "megaconv.json").unlink()
    back = tmp_path / "back"
    megaconv.convert(alone, back, saver="hf", base=original, verify=True, workers=1)
    expected = logits_of_text(load_class(alone, "LlamaForCausalLM", attn_implementation="eager"))
    assert torch.equal(logits_of_text(of_whole(back)), expected)
    found, before = weights(back), weights(original)
    assert found.keys() == before.keys()
    embedding = "language_model.model.embed_tokens.weight"
    assert torch.equal(found[embedding][VOCAB:], before[embedding][VOCAB:])
    assert torch.equal(found[embedding][:VOCAB], before[embedding][:VOCAB] + 0.1)
    is_copied = {name: torch.equal(found[name], before[name]) for name in found}
    of_images = (f"{PREFIX}1.", f"{PREFIX}4.", "vision_model.", "multi_modal_projector.")
    assert all(is_copied[name] is name.startswith(of_images) for name in found)


def test_the_last_rows_get_the_dtype_of_the_llama(original: Path, tmp_path: Path) -> None:
    alone, back = tmp_path / "alone", tmp_path / "back"
    megaconv.convert(original, alone, saver="core", text_only=True, dtype="bf16", workers=1)
    megaconv.convert(alone, back, saver="hf", base=original, verify=True, workers=1)
    name = "language_model.model.embed_tokens.weight"
    assert torch.equal(weights(back)[name], weights(original)[name].bfloat16())


def test_a_model_that_was_put_together_again_is_a_source_of_both(
    original: Path, tmp_path: Path
) -> None:
    """Its megaconv.json lists the tensors of the Llama. A changed tensor is found, however the source is read."""
    alone, back = tmp_path / "alone", tmp_path / "back"
    megaconv.convert(original, alone, saver="hf", text_only=True, workers=1)
    megaconv.convert(alone, back, saver="hf", base=original, workers=1)
    megaconv.convert(back, tmp_path / "whole", saver="hf", workers=1)
    assert_same_files(tmp_path / "whole", original)
    file = back / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    tensors[f"{PREFIX}5.mlp.up_proj.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    for option in ([], ["--text-only"]):
        outcome = run("convert", back, tmp_path / "out", "--saver", "hf", *option)
        assert outcome.status == 3
        assert "layers.3.mlp.up.weight" in outcome.err
        assert "other values than were written" in outcome.err
    assert not megaconv.verify(back).same


# The whole model.


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_model_goes_through_hugging_faces_files(form: str, tmp_path: Path) -> None:
    source = create(tmp_path / "source", form)
    expected = logits_of_image(source)
    for saver in ("hf", "dcp"):
        report = megaconv.convert(source, tmp_path / saver, saver=saver, verify=True, workers=1)
        assert report.fingerprint == megaconv.fingerprint(source)
    megaconv.convert(tmp_path / "dcp", tmp_path / "back", saver="hf", workers=1)
    for name in ("hf", "back"):
        assert_same_files(tmp_path / name, source)
        assert torch.equal(logits_of_image(tmp_path / name), expected)
    narrow = {"dtype": "bf16", "max_shard_size": "100KB"}
    megaconv.convert(source, tmp_path / "bf16", saver="hf", verify=True, workers=1, **narrow)
    rounded = {name: tensor.bfloat16() for name, tensor in weights(source).items()}
    found = weights(tmp_path / "bf16")
    assert found.keys() == rounded.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in rounded.items())
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 3
    of_whole(tmp_path / "bf16")


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod."])
def test_files_with_the_prefix_of_a_wrapper_are_read(
    wrapper: str, original: Path, tmp_path: Path
) -> None:
    wrapped = {wrapper + name: tensor for name, tensor in weights(original).items()}
    source = write_model_files(tmp_path / "source", wrapped, raw_config_of(original))
    megaconv.convert(source, tmp_path / "whole", saver="hf", workers=1)
    assert_same_files(tmp_path / "whole", source)
    for directory, name in ((source, "wrapped"), (original, "plain")):
        megaconv.convert(directory, tmp_path / name, saver="hf", text_only=True, workers=1)
    assert_same_files(tmp_path / "wrapped", tmp_path / "plain")
    megaconv.convert(tmp_path / "plain", tmp_path / "back", saver="hf", base=source, workers=1)
    assert_same_files(tmp_path / "back", original)


def write_adapter(directory: Path, modules: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Write a LoRA adapter as peft saves it; returns the change of each module. modules: path -> (outputs, inputs)."""
    directory.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(modules)}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    tensors, changes = {}, {}
    for path, (outputs, inputs) in modules.items():
        first, second = torch.randn(2, inputs), torch.randn(outputs, 2)
        tensors[f"base_model.model.{path}.lora_A.weight"] = first
        tensors[f"base_model.model.{path}.lora_B.weight"] = second
        changes[path] = second @ first * 2
    save_file(tensors, directory / "adapter_model.safetensors")
    return changes


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_all_parts_is_merged_into_the_whole_model(form: str, tmp_path: Path) -> None:
    """Adapters have the names of transformers' class, whichever names the files have."""
    source = create(tmp_path / "hf", form)
    modules = {
        "model.language_model.layers.1.cross_attn.k_proj": (16, 64),
        "model.language_model.layers.5.self_attn.q_proj": (64, 64),
        "model.vision_model.global_transformer.layers.0.mlp.fc1": (40, 32),
        "model.multi_modal_projector": (64, 96),
        "lm_head": (VOCAB, 64),
    }
    changes = write_adapter(tmp_path / "adapter", modules)
    megaconv.merge(source, tmp_path / "adapter", tmp_path / "merged", workers=1)
    before, after = of_whole(source), of_whole(tmp_path / "merged")
    for name, parameter in after.named_parameters():
        expected = before.get_parameter(name) + changes.get(name.removesuffix(".weight"), 0)
        torch.testing.assert_close(parameter, expected)


# The published models.


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, 32),
        (
            {
                "num_hidden_layers": 100, "cross_attention_layers": list(range(3, 100, 5)), "hidden_size": 8192,
                "intermediate_size": 28672, "num_attention_heads": 64,
            },
            80,
        ),
    ],
)  # fmt: skip
def test_the_llama_inside_has_the_sizes_of_a_llama_3_1(
    settings: dict[str, Any], layers: int
) -> None:
    """The 11B has the sizes of the 8B, the 90B those of the 70B. transformers' Llama counts as many elements."""
    raw = llama_config({**DEFAULTS[KIND], **settings})
    config = family("llama").read_hf(raw)
    assert (config.layer_count, config.vocab, config.positions.theta) == (layers, 128256, 5e5)
    sizes = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    elements = elements_by_table("llama", raw)
    assert elements == elements_of_class("LlamaForCausalLM", transformers.LlamaConfig(**sizes))
    assert elements == {32: 8_030_261_248, 80: 70_553_706_496}[layers]
