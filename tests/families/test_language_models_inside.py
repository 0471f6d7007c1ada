"""--text-only: the language model in a model that sees or hears, by itself and back into the original's files.

The oracle is transformers: on text alone its whole model computes the logits that it computes from the language model that was
taken out, in the class that the family has.
"""

import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import TensorMismatch
from megaconv.families.parts.language_model import DEFAULTS
from tests.models import write_llama
from tests.runs import assert_refused, run
from tests.transformers_oracle import DELTA_NET, GEMMA_LAYERS, SIZES, compute, load, meaning, rope

VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
    "num_heads": 4, "depth": 2, "out_hidden_size": 64, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
    "num_key_value_heads": 2,
    "num_position_embeddings": 16, "embed_dim": 32, "vision_output_dim": 64, "projector_input_dim": 32, "projector_output_dim": 64,
}  # fmt: skip
AUDIO = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "num_mel_bins": 8,
    "max_source_positions": 20,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 1, 2]}
}


SPEAKERS = {
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}


@dataclass(frozen=True)
class Inside:
    """A model_type with another inside."""

    model_type: str
    family: str
    text: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=lambda: {"tp": 2, "pp": 2})
    whole: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json beside text_config, in place of the usual ones."""


MODELS = {
    model.model_type: model
    for model in (
        Inside(
            "gemma3",
            "gemma3_text",
            {
                "head_dim": 12,
                "query_pre_attn_scalar": 5,
                "sliding_window": 7,
                "layer_types": GEMMA_LAYERS,
            },
        ),
        Inside("mistral3", "mistral", {"model_type": "mistral", "head_dim": 12, **rope(5000.0)}),
        Inside("llava", "llama", {"model_type": "llama", **rope(5000.0)}),
        Inside("internvl", "qwen2", {"model_type": "qwen2", **rope(5000.0)}),
        Inside("qwen2_vl", "qwen2", MROPE),
        Inside("qwen2_5_vl", "qwen2", MROPE),
        Inside("qwen3_vl", "qwen3", {"head_dim": 8, **MROPE}),
        Inside(
            "qwen3_vl_moe",
            "qwen3_moe",
            {"head_dim": 8, "num_local_experts": 4, **MOE, **MROPE},
            layout={"tp": 2, "ep": 2},
        ),
        Inside(
            "qwen3_5", "qwen3_5", DELTA_NET, layout={"tp": 2, "pp": 2, "transformer_impl": "local"}
        ),
        Inside(
            "qwen3_5_moe",
            "qwen3_5_moe",
            {**DELTA_NET, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 40},
            layout={"tp": 2, "ep": 2, "transformer_impl": "local"},
        ),
        Inside("smolvlm", "llama", {"model_type": "llama", **rope(5000.0)}),
        Inside("glm4v", "glm4", {"head_dim": 8, **MROPE}),
        Inside(
            "glm4v_moe",
            "glm4_moe",
            {"head_dim": 16, "n_routed_experts": 4, **MOE, **MROPE},
            layout={"tp": 2, "ep": 2},
        ),
        Inside(
            "llama4",
            "llama4",
            {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1},
            layout={"tp": 2, "ep": 2},
        ),
        Inside(
            "kimi_k25",
            "deepseek_v3",
            {
                "model_type": "deepseek_v3",
                "num_key_value_heads": 8,
                "kv_lora_rank": 16,
                "q_lora_rank": 24,
                "n_group": 2,
                "topk_group": 1,
                "n_routed_experts": 4,
                "first_k_dense_replace": 1,
                **MOE,
            },
            layout={"tp": 2, "ep": 2},
        ),
        Inside("glm_ocr", "glm4", {"head_dim": 8, **MROPE}),
        Inside("paddleocr_vl", "llama", {"head_dim": 8, **MROPE}),
        Inside("qwen2_audio", "qwen2", {"model_type": "qwen2", **rope(5000.0)}),
        Inside("exaone4_5", "exaone4", {"model_type": "exaone4"}),
        Inside("qwen3_asr", "qwen3", {"model_type": "qwen3", "head_dim": 8}),
        Inside("qwen2_5_omni", "qwen2", MROPE),
        Inside(
            "qwen3_omni_moe",
            "qwen3_moe",
            {"head_dim": 8, "num_experts": 4, **MOE, **MROPE},
            layout={"tp": 2, "ep": 2},
        ),
    )
}


def create(model: Inside, directory: Path, vision: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Save a small one, random in every weight; returns it as transformers loads it again. vision: what else its tower has."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    torch.manual_seed(20)
    # transformers changes the dict that it gets.
    text = deepcopy({**SIZES, "pad_token_id": 6, **model.text})
    if "omni" in model.model_type:
        return create_speaker(model.model_type, text, directory)
    sense = (
        {"audio_config": AUDIO}
        if "audio" in model.model_type or "asr" in model.model_type
        else {"vision_config": {"hidden_act": "silu", **VISION, **vision}}
    )
    config = AutoConfig.for_model(
        model.model_type, text_config=text, tie_word_embeddings=False, **{**sense, **model.whole}
    )
    whole = AutoModelForMultimodalLM.from_config(config)
    for tensor in whole.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    whole.save_pretrained(directory)
    if model.model_type == "kimi_k25":
        # As its files have it: transformers 5.23 takes layers of the language model for the tower's.
        for file in directory.glob("*.safetensors"):
            tensors = load_file(file)
            save_file(
                {
                    name.replace("model.blocks.", "model.layers."): tensor
                    for name, tensor in tensors.items()
                },
                file,
            )
    options: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForMultimodalLM.from_pretrained(directory, **options).eval()


def create_speaker(model_type: str, text: dict[str, Any], directory: Path) -> Any:
    """Save a small model that understands and speaks; returns its thinker, the part that understands."""
    import transformers

    audio = {**AUDIO, "output_dim": 64, "n_window": 4, "downsample_hidden_size": 16}
    vision = {"hidden_act": "silu", **VISION}
    config = transformers.AutoConfig.for_model(
        f"{model_type}_thinker", text_config=text, audio_config=audio, vision_config=vision
    )
    speaker = SPEAKERS[model_type]
    thinker = getattr(transformers, speaker.replace("For", "ThinkerFor"))(config).eval()
    for tensor in thinker.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    thinker.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    tensors = {f"thinker.{name}": tensor for name, tensor in stored.items()}
    save_file(
        tensors | {"talker.code_head.weight": torch.randn(3, 5)}, directory / "model.safetensors"
    )
    raw = {"architectures": [speaker], "model_type": model_type, "enable_audio_output": True}
    raw["thinker_config"] = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float32"}))
    return thinker


BETWEEN_FILES = {
    model.model_type: model
    for model in (
        Inside(
            "granite_docling",
            "granite",
            {"embedding_multiplier": 3.0, "logits_scaling": 2.0, **rope(5000.0)},
        ),
        Inside(
            "granite4_vision",
            "granite",
            {"embedding_multiplier": 3.0, "logits_scaling": 2.0, **rope(5000.0)},
            whole={
                "vision_config": {**VISION, "hidden_size": 64, "model_type": "clip_vision_model"},
                "deepstack_layer_map": [[0, 1]],
                "downsample_rate": "1/2",
            },
        ),
        Inside("hunyuan_vl", "hunyuan_v1_dense", {"head_dim": 8, **MROPE}),
    )
}
"""The same, with a language model that Megatron's arguments can't describe."""

QUICK = ("gemma3", "qwen2_5_vl", "qwen3_vl_moe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_the_language_model_computes_the_same_by_itself_and_goes_back_into_the_originals_files(
    name: str, tmp_path: Path
) -> None:
    model, original = MODELS[name], tmp_path / "original"
    whole = create(model, original)
    tokens = torch.randint(7, 120, (2, 12), generator=torch.Generator().manual_seed(3))
    megaconv.convert(original, tmp_path / "alone", saver="hf", text_only=True)
    # transformers 5.24's class of the whole Llama 4 fails at any input: it asks its output for images that it doesn't hold.
    inside = whole.language_model if name == "llama4" else whole
    torch.testing.assert_close(
        compute(load(tmp_path / "alone"), tokens), compute(inside, tokens), rtol=0, atol=2e-5
    )
    report = megaconv.convert(
        original, tmp_path / "core", saver="core", text_only=True, **model.layout
    )
    assert report.header.config.family == model.family
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf", base=original, verify=True)
    assert megaconv.verify(tmp_path / "back").same
    assert_same_weights(tmp_path / "back", original)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (original / "config.json").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", BETWEEN_FILES)
def test_a_language_model_without_names_in_megatron_goes_back_into_the_originals_files(
    name: str, tmp_path: Path
) -> None:
    model, original = BETWEEN_FILES[name], tmp_path / "original"
    whole = create(model, original)
    tokens = torch.randint(7, 120, (2, 12), generator=torch.Generator().manual_seed(3))
    report = megaconv.convert(original, tmp_path / "alone", saver="hf", text_only=True)
    assert report.header.config.family == model.family
    torch.testing.assert_close(
        compute(load(tmp_path / "alone"), tokens), compute(whole, tokens), rtol=0, atol=2e-5
    )
    megaconv.convert(tmp_path / "alone", tmp_path / "back", saver="hf", base=original, verify=True)
    megaconv.convert(original, tmp_path / "whole", saver="hf", verify=True)
    for directory in ("back", "whole"):
        assert_same_weights(tmp_path / directory, original)


def test_tensors_outside_the_language_model_are_named_when_left_out(tmp_path: Path) -> None:
    create(MODELS["gemma3"], tmp_path / "hf")
    outcome = run("convert", tmp_path / "hf", tmp_path / "core", "--saver", "core", "--text-only")
    assert outcome.status == 0
    assert (
        "these tensors were not converted: multi_modal_projector (2 tensors), vision_tower (48 tensors); --saver hf --base"
        in outcome.err
    )


def test_transposed_stacks_of_experts_are_read_and_written_into_the_original(
    tmp_path: Path,
) -> None:
    """Qwen 3 VL has this form on the Hub."""
    create(MODELS["qwen3_vl_moe"], tmp_path / "rows")
    (tmp_path / "columns").mkdir()
    (tmp_path / "columns/config.json").write_bytes((tmp_path / "rows/config.json").read_bytes())
    tensors = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(tmp_path / "rows/model.safetensors").items()
    }
    save_file(tensors, tmp_path / "columns/model.safetensors")
    done = [
        megaconv.convert(
            tmp_path / name, tmp_path / f"{name} core", saver="core", text_only=True, tp=2, ep=2
        )
        for name in ("rows", "columns")
    ]
    assert done[0].fingerprint == done[1].fingerprint
    megaconv.convert(
        tmp_path / "rows core", tmp_path / "back", saver="hf", base=tmp_path / "columns"
    )
    assert_same_weights(tmp_path / "back", tmp_path / "columns")


def test_a_config_json_without_a_text_config_of_its_own_is_read(tmp_path: Path) -> None:
    """Qwen 2.5 VL has this form on the Hub: the language model's keys stand beside vision_config."""
    create(MODELS["qwen2_5_vl"], tmp_path / "nested")
    shutil.copytree(tmp_path / "nested", tmp_path / "flat")
    raw = json.loads((tmp_path / "nested/config.json").read_text())
    text = raw.pop("text_config")
    del text["rope_parameters"]
    flat = {
        **text,
        **raw,
        "rope_theta": 5000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }
    (tmp_path / "flat/config.json").write_text(json.dumps(flat))
    for name in ("nested", "flat"):
        megaconv.convert(tmp_path / name, tmp_path / f"{name} alone", saver="hf", text_only=True)
    assert meaning(load(tmp_path / "flat alone").config) == meaning(
        load(tmp_path / "nested alone").config
    )


