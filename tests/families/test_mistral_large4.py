"""Mistral Large 4: transformers computes the same from what is written, for text and for images, under the names of published
files and under those of its class."""

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import megaconv
from megaconv.errors import CheckpointError, NotExpressible
from megaconv.families import family, read_config
from megaconv.model.table import canonical_shapes
from megatron_lite.models.trainable import check_computed
from tests.config_models import raw_config
from tests.conftest import FIXTURES
from tests.whole_models import (
    WholeModel,
    assert_same_files,
    hidden_states,
    logits_of_text,
    tokens,
    weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "mistral_large4_text"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 700.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.0,
}
TEXT: dict[str, Any] = {
    "model_type": NAME, "vocab_size": 131, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 12,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "kv_lora_rank": 10, "qk_rope_head_dim": 6, "qk_nope_head_dim": 4, "v_head_dim": 5, "index_topk": 5, "index_head_dim": 8,
    "index_n_heads": 2, "max_position_embeddings": 96, "rms_norm_eps": 1e-3, "rope_parameters": YARN,
    "no_rope_layers": [1, 1, 0, 1, 0, 1], "kv_source_layers": [0, 0, 2, 3, 2, 3],
    "indexer_types": ["full", "shared", "full", "shared", "full", "shared"],
}  # fmt: skip
VISION = {
    "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 1, "num_attention_heads": 2,
    "head_dim": 12, "patch_size": 4, "image_size": 32, "hidden_act": "silu",
}  # fmt: skip
IMAGE = 130
OTHERS: dict[str, dict[str, Any]] = {
    "fewer positions": {"index_topk": 2},
    "one expert": {"num_experts_per_tok": 1},
    "scale": {"routed_scaling_factor": 2.0},
    "groups": {"n_group": 2, "topk_group": 1},
    "epsilon": {"rms_norm_eps": 1e-5},
    "cap": {"final_logit_softcapping": 2.0},
    "base": {"rope_parameters": {**YARN, "rope_theta": 90.0}},
    "the usual factor": {"rope_parameters": {**YARN, "attention_factor": None}},
    "scaled scores": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "no scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    "usual rope": {"rope_parameters": None},
}
"""Models with the same weights."""
OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "defaults": {"no_rope_layers": None, "kv_source_layers": None, "indexer_types": None},
    "a pattern": {"indexer_types": None, "index_topk_pattern": "FFSFSS", "no_rope_layer_interval": 3, "no_rope_layers": None,
                  "kv_source_layers": [0, 1, 2, 1, 1, 2]},
    "a frequency": {"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 2, "mlp_layer_types": ["sparse", "dense"] * 3},
    "dense layers": {"first_k_dense_replace": 3, "n_shared_experts": 2},
}  # fmt: skip
"""Models with other tensors."""


def whole_config(**text: Any) -> dict[str, Any]:
    return {
        "model_type": "mistral_large4",
        "text_config": {**TEXT, **text},
        "vision_config": VISION,
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
    }


def create(directory: Path, *, in_class_names: bool = False, **text: Any) -> None:
    """Save a whole model in float32, with factors on frequencies and numbers that queries grow by."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(20)
    config = transformers.MistralLarge4Config(**whole_config(**text))
    model = transformers.MistralLarge4ForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in name:
                tensor.normal_(1.0 if name.endswith(("norm.weight", "g.bias")) else 0.0, 0.3)
    model.save_pretrained(directory, save_original_format=not in_class_names)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model under the names of published files, and under those of transformers' class."""
    path = tmp_path_factory.mktemp("mistral")
    create(path / "published")
    create(path / "class", in_class_names=True)
    return {"published": path / "published", "class": path / "class"}


MODEL = WholeModel("MistralLarge4", NAME, TEXT, whole_config, create)


