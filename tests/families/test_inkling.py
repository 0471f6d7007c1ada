"""Inkling: whole models under the names of published files and of transformers' class, older keys, and refusals."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family, read_config
from megaconv.model.config import ModelConfig
from megaconv.model.meaning import lost_fields
from megatron_lite.models.trainable import check_computed
from tests.config_models import raw_config
from tests.engine.test_chains import write_model
from tests.runs import assert_refused, run
from tests.transformers_oracle import CONVERTED, assert_comes_back
from tests.transformers_oracle import create as create_text
from tests.whole_models import (
    assert_same_files,
    elements_by_table,
    elements_of_class,
    load_class,
    logits_of_text,
    weights,
    write_model_files,
)

NAME = "inkling_text"
TEXT: dict[str, Any] = {
    "model_type": NAME, "vocab_size": 131, "unpadded_vocab_size": 127, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 6, "d_rel": 3,
    "rel_extent": 9, "sliding_window_size": 7, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "intermediate_size": 20, "n_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"], "log_scaling_n_floor": 5, "max_position_embeddings": 96,
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "vision_config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4},
    "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 5},
}  # fmt: skip
WHOLE = "InklingForConditionalGeneration"
PUBLISHED = "model.llm.layers.1.attn.wq_du.weight"
DEFAULT = {"architectures": ["InklingForCausalLM"], "model_type": NAME}
NAMES = [name for name in CONVERTED if name.split(",")[0] == NAME]


def described(**keys: Any) -> ModelConfig:
    return family(NAME).read_hf(raw_config(NAME, **keys))


def create(directory: Path, *, in_class_names: bool = False) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(20)
    model = getattr(transformers, WHOLE)(transformers.InklingConfig(text_config=TEXT, **OTHERS))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point():
                continue  # the places of the audio encoder's tables
            tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    model.save_pretrained(directory, save_original_format=not in_class_names)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model under the names of published files, and under those of transformers' class."""
    path = tmp_path_factory.mktemp("inkling")
    create(path / "published")
    create(path / "class", in_class_names=True)
    return {"published": path / "published", "class": path / "class"}


