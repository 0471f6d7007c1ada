"""LFM 3: both names of the gate, the whole LFM 3 VL, and the weights that a quantized output leaves as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from tests.transformers_oracle import CONVERTED, compute, create, load

PUBLISHED_GATE, CLASS_GATE = ".self_attn.gate_proj.", ".self_attn.g_proj."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("lfm3") / "hf"
    create(CONVERTED["lfm3"], directory)
    return directory


@pytest.mark.oracle
def test_files_with_the_gates_name_in_transformers_class_are_read(
    source: Path, tmp_path: Path
) -> None:
    """An output has the published name, which transformers reads as well."""
    weights = load_file(source / "model.safetensors")
    assert any(PUBLISHED_GATE in name for name in weights)
    saved = tmp_path / "class"
    saved.mkdir()
    (saved / "config.json").write_bytes((source / "config.json").read_bytes())
    of_class = {name.replace(PUBLISHED_GATE, CLASS_GATE): held for name, held in weights.items()}
    save_file(of_class, saved / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(saved, tmp_path / "out", saver="hf", verify=True, workers=1)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], held) for name, held in weights.items())


@pytest.mark.oracle
def test_a_quantized_output_leaves_convolutions_norms_and_ends_as_they_are(
    source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    megaconv.convert(source, output, saver="hf", quantize="fp8-per-channel", workers=1)
    written = load_file(output / "model.safetensors")
    plain = {name for name, held in written.items() if held.dtype == torch.float32}
    in_fp8 = {name for name, held in written.items() if held.dtype == torch.float8_e4m3fn}
    assert {name.split(".")[3] for name in in_fp8} == {"self_attn", "feed_forward"}
    assert not any("norm" in name or "conv" in name for name in in_fp8)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.embedding_norm.weight"} <= plain


TEXT: dict[str, Any] = {
    **CONVERTED["lfm3"].settings, "model_type": "lfm3", "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": True,
}  # fmt: skip
VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.oracle
def test_transformers_computes_the_same_logits_from_an_lfm_3_vl(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(20)
    config = transformers.Lfm3VlConfig(
        text_config=TEXT, vision_config=VISION, projector_hidden_size=40, image_token_id=129, video_token_id=130
    )  # fmt: skip
    whole = transformers.Lfm3VlForConditionalGeneration
    model, tokens = whole(config), torch.randint(7, 120, (2, 24))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    source, output, text = (tmp_path / name for name in ("hf", "whole", "text"))
    model.save_pretrained(source)
    usual = {"dtype": torch.float32, "attn_implementation": "eager"}
    expected = compute(whole.from_pretrained(source, **usual).eval(), tokens)
    megaconv.convert(source, output, saver="hf", verify=True, workers=1)
    megaconv.convert(source, text, saver="hf", verify=True, workers=1, text_only=True)
    assert torch.equal(compute(whole.from_pretrained(output, **usual).eval(), tokens), expected)
    assert torch.equal(compute(load(text), tokens), expected)
    before, after = (load_file(path / "model.safetensors").keys() for path in (source, output))
    assert before == after
    assert json.loads((text / "config.json").read_text())["architectures"] == ["Lfm3ForCausalLM"]
