"""Muse Glimmer and Muse Spark: transformers computes the same from what is written, with the whole model and with its language model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import CheckpointError
from megaconv.families import family
from tests.config_models import raw_config
from tests.whole_models import (
    WholeModel,
    assert_same_files,
    elements_by_table,
    elements_of_class,
    hidden_states,
    logits_of_text,
    weights,
    write_model_files,
)

SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 96, "rms_norm_eps": 1e-3, "post_norm_eps": 1e-2,
    "sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_hidden_size": 20, "routed_scaling_factor": 1.5,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
}  # fmt: skip
VISION = {
    "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
AUDIO = {
    "patch_sizes": [4],
    "hidden_sizes": [8],
    "depths": [1],
    "num_hidden_layers": 1,
    "out_hidden_size": 32,
}
OTHERS: dict[str, dict[str, Any]] = {
    "one less": {"sliding_window": 6},
    "epsilon": {"rms_norm_eps": 1e-5},
    "epsilon after sublayers": {"post_norm_eps": 1e-5},
    "factor of queries": {"qk_scale_factor": 2.0},
    "factor of logits": {"output_multiplier": 0.3},
    "cap": {"final_logit_softcapping": 2.0},
    "rope in all layers": {"layer_rope_theta": [700.0] * 5},
    "windows in all layers": {"layer_types": ["sliding_attention"] * 5},
    "base": {"rope_parameters": {"rope_type": "default", "rope_theta": 90.0}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 700.0, "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 24}},
}  # fmt: skip
OTHER_EXPERTS: dict[str, dict[str, Any]] = {
    "one expert": {"num_experts_per_tok": 1},
    "scale": {"routed_scaling_factor": 1.0},
    "temperature": {"residual_gate_temperature": 1.0},
}


def whole_model(kind: str, text: dict[str, Any], further: dict[str, Any]) -> WholeModel:
    """Muse Glimmer or Muse Spark. further: the parts of config.json beside text_config."""
    name = f"{kind.lower()}_text"
    base = f"{name[:4]}_{name[4:]}"
    stated = {"model_type": base, **text}

    def config(**settings: Any) -> dict[str, Any]:
        return {
            "model_type": base.removesuffix("_text"),
            "text_config": {**stated, **settings},
            **further,
        }

    def create(directory: Path, **settings: Any) -> None:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(20)
        made = getattr(transformers, f"{kind}Config")(**config(**settings))
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(made)
        with torch.no_grad():
            for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "inv_freq" not in tensor_name:
                    tensor.normal_(0.0, 0.3)
        model.save_pretrained(directory)

    return WholeModel(kind, base, stated, config, create)


GLIMMER = whole_model(
    "MuseGlimmer",
    SIZES,
    {"vision_config": VISION, "out_hidden_size": 96, "projector_hidden_size": 40},
)
SPARK = whole_model(
    "MuseSpark",
    SIZES | EXPERTS,
    {"vision_config": VISION, "audio_config": AUDIO,
     "out_hidden_size": 96, "projector_hidden_size": 40},
)  # fmt: skip
MODELS = {"glimmer": GLIMMER, "spark": SPARK}
SETTINGS = {"glimmer": OTHERS, "spark": OTHERS | OTHER_EXPERTS}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("muse")
    for name, model in MODELS.items():
        model.create(root / name)
    return {name: root / name for name in MODELS}


@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_with_the_whole_model_and_its_language_model(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    model, source = MODELS[name], sources[name]
    whole, dcp, text, back = (tmp_path / word for word in ("whole", "dcp", "text", "back"))
    megaconv.convert(source, whole, saver="hf", verify=True, workers=1)
    megaconv.convert(source, dcp, saver="dcp", text_only=True, workers=1)
    megaconv.convert(dcp, text, saver="hf", verify=True, workers=1)
    megaconv.convert(text, back, saver="hf", base=source, workers=1)
    original = model.load(source)
    for output in (whole, back):
        assert_same_files(output, source)
    assert torch.equal(logits_of_text(model.load(whole)), logits_of_text(original))
    expected = hidden_states(original.model.language_model)
    alone = model.load(text, "TextModel")
    assert torch.equal(hidden_states(alone), expected)
    alone.save_pretrained(tmp_path / "saved")
    megaconv.convert(tmp_path / "saved", tmp_path / "again", saver="hf", verify=True, workers=1)
    assert torch.equal(hidden_states(model.load(tmp_path / "again", "TextModel")), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
def test_each_setting_is_written_so_that_transformers_computes_the_same(
    name: str, sources: dict[str, Path]
) -> None:
    MODELS[name].assert_settings_are_written(sources[name], SETTINGS[name])


@pytest.mark.oracle
def test_a_tensor_of_another_shape_is_refused_by_name(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    tensors = weights(sources["spark"])
    gate = "model.language_model.layers.1.post_attention_residual_gate.gate"
    raw = SPARK.config()
    damaged = write_model_files(tmp_path / "hf", tensors | {gate: torch.ones(3)}, raw)
    with pytest.raises(CheckpointError, match=r"post_attention_residual_gate.gate is \[3\]"):
        megaconv.convert(damaged, tmp_path / "out", saver="hf", text_only=True, workers=1)


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("glimmer", {"attention_bias": True}, "attention_bias True is not supported"),
    ("glimmer", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
    (
        "glimmer",
        {"layer_rope_theta": [0, 5.0, 0, 0]},
        "layer_rope_theta has 5.0; this architecture",
    ),
    ("glimmer", {"layer_rope_theta": [0]}, "layer_rope_theta lists 1 layer, the model has 4"),
    ("glimmer", {"sliding_window": 0}, "sliding_window should be a positive number, found 0"),
    ("glimmer", {"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
    (
        "glimmer",
        {"final_logit_softcapping": 0.0},
        "final_logit_softcapping should be a positive number, found 0.0",
    ),
    ("glimmer", {"output_multiplier": 0}, "output_multiplier should be a number but 0"),
    ("spark", {"residual_gate_temperature": 0.0}, "residual_gate_temperature 0.0 is not supported"),
    ("spark", {"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types has 'moe'"),
    ("spark", {"moe_hidden_size": 0}, "moe_hidden_size should be a positive number"),
)


@pytest.mark.parametrize(("name", "keys", "words"), REFUSED)
def test_settings_that_transformers_class_does_not_compute_are_refused_by_name(
    name: str, keys: dict[str, Any], words: str
) -> None:
    table = family(MODELS[name].family)
    with pytest.raises(CheckpointError, match=words):
        table.read_hf(raw_config(table.name, **keys))


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "billions"), [("glimmer", 27.9), ("spark", 816)])
def test_a_model_of_transformers_default_sizes_has_as_many_parameters_as_its_class(
    name: str, billions: float
) -> None:
    """These are the sizes of Muse Glimmer 30B, with its vision encoder, and of Muse Spark 816B."""
    transformers, model = pytest.importorskip("transformers"), MODELS[name]
    config = getattr(transformers, f"{model.classes}TextConfig")()
    counted = elements_by_table(model.family, config.to_dict())
    head = config.vocab_size * config.hidden_size
    assert counted == head + elements_of_class(f"{model.classes}TextModel", config)
    assert counted / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "keys",
    [{}, {"rope_parameters": {}}, {"rope_parameters": {"rope_type": "default"}},
     {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}],
)  # fmt: skip
def test_a_base_that_a_file_lacks_is_that_of_transformers_class(
    name: str, keys: dict[str, Any]
) -> None:
    """Muse Spark has another base if there is an object of rope keys."""
    transformers, model = pytest.importorskip("transformers"), MODELS[name]
    raw = {key: value for key, value in model.text.items() if key != "rope_parameters"} | keys
    theirs = getattr(transformers, f"{model.classes}TextConfig")(**raw).rope_parameters
    assert family(model.family).read_hf(raw).positions.theta == theirs["rope_theta"]