@pytest.mark.oracle
def test_the_default_model_has_as_many_elements_as_transformers_class() -> None:
    transformers = pytest.importorskip("transformers")
    expected = elements_of_class("InklingForCausalLM", transformers.InklingTextConfig())
    assert elements_by_table(NAME, DEFAULT) == expected


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["published", "class"])
def test_a_whole_model_keeps_its_names_and_bits(
    form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source, outputs = sources[form], (tmp_path / "hf", tmp_path / "again")
    assert megaconv.convert(source, outputs[0], saver="hf", verify=True, workers=1).verified
    megaconv.convert(source, tmp_path / "dcp", saver="dcp", verify=True, workers=1)
    megaconv.convert(tmp_path / "dcp", outputs[1], saver="hf", verify=True, workers=1)
    expected = logits_of_text(load_class(source, WHOLE))
    assert expected.shape[-1] == 127
    for output in outputs:
        assert_same_files(output, source)
        assert torch.equal(logits_of_text(load_class(output, WHOLE)), expected)
    assert (PUBLISHED in weights(source)) is (form == "published")


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["published", "class"])
def test_the_language_model_alone_computes_the_same(
    form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    megaconv.convert(sources[form], tmp_path / "out", saver="hf", text_only=True, verify=True)
    expected = logits_of_text(load_class(sources[form], WHOLE))
    alone = load_class(tmp_path / "out", "InklingForCausalLM")
    assert torch.equal(logits_of_text(alone), expected)


@pytest.mark.oracle
def test_both_forms_give_the_same_language_model(sources: dict[str, Path], tmp_path: Path) -> None:
    for form, source in sources.items():
        megaconv.convert(source, tmp_path / form, saver="hf", text_only=True, workers=1)
    assert_same_files(tmp_path / "published", tmp_path / "class")


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("saver", ["dcp", "deepspeed"])
def test_what_transformers_saves_afterwards_is_the_same_model(
    name: str, saver: str, tmp_path: Path
) -> None:
    create_text(CONVERTED[name], tmp_path / "hf")
    assert_comes_back(tmp_path / "hf", saver, tmp_path)


@pytest.mark.oracle
def test_layers_for_multi_token_prediction_are_left_out_of_a_language_model_and_kept_in_a_whole_one(
    sources: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = json.loads((sources["published"] / "config.json").read_text())
    further = {"model.mtp.layers.0.proj.weight": torch.ones(4, 4)}
    held = weights(sources["published"])
    source = write_model_files(tmp_path / "hf", {**held, **further}, raw)
    megaconv.convert(source, tmp_path / "out", saver="hf", workers=1)
    assert weights(tmp_path / "out").keys() == held.keys() | further.keys()
    megaconv.convert(source, tmp_path / "alone", saver="hf", text_only=True, workers=1)
    assert not any(".mtp." in name for name in weights(tmp_path / "alone"))
    text = tmp_path / "text"
    create_text(CONVERTED[NAME], text)
    save_file({**weights(text), **further}, text / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(text, tmp_path / "short", saver="hf", workers=1)
    assert "layers for multi-token prediction are not converted" in caplog.text


@pytest.mark.oracle
def test_a_missing_tensor_of_a_whole_model_is_named(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    raw = json.loads((sources["published"] / "config.json").read_text())
    held = weights(sources["published"])
    source = write_model_files(
        tmp_path / "hf", {name: held[name] for name in held if name != PUBLISHED}, raw
    )
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wq_du\.weight"):
        megaconv.convert(source, tmp_path / "out", saver="hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.oracle
def test_quantized_files_have_no_family(sources: dict[str, Path], tmp_path: Path) -> None:
    """No source gives the names of their scales. They are read under their own names."""
    raw = json.loads((sources["published"] / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    source = write_model_files(tmp_path / "hf", weights(sources["published"]), raw)
    _, config = read_config(source / "config.json", whole=True, own_names=True)
    assert config.own_names is not None


@pytest.mark.oracle
def test_megatron_and_training_are_refused(tmp_path: Path) -> None:
    create_text(CONVERTED[NAME], tmp_path / "hf")
    with pytest.raises(
        CheckpointError, match="InklingForCausalLM has no names in Megatron's formats"
    ):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="core")
    with pytest.raises(CheckpointError, match="inkling_text is converted, but can't be trained yet"):  # fmt: skip
        check_computed(described())


@pytest.mark.oracle
@pytest.mark.parametrize(
    "keys",
    [
        {"layer_types": None, "local_layer_ids": [1, 3]},
        {"layer_types": None},
        {"mlp_layer_types": None, "dense_mlp_idx": 2},
        {"mlp_layer_types": None},
        {"dense_intermediate_size": 40, "intermediate_size": 18},
        {"embedding_multiplier": 4.0},
        {"sliding_window": 5, "sliding_window_size": 5, "sconv_kernel_size": 2},
    ],
)
def test_published_keys_mean_what_transformers_class_says(keys: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    raw = {key: value for key, value in {**TEXT, **keys}.items() if value is not None}
    table = family(NAME)
    saved = json.loads(transformers.InklingTextConfig(**raw).to_json_string(use_diff=False))
    assert not lost_fields(table.read_hf(raw), table.read_hf(saved))


def test_the_shapes_of_layers_with_a_window_are_their_own() -> None:
    model = family(NAME).read_hf(TEXT)
    assert model.layer_sizes(0) == {"heads": 6, "kv_heads": 3, "head_dim": 6, "relative_extent": 7}
    assert model.layer_sizes(1) == {}


def test_a_new_config_is_read_back_as_the_same_model() -> None:
    table = family(NAME)
    for raw in (TEXT, {**TEXT, "layer_types": ["hybrid"] * 4}, DEFAULT):
        written = table.write_hf(table.read_hf(raw))
        assert json.loads(json.dumps(written)) == written
        assert not lost_fields(table.read_hf(raw), table.read_hf(written))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layer_types": ["hybrid"]}, "layer_types lists 1 layer, the model has 4"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
        ({"layer_types": None, "local_layer_ids": 3}, "local_layer_ids should list numbers of layers, found 3"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types has 'moe'"),
        ({"swa_num_key_value_heads": 3}, "swa_num_key_value_heads 3 doesn't divide swa_num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 doesn't divide num_attention_heads 8"),
        ({"sliding_window": 0}, "sliding_window_size should be a positive number, found 0"),
        ({"sliding_window_size": 9}, "sliding_window_size is 9 and sliding_window 16, two names for one thing"),
        ({"d_rel": 0}, "d_rel should be a positive number"),
        ({"rel_extent": "far"}, "rel_extent should be a positive number"),
        ({"n_shared_experts": 0}, "n_shared_experts should be a positive number, found 0"),
        ({"shared_expert_sink": False}, "shared_expert_sink False is not supported"),
        ({"logits_mup_width_multiplier": 0.0}, "logits_mup_width_multiplier 0.0 is not supported"),
        ({"log_scaling_n_floor": 0}, "log_scaling_n_floor should be a positive number, found 0"),
        ({"log_scaling_n_floor": 5, "log_scaling_alpha": "much"}, "log_scaling_alpha should be a number"),
        ({"unpadded_vocab_size": -1}, "unpadded_vocab_size should be a positive number"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)  # fmt: skip
def test_a_config_that_no_inkling_has_is_refused_with_its_key(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        described(**keys)
    assert "\n" not in str(refused.value)


def test_it_is_not_quantized_since_no_family_describes_such_files(tmp_path: Path) -> None:
    """The names of scales in them aren't known. megaconv could not read its own output."""
    source = write_model(NAME, tmp_path / "hf", Random(1))
    words = ("--saver", "hf", "--quantize", "fp8-per-channel")
    outcome = run("convert", source, tmp_path / "out", *words)
    assert_refused(outcome, 2, "--quantize fp8-per-channel", "of inkling_text aren't known")
