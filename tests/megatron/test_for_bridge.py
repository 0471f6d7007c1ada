"""`--option for=megatron-bridge`: what stands in the files. Whether Bridge loads them: tests/megatron/test_bridge_loads.py."""

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.provider_fields import provider_fields
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from tests.config_models import configs
from tests.conftest import FIXTURES
from tests.families.test_families import write_model
from tests.families.test_language_models_inside import MODELS, create
from tests.megatron.test_megatron_args import arguments
from tests.runs import assert_refused, run

FOR_BRIDGE: dict[str, Any] = {
    "saver": "core",
    "ckpt_format": "torch_dist",
    "options": {"for": "megatron-bridge"},
}
VERSION = "iter_0000001"


@pytest.mark.parametrize("family", ["smollm3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_model_is_read_from_run_config_alone(family: str, tmp_path: Path) -> None:
    megaconv.convert(write_model(tmp_path / "hf", family), tmp_path / "out", **FOR_BRIDGE, tp=1)
    written = tmp_path / "out" / VERSION
    original = open_checkpoint(tmp_path / "out")
    common = torch.load(written / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, written / "common.pt")
    (tmp_path / "out/hf").rename(tmp_path / "elsewhere")
    (tmp_path / "out/megaconv.json").unlink()
    found = open_checkpoint(tmp_path / "out")
    assert "Megatron-Bridge" in str(found.header.source)
    assert found.config.sizes() == original.config.sizes()
    assert found.config.layers == original.config.layers
    assert (
        megaconv.fingerprint(tmp_path / "out").weights
        == megaconv.fingerprint(tmp_path / "elsewhere/../hf").weights
    )


def test_pyyaml_reads_every_number_as_a_number(tmp_path: Path) -> None:
    """It takes 1e-05 for a text."""
    megaconv.convert(
        write_model(tmp_path / "hf", "smollm3", rms_norm_eps=1e-5), tmp_path / "out", **FOR_BRIDGE
    )
    model = yaml.safe_load((tmp_path / "out" / VERSION / "run_config.yaml").read_text())["model"]
    assert model["layernorm_epsilon"] == 1e-5
    state = torch.load(tmp_path / "out/latest_train_state.pt")
    assert {name: value.item() for name, value in state.items()} == {
        "step": 1,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "floating_point_operations_so_far": 0,
        "do_train": False,
        "do_valid": False,
        "do_test": False,
    }
    assert (
        torch.load(tmp_path / "out" / VERSION / "common.pt", weights_only=False)["content_metadata"]
        is not None
    )


@pytest.mark.parametrize(
    ("family", "what"), [("gemma2", "norms after sublayers"), ("olmoe", "norms of q and k over")]
)
def test_a_model_that_needs_a_provider_of_its_own_is_refused_by_what_it_has(
    family: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(NotExpressible, match=f"{what}.*by other providers"):
        megaconv.convert(write_model(tmp_path / "hf", family), tmp_path / "out", **FOR_BRIDGE)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL with the activation that Bridge's encoder has."""
    directory = tmp_path_factory.mktemp("seeing") / "hf"
    create(MODELS["qwen3_vl"], directory, {"hidden_act": "gelu_pytorch_tanh"})
    return directory


def test_a_multimodal_model_names_its_provider_its_encoder_and_its_tokens(
    seeing: Path, tmp_path: Path
) -> None:
    megaconv.convert(seeing, tmp_path / "out", **FOR_BRIDGE)
    model = yaml.safe_load((tmp_path / "out" / VERSION / "run_config.yaml").read_text())["model"]
    assert model["_target_"].endswith("qwen3_vl_provider.Qwen3VLModelProvider")
    assert (model["position_embedding_type"], model["mrope_section"]) == ("mrope", [1, 1, 2])
    raw = json.loads((seeing / "config.json").read_text())
    encoder = model["vision_config"]
    assert encoder.pop("_target_").endswith("configuration_qwen3_vl.Qwen3VLVisionConfig")
    assert encoder == raw["vision_config"]
    assert model["image_token_id"] == raw["image_token_id"]
    assert model["eos_token_id"] == raw["text_config"]["eos_token_id"]


def test_an_encoder_that_bridge_would_compute_otherwise_is_refused(
    seeing: Path, tmp_path: Path
) -> None:
    shutil.copytree(seeing, tmp_path / "silu")
    file = tmp_path / "silu/config.json"
    file.write_text(file.read_text().replace("gelu_pytorch_tanh", "silu"))
    with pytest.raises(NotExpressible, match=r"hidden_act is 'silu'.*gelu_pytorch_tanh alone"):
        megaconv.convert(tmp_path / "silu", tmp_path / "out", **FOR_BRIDGE)
    with pytest.raises(NotExpressible, match=r"--transformer-impl local.*layers alone"):
        megaconv.convert(seeing, tmp_path / "out", transformer_impl="local", **FOR_BRIDGE)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 whose second and fourth layers have no window."""
    directory = tmp_path_factory.mktemp("gemma") / "hf"
    layers = ["sliding_attention", "full_attention"] * 2
    text = {**MODELS["gemma3"].text, "layer_types": layers}
    whole = {"mm_tokens_per_image": 4}
    create(replace(MODELS["gemma3"], text=text, whole=whole), directory, {"vision_use_head": False})
    return directory


def test_gemma_3_names_its_window_its_pattern_its_ropes_and_its_projector(
    gemma: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megaconv.convert(gemma, tmp_path / "out", **FOR_BRIDGE, tp=2)
    assert "the embedding is scaled" not in caplog.text  # Bridge's provider scales it
    model = yaml.safe_load((tmp_path / "out" / VERSION / "run_config.yaml").read_text())["model"]
    assert model["_target_"].endswith("gemma3_vl_provider.Gemma3VLModelProvider")
    assert model["transformer_layer_spec"]["_target_"].endswith("gemma3_layer_spec")
    assert (model["window_size"], model["interleaved_attn_pattern"]) == (7, [1, 1])
    assert model["rotary_base"] == [10000.0, 1000000.0]
    assert model["softmax_scale"] == 5**-0.5
    projector = model["vision_projector_config"]
    assert projector.pop("_target_").endswith("Gemma3VLMultimodalProjectorConfig")
    assert projector == {
        **{"input_size": 32, "hidden_size": 64, "image_size": 28, "patch_dim": 14},
        **{"tokens_per_image": 4, "layernorm_epsilon": 1e-6},
    }
    raw = json.loads((gemma / "config.json").read_text())
    tokens = {"vision_start": "boi", "vision_end": "eoi", "image": "image"}
    for name, key in tokens.items():
        assert model[f"{name}_token_id"] == raw[f"{key}_token_index"]


def test_gemma_3_for_bridge_gives_every_bit_back(gemma: Path, tmp_path: Path) -> None:
    megaconv.convert(gemma, tmp_path / "out", **FOR_BRIDGE, tp=2)
    megaconv.convert(tmp_path / "out", tmp_path / "back", saver="hf", config=gemma)
    weights = [megaconv.fingerprint(path).weights for path in (gemma, tmp_path / "back")]
    assert weights[0] == weights[1]


def test_gemma_3_with_windows_in_no_regular_pattern_is_refused(gemma: Path, tmp_path: Path) -> None:
    shutil.copytree(gemma, tmp_path / "irregular")
    file = tmp_path / "irregular/config.json"
    raw = json.loads(file.read_text())
    raw["text_config"]["layer_types"][3] = "sliding_attention"
    file.write_text(json.dumps(raw))
    with pytest.raises(NotExpressible, match=r"without a window: \[2\].*at equal distances"):
        megaconv.convert(tmp_path / "irregular", tmp_path / "out", **FOR_BRIDGE)
    assert not (tmp_path / "out").exists()


def test_a_multimodal_model_whose_provider_is_not_written_is_refused_by_name(
    tmp_path: Path,
) -> None:
    create(MODELS["llava"], tmp_path / "hf")
    with pytest.raises(NotExpressible, match=r"LlavaFor.*: .*known: qwen2_5_vl"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", **FOR_BRIDGE)
    assert not (tmp_path / "out").exists()


def test_mistral_small_is_refused_because_bridge_builds_ministral_3_alone(tmp_path: Path) -> None:
    """Both have the model_type mistral3."""
    create(MODELS["mistral3"], tmp_path / "hf")
    with pytest.raises(NotExpressible, match=r"its language model is mistral;.*ministral3 alone"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", **FOR_BRIDGE)
    assert not (tmp_path / "out").exists()


def test_exaone_names_its_layers_and_its_padded_vocabulary(tmp_path: Path) -> None:
    create(MODELS["exaone4_5"], tmp_path / "hf")
    megaconv.convert(tmp_path / "hf", tmp_path / "out", **FOR_BRIDGE, tp=2)
    model = yaml.safe_load((tmp_path / "out" / VERSION / "run_config.yaml").read_text())["model"]
    assert model["transformer_layer_spec"]["_target_"].endswith("exaone_45_transformer_layer_spec")
    text = json.loads((tmp_path / "hf/config.json").read_text())["text_config"]
    assert (text["vocab_size"], model["vocab_size"]) == (131, 256)
    target = model["hf_text_config"].pop("_target_")
    assert target.endswith("exaone4.configuration_exaone4.Exaone4Config")
    assert model["hf_text_config"] == text
    megaconv.convert(tmp_path / "out", tmp_path / "back", saver="hf", config=tmp_path / "hf")
    weights = [megaconv.fingerprint(tmp_path / side).weights for side in ("hf", "back")]
    assert weights[0] == weights[1]


def test_another_word_and_another_format_are_refused(tmp_path: Path) -> None:
    base = FIXTURES / "peft-llama-all-linear/base"
    convert = (
        "convert",
        "--load-dir",
        base,
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
        "--option",
    )
    assert_refused(run(*convert, "for=nemo"), 2, "for=nemo", "choose megatron-bridge")
    assert_refused(run(*convert, "for=megatron-bridge"), 2, "give --ckpt-format torch_dist")
    release = (*convert, "for=megatron-bridge", "--ckpt-format", "torch_dist", "--release")
    assert_refused(run(*release), 2, "--release: Megatron-Bridge saves iterations")


@settings(max_examples=20, deadline=None)
@given(configs())
def test_any_model_is_kept_or_refused_by_name(config: ModelConfig) -> None:
    """provider_fields itself compares what is read back."""
    try:
        fields = provider_fields(config, Layout(), Namespace(**arguments(config)))
    except NotExpressible:
        return
    assert fields["num_layers"] == config.layer_count
    assert yaml.safe_load(yaml.safe_dump(fields)) == fields