@pytest.mark.slow
def test_the_flat_config_json_of_paddle_ocr_and_the_names_of_its_files_are_read(
    tmp_path: Path,
) -> None:
    create(MODELS["paddleocr_vl"], tmp_path / "nested")
    raw = json.loads((tmp_path / "nested/config.json").read_text())
    text = raw.pop("text_config")
    del text["rope_parameters"], text["model_type"]
    flat = {
        **text,
        **raw,
        "rope_theta": 5000.0,
        "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]},
    }
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat/config.json").write_text(json.dumps(flat))
    stored = load_file(tmp_path / "nested/model.safetensors")
    assert {name.split(".")[0] for name in stored} == {"mlp_AR", "model", "visual"}
    shutil.copy(tmp_path / "nested/model.safetensors", tmp_path / "flat")
    for name in ("nested", "flat"):
        megaconv.convert(tmp_path / name, tmp_path / f"{name} alone", saver="hf", text_only=True)
        megaconv.convert(tmp_path / name, tmp_path / f"{name} whole", saver="hf", verify=True)
        assert_same_weights(tmp_path / f"{name} whole", tmp_path / name)
    assert meaning(load(tmp_path / "flat alone").config) == meaning(
        load(tmp_path / "nested alone").config
    )


@pytest.mark.slow
def test_the_layer_for_multi_token_prediction_of_glm_ocr_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create(MODELS["glm_ocr"], tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "published")
    weights = load_file(tmp_path / "plain/model.safetensors")
    layer = f"model.language_model.layers.{SIZES['num_hidden_layers']}."
    further = {f"{layer}{name}.weight": torch.ones(4, 4) for name in ("eh_proj", "mlp.down_proj")}
    save_file(weights | further, tmp_path / "published/model.safetensors")
    for name in ("plain", "published"):
        megaconv.convert(tmp_path / name, tmp_path / f"{name} out", saver="hf", verify=True)
        assert_same_weights(tmp_path / f"{name} out", tmp_path / "plain")
    assert "layers for multi-token prediction are not converted, 2 tensors left out" in caplog.text
    alone = {f"{layer}mlp.down_proj.weight": torch.ones(4, 4)}
    save_file(weights | alone, tmp_path / "published/model.safetensors")
    with pytest.raises(TensorMismatch, match="1 tensor"):
        megaconv.convert(tmp_path / "published", tmp_path / "out", saver="hf")