def sees(model: "PreTrainedModel") -> torch.Tensor:
    """Logits for a text with an image of 4 tokens in it."""
    words = tokens()[:1, :8]
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    seen = torch.cat([words, torch.full((1, 4), IMAGE), words], dim=1)
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=seen, pixel_values=pixels, image_sizes=torch.tensor([[16, 16]])
        ).logits
    return logits


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["published", "class"])
def test_transformers_computes_the_same_logits_for_text_and_for_images(
    form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source, outputs = sources[form], (tmp_path / "hf", tmp_path / "again")
    assert megaconv.convert(source, outputs[0], saver="hf", verify=True, workers=1).verified
    megaconv.convert(source, tmp_path / "dcp", saver="dcp", verify=True, workers=1)
    megaconv.convert(tmp_path / "dcp", outputs[1], saver="hf", verify=True, workers=1)
    original = MODEL.load(source)
    for output in outputs:
        assert_same_files(output, source)
        found = MODEL.load(output)
        assert torch.equal(sees(found), sees(original))
        assert torch.equal(logits_of_text(found), logits_of_text(original))
    starts = {name.partition(".")[0] for name in weights(source)}
    assert ("lerope" in starts) is (form == "published")


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["published", "class"])
def test_transformers_computes_the_same_with_the_language_model_alone(
    form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """transformers has a class of it without a head. What that class saves is read too."""
    source = sources[form]
    output, again, saved, back = (tmp_path / name for name in ("text", "again", "saved", "back"))
    report = megaconv.convert(source, output, saver="hf", verify=True, workers=1, text_only=True)
    assert report.verified
    expected = hidden_states(MODEL.load(source).model.language_model)
    alone = MODEL.load(output, "TextModel")
    assert torch.equal(hidden_states(alone), expected)
    megaconv.convert(output, back, saver="hf", verify=True, workers=1, base=source)
    assert_same_files(back, source)
    alone.save_pretrained(saved)
    assert weights(saved).keys() == weights(output).keys() - {"lm_head.weight"}
    megaconv.convert(saved, again, saver="hf", verify=True, workers=1)
    assert_same_files(again, saved)
    assert torch.equal(hidden_states(MODEL.load(again, "TextModel")), expected)


@pytest.mark.oracle
def test_each_setting_is_written_so_that_transformers_computes_the_same(
    sources: dict[str, Path],
) -> None:
    MODEL.assert_settings_are_written(sources["class"], OTHERS)


@pytest.mark.oracle
@pytest.mark.parametrize("words", OTHER_LAYERS)
def test_models_with_other_layers_have_the_tensors_that_their_keys_say(
    words: str, tmp_path: Path
) -> None:
    MODEL.assert_layers_are_written(OTHER_LAYERS[words], tmp_path)


@pytest.mark.oracle
def test_a_tied_head_is_not_stored(tmp_path: Path) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    create(source)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    held = weights(source)
    del held["output.weight"]
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    for kind in ({}, {"text_only": True}):
        megaconv.convert(source, output, saver="hf", workers=1, verify=True, overwrite=True, **kind)
        assert not {"output.weight", "lm_head.weight"} & weights(output).keys()
        assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.oracle
def test_another_dtype_leaves_factors_on_frequencies_as_they_are(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "text"
    options: dict[str, Any] = {"dtype": "bf16", "text_only": True, "workers": 1}
    megaconv.convert(sources["published"], output, saver="hf", **options)
    kept = {name for name, tensor in weights(output).items() if tensor.dtype == torch.float32}
    assert kept == {"rotary_emb.alpha"}


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["fp8-block", "fp8-per-channel", "nvfp4"])
def test_routers_indexers_and_numbers_of_heads_are_not_quantized(kind: str, tmp_path: Path) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    create(source, kv_lora_rank=16, moe_intermediate_size=16)
    options: dict[str, Any] = {"quantize": kind, "text_only": True, "workers": 1}
    megaconv.convert(source, output, saver="hf", **options)
    scaled = {name.rpartition(".")[0] for name in weights(output) if "_scale" in name}
    assert {"layers.0.attention.wq", "layers.1.experts.3.w1"} <= scaled
    parts = ("gate", "indexer", "norm", "ssmax_scaling", "embed_tokens", "lm_head", "rotary_emb")
    assert not [name for name in scaled if set(name.split(".")) & set(parts)]


SIX: dict[str, Any] = {key: TEXT[key] for key in ("num_hidden_layers", "no_rope_layers", "kv_source_layers", "indexer_types")}  # fmt: skip
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"attention_bias": True}, "attention_bias True is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"num_key_value_heads": 4}, "num_key_value_heads 4 is not supported in this architecture, only num_attention_heads 8"),
    ({"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
    ({"final_logit_softcapping": 0.0}, "final_logit_softcapping should be a positive number, found 0.0"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers lists 2 layers, the model has 4"),
    ({"kv_source_layers": [0, 1]}, "kv_source_layers lists 2 layers, the model has 4"),
    ({"kv_source_layers": [0, 2, 2, 3]}, "gives layer 1 the source 2"),
    ({"kv_source_layers": [0, 0, 1, 3], "no_rope_layers": [1] * 4}, "gives layer 2 the source 1"),
    ({**SIX, "kv_source_layers": [0, 1, 2, 2, 4, 5]}, "the last source that no_rope_layers makes like it is None"),
    ({**SIX, "kv_source_layers": [0, 1, 2, 0, 4, 1]}, "the last source that no_rope_layers makes like it is 1"),
    ({"indexer_types": ["shared", "full", "full", "full"]}, "first layer can't share positions"),
    ({"indexer_types": ["full"]}, "indexer_types lists 1 layer, the model has 4"),
    ({"indexer_types": None, "index_topk_pattern": "FSXS"}, "indexer_types has 'X'"),
    ({"indexer_types": None, "index_topk_freq": "often"}, "index_topk_freq and index_skip_topk_offset should be numbers"),
    ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types has 'moe'"),
)  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_models_that_transformers_class_does_not_compute_are_refused_by_name(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family(NAME).read_hf(raw_config(NAME, **keys))


def test_the_published_model_has_a_trillion_parameters_and_52_billion_are_active() -> None:
    """Those of the embedding aren't counted as active. The published name has both numbers."""
    models = json.loads((FIXTURES / "published_models.json").read_text())
    (raw,) = (each["config"] for each in models if "Mistral-Large-4" in each["model"])
    table = family(NAME)
    config = table.read_hf(raw)
    assert config.layers_with("!rotating") == tuple(range(3, 72, 4))
    assert config.layers_with("dense") == (0,)
    shapes = canonical_shapes(table.rows, config)
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    inactive = of_experts * (1 - config.experts.per_token / config.experts.count)
    assert total / 1e9 == pytest.approx(1050, rel=1e-3)
    assert (total - inactive - sizes["embed.weight"]) / 1e9 == pytest.approx(52, rel=0.01)


def test_the_trainer_and_megatrons_formats_refuse_the_model(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    _, config = read_config(sources["class"] / "config.json", text_only=True)
    with pytest.raises(NotExpressible, match="share latent keys and values"):
        check_computed(config)
    with pytest.raises(
        CheckpointError, match=r"no names in .* choose --saver hf, dcp or deepspeed"
    ):
        megaconv.convert(sources["class"], tmp_path / "core", saver="core", text_only=True)
    assert not list(tmp_path.iterdir())
