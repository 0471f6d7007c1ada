"""ERNIE 4.5 VL, whose layers have one mixture of experts for text and one for images: transformers computes the same from what
is written, for text and for images."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import megaconv
from megaconv.commands.inspected import Inspection
from megaconv.errors import CheckpointError, NotExpressible
from megaconv.families import family, read_config
from megaconv.model.fields import fields_of
from megaconv.model.ir import Header, Key, TensorInfo
from megaconv.model.table import canonical_shapes
from megatron_lite.models.trainable import check_computed
from tests.config_models import raw_config
from tests.conftest import FIXTURES
from tests.whole_models import assert_same_files, load_class, logits_of_text, tokens, weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "ernie4_5_vl_moe_text"
TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "rms_norm_eps": 1e-3, "moe_intermediate_size": [24, 12], "moe_k": 2,
    "moe_num_experts": 4, "moe_num_shared_experts": 2, "mlp_layer_types": ["sparse", "dense", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [3, 3, 2]},
}  # fmt: skip
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
}
IMAGE, START, END = 120, 121, 122
OTHERS: dict[str, dict[str, Any]] = {
    "the same": {},
    "one expert": {"moe_k": 1},
    "epsilon": {"rms_norm_eps": 1e-5},
    "base": {"rope_parameters": {**TEXT["rope_parameters"], "rope_theta": 700.0}},
    "sections": {"rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [2, 2, 4]}},
}
"""Models with the same weights."""


def whole_config(**text: Any) -> dict[str, Any]:
    return {
        "text_config": {**TEXT, **text},
        "vision_config": VISION,
        "image_token_id": IMAGE,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
    }


def create(directory: Path, **text: Any) -> None:
    """Save a whole model, with biases that decide about experts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(20)
    config = transformers.Ernie4_5_VLMoeConfig(**whole_config(**text))
    model = transformers.Ernie4_5_VLMoeForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ernie") / "hf"
    create(path)
    return path


def load(
    directory: Path, kind: str = "ForConditionalGeneration", **options: Any
) -> "PreTrainedModel":
    return load_class(directory, f"Ernie4_5_VLMoe{kind}", **options)