# Mistral's class has other default sizes in transformers 5 than in 4. `paddleocr_vl` is the whole model in transformers.
@pytest.mark.parametrize("kind", sorted(DEFAULTS.keys() - {"mistral", "paddleocr_vl"}))
def test_defaults_of_text_configs_equal_those_of_their_classes(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    for key, value in DEFAULTS[kind].items():
        assert (
            getattr(config, key, None) == value
            or (config.rope_parameters or {}).get(key, 1.0) == value
        ), key


def test_an_absent_head_is_the_embedding_whatever_config_json_says(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    create(MODELS["mistral3"], hf)
    tensors = load_file(hf / "model.safetensors")
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, hf / "model.safetensors")
    megaconv.convert(hf, tmp_path / "alone", saver="hf", text_only=True)
    assert json.loads((tmp_path / "alone/config.json").read_text())["tie_word_embeddings"] is True


def test_fp8_that_the_text_config_speaks_of_becomes_plain(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    create(MODELS["mistral3"], hf)
    stored = load_file(hf / "model.safetensors")
    name = "language_model.model.layers.1.mlp.up_proj.weight"
    stored |= {
        name: stored[name].to(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.full((11, 8), 0.5),
    }
    save_file(stored, hf / "model.safetensors")
    raw = json.loads((hf / "config.json").read_text())
    raw["text_config"]["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (hf / "config.json").write_text(json.dumps(raw))
    megaconv.convert(hf, tmp_path / "core", saver="core", text_only=True, dtype="fp32")
    megaconv.convert(tmp_path / "core", tmp_path / "back", saver="hf", base=hf)
    back = {
        key: value
        for file in (tmp_path / "back").glob("*.safetensors")
        for key, value in load_file(file).items()
    }
    assert back.keys() == stored.keys() - {f"{name}_scale_inv"}
    assert torch.equal(back[name], stored[name].float() * 0.5)
    del raw["text_config"]["quantization_config"]
    assert json.loads((tmp_path / "back/config.json").read_text()) == raw
    raw["text_config"]["quantization_config"] = {"quant_method": "hqq"}
    (hf / "config.json").write_text(json.dumps(raw))
    outcome = run("convert", hf, tmp_path / "out", "--saver", "core", "--text-only")
    assert_refused(outcome, 3, "quantized (hqq)")


def test_its_fingerprint_is_that_of_what_it_is_converted_to(tmp_path: Path) -> None:
    create(MODELS["llava"], tmp_path / "hf")
    report = megaconv.convert(
        tmp_path / "hf", tmp_path / "core", saver="core", text_only=True, tp=2
    )
    outcome = run("fingerprint", tmp_path / "hf", "--text-only")
    assert report.fingerprint is not None
    assert outcome.out == report.fingerprint.weights + "\n"


# What can't be.


def test_without_the_option_the_refusal_says_what_to_give(tmp_path: Path) -> None:
    create(MODELS["gemma3"], tmp_path / "hf")
    outcome = run("convert", tmp_path / "hf", tmp_path / "out", "--saver", "gguf")
    assert_refused(
        outcome,
        2,
        "--saver gguf: can't store the multimodal model Gemma3ForConditionalGeneration",
        "--text-only",
    )


def test_an_unknown_tensor_of_the_language_model_is_an_error_and_not_left_out(
    tmp_path: Path,
) -> None:
    hf = tmp_path / "hf"
    create(MODELS["gemma3"], hf)
    tensors = load_file(hf / "model.safetensors")
    save_file(
        tensors | {"language_model.model.layers.0.extra.weight": torch.zeros(2, 2)},
        hf / "model.safetensors",
    )
    outcome = run("convert", hf, tmp_path / "out", "--saver", "core", "--text-only")
    assert_refused(outcome, 3, "unknown", "model.layers.0.extra.weight")


@pytest.mark.parametrize(
    ("architecture", "text", "status", "words"),
    [
        ("PaliGemmaForConditionalGeneration", {"model_type": "gemma"}, 3, "in both directions"),
        (
            "Emu3ForConditionalGeneration",
            {"model_type": "emu3_text_model"},
            3,
            "emu3_text_model, which is not supported",
        ),
        ("LlavaForConditionalGeneration", "llama", 3, "text_config should be an object"),
        ("LlamaForCausalLM", None, 2, "is a language model by itself"),
    ],
)
def test_a_language_model_that_cannot_be_taken_out_is_refused_with_its_reason(
    architecture: str, text: Any, status: int, words: str, tmp_path: Path
) -> None:
    hf = write_llama(
        tmp_path / "hf",
        extra_config={"architectures": [architecture]} | ({"text_config": text} if text else {}),
    )
    assert_refused(
        run("convert", hf, tmp_path / "out", "--saver", "core", "--text-only"), status, words
    )


def test_only_a_hugging_face_directory_is_read_so(tmp_path: Path) -> None:
    megaconv.convert(write_llama(tmp_path / "hf"), tmp_path / "core", saver="core")
    outcome = run("convert", tmp_path / "core", tmp_path / "out", "--saver", "hf", "--text-only")
    assert_refused(outcome, 2, "--text-only", "leave it out")


def assert_same_weights(found: Path, expected: Path) -> None:
    ours, theirs = (
        {k: v for f in sorted(d.glob("*.safetensors")) for k, v in load_file(f).items()}
        for d in (found, expected)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.int32), tensor.view(torch.int32)), name
