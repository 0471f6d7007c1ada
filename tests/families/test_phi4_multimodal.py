"""Phi-4 multimodal: the Phi-3 inside it, by itself and back in the original, and the whole model in Megatron's files.

transformers is the oracle. For a text, Phi4MultimodalForCausalLM computes what Phi3ForCausalLM computes from our output.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.families.parts.language_model import DEFAULTS, inner_config
from tests.families.test_whole_models import state
from tests.models import write_llama
from tests.runs import assert_refused, run
from tests.whole_models import (
    assert_same_files,
    elements_by_table,
    elements_of_class,
    load_class,
    raw_config_of,
    weights,
    write_model_files,
)

transformers = pytest.importorskip("transformers")

FACTORS = {
    "short_factor": [1.0, 1.1, 1.25, 1.5, 1.6, 1.7],
    "long_factor": [1.5, 2.0, 3.5, 6.0, 7.0, 8.0],
}
LONGROPE = {"rope_type": "longrope", **FACTORS}
TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "original_max_position_embeddings": 24, "rms_norm_eps": 1e-3,
    "bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.75},
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "crop_size": 28,
    "image_token_id": 120,
}  # fmt: skip
AUDIO = {
    "hidden_size": 32, "intermediate_size": 40, "num_blocks": 1, "num_attention_heads": 4, "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16, "input_size": 16, "audio_token_id": 121,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "longrope": {"rope_parameters": {**TEXT["rope_parameters"], **LONGROPE}},
    "tied": {"tie_word_embeddings": True},
    "window": {"sliding_window": 7},
}


def create(directory: Path, **settings: Any) -> Path:
    """Save a small one, random in every weight."""
    torch.manual_seed(20)
    config = transformers.Phi4MultimodalConfig(
        **{**TEXT, **settings}, vision_config=dict(VISION), audio_config=dict(AUDIO)
    )
    model = transformers.Phi4MultimodalForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def logits(directory: Path, kind: str) -> list[torch.Tensor]:
    """The logits of a text, and of one that is longer than the first training's texts."""
    model = load_class(directory, kind, attn_implementation="eager")
    seeded = torch.Generator().manual_seed(3)
    texts = [torch.randint(7, 110, (2, length), generator=seeded) for length in (20, 40)]
    with torch.no_grad():
        return [model(input_ids=text).logits for text in texts]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_phi_3_inside_computes_what_transformers_computes_for_a_text(
    variant: str, tmp_path: Path
) -> None:
    source, alone = create(tmp_path / "source", **VARIANTS[variant]), tmp_path / "alone"
    report = megaconv.convert(source, alone, saver="hf", text_only=True, verify=True, workers=1)
    expected = logits(source, "Phi4MultimodalForCausalLM")
    assert all(map(torch.equal, logits(alone, "Phi3ForCausalLM"), expected))
    assert report.header.beside.keys() == {"model.embed_tokens_extend"}
    raw = raw_config_of(alone)
    assert raw["model_type"] == "phi3"
    assert not {"vision_config", "audio_config"} & raw.keys()


@pytest.mark.parametrize("variant", ["plain", "tied"])
@pytest.mark.parametrize("text_only", [True, False])
def test_every_bit_comes_back_from_megatron(text_only: bool, variant: str, tmp_path: Path) -> None:
    source = create(tmp_path / "source", **VARIANTS[variant])
    base = {"base": source} if text_only else {}
    for ckpt_format in ("torch", "torch_dist"):
        core, back = tmp_path / ckpt_format, tmp_path / f"{ckpt_format} back"
        layout = {"ckpt_format": ckpt_format, "tp": 2, "pp": 2}
        there = megaconv.convert(
            source, core, saver="core", text_only=text_only, workers=1, **layout
        )
        again = megaconv.convert(core, back, saver="hf", verify=True, workers=1, **base)
        assert there.fingerprint == again.fingerprint
        assert_same_files(back, source)
        assert raw_config_of(back) == raw_config_of(source)
    names = state(tmp_path / "torch")["model"]
    assert any(name.startswith("embed_tokens_extend.") for name in names) is not text_only


def test_the_phi_3_inside_the_published_model_has_the_sizes_of_phi_4_mini() -> None:
    """transformers' Phi-3 counts as many elements: 3.8 billion."""
    own = {"model_type": "phi4_multimodal", "hidden_size": 3072, "num_attention_heads": 24}
    raw = {**DEFAULTS["phi4_multimodal"], **own}
    inside = inner_config({**raw, "vision_config": {}, "tie_word_embeddings": True})
    assert inside is not None
    sizes = {key: value for key, value in inside.items() if key != "model_type"}
    assert elements_by_table("phi3", inside) == 3_836_021_760
    assert elements_of_class("Phi3ForCausalLM", transformers.Phi3Config(**sizes)) == 3_836_021_760


def test_files_for_microsofts_own_class_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """They hold LoRA matrices inside, under names that no class of transformers has."""
    raw = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    source = write_llama(tmp_path / "source", extra_config=raw)
    command = ("convert", source, tmp_path / "out", "--saver", "core")
    for option in ([], ["--text-only"]):
        outcome = run(*command, *option)
        assert_refused(outcome, 3, "Phi4MMForCausalLM", "Phi4MultimodalForCausalLM")


def test_a_missing_tensor_of_the_language_model_is_named(tmp_path: Path) -> None:
    source = create(tmp_path / "source")
    tensors = weights(source)
    del tensors["model.layers.2.self_attn.qkv_proj.weight"]
    damaged = write_model_files(tmp_path / "damaged", tensors, raw_config_of(source))
    for option in ([], ["--text-only"]):
        outcome = run("convert", damaged, tmp_path / "out", "--saver", "core", *option)
        assert_refused(outcome, 3, "model.layers.2.self_attn.qkv_proj.weight")