def sees(model: "PreTrainedModel") -> torch.Tensor:
    """Logits for a text with an image of 4 tokens in it."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(7, 110, (8,), generator=generator).tolist()
    seen = torch.tensor([[*words, START, *[IMAGE] * 4, END, *words]])
    of_images = (seen == IMAGE).int()
    routed = ((seen >= IMAGE) & (seen <= END)).int()
    pixels = torch.randn(16, 48, generator=generator)
    with torch.no_grad():
        found = model(
            input_ids=seen, mm_token_type_ids=of_images, moe_mm_token_type_ids=routed, pixel_values=pixels,
            image_grid_thw=torch.tensor([[1, 4, 4]]),
        )  # fmt: skip
    logits: torch.Tensor = found.logits
    return logits


def hidden_states(model: Any) -> torch.Tensor:
    """The hidden states of a language model. Every third token is of an image and has its own position."""
    of_images = (torch.arange(24) % 3 == 0).int().expand(2, -1)
    places = torch.stack([torch.arange(24), torch.arange(24) // 2, torch.arange(24) // 3])
    positions = places[:, None].expand(3, 2, -1)
    with torch.no_grad():
        found: torch.Tensor = model(
            input_ids=tokens(), moe_mm_token_type_ids=of_images, position_ids=positions
        ).last_hidden_state
    return found


@pytest.mark.oracle
def test_transformers_computes_the_same_logits_for_text_and_for_images(
    source: Path, tmp_path: Path
) -> None:
    original = load(source)
    outputs = tmp_path / "hf", tmp_path / "again"
    assert megaconv.convert(source, outputs[0], saver="hf", verify=True, workers=1).verified
    megaconv.convert(source, tmp_path / "dcp", saver="dcp", verify=True, workers=1)
    megaconv.convert(tmp_path / "dcp", outputs[1], saver="hf", verify=True, workers=1)
    for output in outputs:
        assert_same_files(output, source)
        found = load(output)
        assert torch.equal(sees(found), sees(original))
        assert torch.equal(logits_of_text(found), logits_of_text(original))
    names = weights(source)
    assert names["model.layers.0.mlp.experts.7.up_proj.weight"].shape == (12, 64)
    assert names["model.layers.0.mlp.moe_statics.e_score_correction_bias"].shape == (2, 4)


@pytest.mark.oracle
def test_transformers_computes_the_same_with_the_language_model_alone(
    source: Path, tmp_path: Path
) -> None:
    """transformers has a class of it without a head. Each config.json is written from a description alone."""
    transformers = pytest.importorskip("transformers")
    output, back = tmp_path / "text", tmp_path / "back"
    report = megaconv.convert(source, output, saver="hf", verify=True, workers=1, text_only=True)
    assert report.verified
    expected = hidden_states(load(source).model.language_model)
    assert torch.equal(hidden_states(load(output, "TextModel")), expected)
    megaconv.convert(output, back, saver="hf", verify=True, workers=1, base=source)
    assert_same_files(back, source)
    table = family(NAME)
    for words, settings in OTHERS.items():
        keys = {**TEXT, **settings}
        stated = transformers.Ernie4_5_VLMoeTextConfig(**keys)
        other = hidden_states(load(output, "TextModel", config=stated))
        assert torch.equal(other, expected) is not bool(settings), words
        written = table.write_hf(table.read_hf(keys))
        (output / "config.json").write_text(json.dumps(written))
        assert torch.equal(hidden_states(load(output, "TextModel")), other), words


@pytest.mark.oracle
def test_the_names_of_transformers_class_are_read_and_kept(source: Path, tmp_path: Path) -> None:
    """Files of the class's state_dict have these names."""
    held = tmp_path / "held"
    held.mkdir()
    (held / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {name: each.clone() for name, each in load(source).state_dict().items()}
    del tensors["lm_head.weight"]
    save_file(tensors, held / "model.safetensors", metadata={"format": "pt"})
    output = tmp_path / "out"
    assert megaconv.convert(held, output, saver="hf", verify=True, workers=1).verified
    assert_same_files(output, held)
    texts = []
    for path in (held, source):
        _, whole = read_config(path / "config.json", text_only=True)
        texts.append(tmp_path / f"text-{path.name}")
        megaconv.convert(path, texts[-1], saver="hf", workers=1, text_only=True)
        assert whole.experts.vision_ffn == 12
    assert_same_files(*texts)


def test_the_published_model_has_29_billion_parameters_and_3_are_active() -> None:
    """transformers' class has as many. The encoder and the projector have 0.8 billion of them."""
    models = json.loads((FIXTURES / "published_models.json").read_text())
    (raw,) = (each["config"] for each in models if "ERNIE-4.5-VL-28B" in each["model"])
    table = family(NAME)
    config = table.read_hf(raw)
    shapes = canonical_shapes(table.rows, config)
    manifest = {Key(name): TensorInfo(shape, "bfloat16") for name, shape in shapes.items()}
    header = Header(config, manifest)
    experts = Inspection("published", "hf", header).experts()
    assert header.parameters == 28_624_635_776
    assert experts is not None
    assert experts["active_parameters"] == 3_356_575_616


OLDER = {
    "model_type": "ernie4_5_moe_vl", "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "moe_num_experts": [4, 4],
    "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28], "moe_layer_interval": 2, "rope_theta": 5000.0,
    "freq_allocation": 2, "moe_num_shared_experts": None, "im_patch_id": IMAGE, "spatial_conv_size": 2, "tie_word_embeddings": True,
    "moe_use_aux_free": True, "vision_config": {"depth": 1},
}  # fmt: skip
"""Keys of Baidu's own class, for a model whose second and fourth layer have experts."""


def older_keys(**keys: Any) -> dict[str, Any]:
    newer = {"mlp_layer_types", "rope_parameters", "moe_num_shared_experts"}
    kept = {key: value for key, value in TEXT.items() if key not in newer}
    return {**kept, "num_hidden_layers": 4, **OLDER, **keys}


def test_a_config_json_in_the_keys_of_baidus_class_is_the_same_model(tmp_path: Path) -> None:
    """The output of --text-only has transformers' keys."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(older_keys()))
    table, found = read_config(path, text_only=True)
    newer = {"mlp_layer_types": ["dense", "sparse"] * 2, "num_hidden_layers": 4}
    expected = table.read_hf({**TEXT, **newer, "moe_num_shared_experts": 0})
    assert fields_of(found) == fields_of(expected)
    written = json.loads(table.config_json(found))
    assert written["model_type"] == NAME
    assert written["moe_num_experts"] == 4
    assert written["rope_scaling"] == {"rope_type": "default", "mrope_section": [3, 3, 2]}
    assert not {"freq_allocation", "moe_layer_start_index", "im_patch_id"} & written.keys()


@pytest.mark.oracle
def test_published_files_with_these_keys_are_converted(tmp_path: Path) -> None:
    """Their encoder's names have no `model.`; the weights are otherwise those that transformers writes."""
    source, older, output = (tmp_path / name for name in ("hf", "older", "out"))
    create(source, num_hidden_layers=2, mlp_layer_types=["dense", "sparse"])
    older.mkdir()
    encoder = "model.vision_model."
    held = {
        name.removeprefix("model.") if name.startswith(encoder) else name: tensor
        for name, tensor in weights(source).items()
    }
    save_file(held, older / "model.safetensors", metadata={"format": "pt"})
    keys = older_keys(num_hidden_layers=2, moe_num_shared_experts=2)
    (older / "config.json").write_text(json.dumps(keys))
    assert megaconv.convert(older, output, saver="hf", verify=True, workers=1).verified
    assert_same_files(output, older)
    assert json.loads((output / "config.json").read_text())["model_type"] == "ernie4_5_moe_vl"
    for path in (source, older):
        megaconv.convert(path, tmp_path / f"{path.name}-text", saver="hf", workers=1, text_only=True)  # fmt: skip
    assert_same_files(tmp_path / "older-text", tmp_path / "hf-text")
    inside = load(source).model.language_model
    alone = load(tmp_path / "older-text", "TextModel")
    text = json.loads((tmp_path / "older-text" / "config.json").read_text())
    assert text["rms_norm_eps"] == TEXT["rms_norm_eps"]
    assert torch.equal(hidden_states(alone), hidden_states(inside))


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"moe_num_experts": [6, 4]}, "only as many experts for images as for text"),
    ({"moe_num_experts": "many"}, "moe_num_experts should be a number, or one for text"),
    ({"moe_intermediate_size": [24]}, "one for text and one for images"),
    ({"moe_norm_min": 0.5}, "moe_norm_min 0.5 is not supported"),
    ({"use_bias": True}, "use_bias True is not supported"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope scaling linear is not supported"),
    ({"rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section should be three numbers of 1 or more"),
    ({"rope_scaling": {"mrope_section": 7}}, "mrope_section should be three numbers of 1 or more"),
    ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types has 'moe'"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types should list 4 layers"),
    ({"mlp_layer_types": None, "moe_layer_start_index": [1, 2]}, "experts in different layers"),
    ({"rope_3d": False}, "rope_3d False is not supported"),
    ({"moe_use_token_type_bias": True}, "moe_use_token_type_bias True"),
)  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_models_that_transformers_class_does_not_compute_are_refused_by_name(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family(NAME).read_hf(raw_config(NAME, **keys))


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["fp8-block", "fp8-per-channel", "nvfp4"])
def test_no_router_is_quantized(kind: str, source: Path, tmp_path: Path) -> None:
    """Neither that of text nor that of images."""
    output = tmp_path / "out"
    options: dict[str, Any] = {"quantize": kind, "text_only": True, "workers": 1}
    megaconv.convert(source, output, saver="hf", **options)
    scaled = {name for name in weights(output) if "_scale" in name}
    assert any("shared_experts.up_proj.weight" in name for name in scaled)
    assert not [name for name in scaled if "gate.weight" in name]


def test_the_trainer_and_megatrons_formats_refuse_the_model(source: Path, tmp_path: Path) -> None:
    _, config = read_config(source / "config.json", text_only=True)
    with pytest.raises(NotExpressible, match="two mixtures of experts in a layer"):
        check_computed(config)
    for words, savers in (({}, "hf or dcp"), ({"text_only": True}, "hf, dcp or deepspeed")):
        # 3 layers can't be divided over 2 stages, but no other size would help.
        for sizes in ({}, {"pp": 2}):
            with pytest.raises(CheckpointError, match=f"no names in .* choose --saver {savers}$"):
                megaconv.convert(source, tmp_path / "core", saver="core", **words, **sizes)
    assert not list(tmp_path.iterdir())
