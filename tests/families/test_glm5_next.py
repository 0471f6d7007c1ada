"""GLM-5.3: transformers computes the same from what is written, for text and for images, under the names of published files
and under those of its class."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import megaconv
from megaconv.errors import CheckpointError, NotExpressible
from megaconv.families import family, read_config
from megaconv.model.fields import fields_of
from megaconv.model.meaning import lost_fields
from megatron_lite.models.trainable import check_computed
from tests.config_models import raw_config
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

NAME = "glm5_next_text"
TEXT: dict[str, Any] = {
    "model_type": NAME, "vocab_size": 131, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 12,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "v_head_dim": 5, "index_topk": 6, "index_head_dim": 8,
    "index_n_heads": 2, "index_kpool": 3, "max_position_embeddings": 96, "rms_norm_eps": 1e-3, "hc_mult": 3, "hc_sinkhorn_iters": 3,
    "swiglu_limit": 0.4, "linear_head_dim": 6, "linear_num_heads": 3, "linear_conv_kernel_dim": 3, "pad_token_id": 0,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "indexer_types": ["full", "full", "shared", "full", "full"], "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
}  # fmt: skip
VISION = {
    "model_type": "glm5_next_vision", "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "patch_size": 4,
    "spatial_merge_size": 2, "out_hidden_size": 32, "projection_intermediate_size": 24, "image_size": 16,
}  # fmt: skip
IMAGE = 120
OTHERS: dict[str, dict[str, Any]] = {
    "fewer positions": {"index_topk": 3},
    "no tail": {"index_kpool_always_select_tail": False},
    "one expert": {"num_experts_per_tok": 1},
    "scale": {"routed_scaling_factor": 1.0},
    "weights left as they are": {"norm_topk_prob": False},
    "groups": {"n_group": 2, "topk_group": 1},
    "epsilon": {"rms_norm_eps": 1e-5},
    "limit": {"swiglu_limit": 0.1},
    "one step": {"hc_sinkhorn_iters": 1},
    "epsilon of streams": {"hc_eps": 0.1},
    "another bound": {"linear_lower_bound": -2.0},
    "no bound": {"linear_lower_bound": None},
}
"""Models with the same weights."""
OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "defaults": {"layer_types": None, "indexer_types": None, "mlp_layer_types": None},
    "published keys": {"linear_attn_config": {"num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4, "gate_lower_bound": None},
                       "layer_types": ["deepseek_sparse_attention", "linear_attention"] * 2 + ["linear_attention"],
                       "indexer_types": ["full"] * 5},
    "a pattern": {"layer_types": ["full_attention"] * 5, "indexer_types": None, "index_topk_pattern": "FSFFS", "n_shared_experts": 2},
}  # fmt: skip
"""Models with other tensors."""


def whole_config(**text: Any) -> dict[str, Any]:
    return {
        "model_type": "glm5_next",
        "text_config": {**TEXT, **text},
        "vision_config": VISION,
        "image_token_id": IMAGE,
        "video_token_id": 121,
        "image_start_token_id": 122,
        "image_end_token_id": 123,
    }


def create(directory: Path, *, in_class_names: bool = False, **text: Any) -> None:
    """Save a whole model in bfloat16, with those tensors in float32 that transformers keeps so."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(20)
    kind = transformers.Glm5NextForConditionalGeneration
    model = kind(transformers.Glm5NextConfig(**whole_config(**text)))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in name:
                tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    model.save_pretrained(directory)
    model = kind.from_pretrained(directory, dtype=torch.bfloat16)
    model.save_pretrained(directory, save_original_format=not in_class_names)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model under the names of published files, and under those of transformers' class."""
    path = tmp_path_factory.mktemp("glm")
    create(path / "published")
    create(path / "class", in_class_names=True)
    return {"published": path / "published", "class": path / "class"}


MODEL = WholeModel("Glm5Next", NAME, TEXT, whole_config, create)


def sees(model: "PreTrainedModel") -> torch.Tensor:
    """Logits for a text with an image of 4 tokens in it."""
    words = tokens()[:1, :8]
    pixels = torch.randn(16, 96, generator=torch.Generator().manual_seed(3))
    start, end = torch.tensor([[122]]), torch.tensor([[123]])
    seen = torch.cat([words, start, torch.full((1, 4), IMAGE), end, words], dim=1)
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=seen, pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]]),
            mm_token_type_ids=(seen == IMAGE).int(),
        ).logits  # fmt: skip
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
    held = weights(source)
    assert ("model.language_model.layers.0.hc_attn_fn" in held) is (form == "published")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16, torch.float32}


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
    alone.save_pretrained(saved)
    for held in (output, saved):
        megaconv.convert(held, back, saver="hf", workers=1, base=source, overwrite=True)
        assert weights(back).keys() == weights(source).keys()
        assert torch.equal(logits_of_text(MODEL.load(back)), logits_of_text(MODEL.load(source)))
    megaconv.convert(saved, again, saver="hf", verify=True, workers=1)
    assert weights(again).keys() == weights(output).keys() - {"lm_head.weight"}
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
def test_a_layer_after_the_last_one_is_left_out_with_a_warning(
    sources: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_bytes((sources["published"] / "config.json").read_bytes())
    further = {f"model.language_model.layers.5.{name}.weight": torch.ones(3) for name in ("enorm", "eh_proj")}  # fmt: skip
    save_file(weights(sources["published"]) | further, source / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    megaconv.convert(source, output, saver="hf", verify=True, workers=1, text_only=True)
    assert "layers for multi-token prediction are not converted, 2 tensors" in caplog.text
    assert not [name for name in weights(output) if ".layers.5." in name]


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["fp8-block", "fp8-per-channel", "nvfp4"])
def test_routers_indexers_and_streams_are_not_quantized(kind: str, tmp_path: Path) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    create(source, kv_lora_rank=16, moe_intermediate_size=16)
    options: dict[str, Any] = {"quantize": kind, "text_only": True, "workers": 1}
    megaconv.convert(source, output, saver="hf", **options)
    scaled = {
        name.rpartition(".")[0]
        for name in weights(output)
        if "_scale" in name and ".hc_" not in name
    }
    assert {"model.layers.1.self_attn.q_a_proj", "model.layers.1.mlp.experts.3.up_proj"} <= scaled
    parts = ("gate", "indexer", "embed_tokens", "lm_head", "b_proj", "k_conv1d", "o_norm")
    assert not [name for name in scaled if set(name.split(".")) & set(parts)]


FIVE: dict[str, Any] = {key: TEXT[key] for key in ("num_hidden_layers", "layer_types", "mlp_layer_types")}  # fmt: skip
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"attention_bias": True}, "attention_bias True is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"qk_rope_head_dim": 4}, "qk_rope_head_dim 4 is not supported"),
    ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
    ({"q_lora_rank": 0}, "q_lora_rank should be a positive number"),
    ({"index_topk": 7}, "index_topk 7 is not a multiple of index_kpool 5"),
    ({"index_kpool": 0}, "index_kpool should be a positive number"),
    ({"index_kpool_compress": False}, "index_kpool_compress False is not supported"),
    ({"mla_use_nope": False}, "mla_use_nope False is not supported"),
    ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    ({"swiglu_limit": 0.0}, "swiglu_limit should be a positive number, found 0.0"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'"),
    ({**FIVE, "indexer_types": ["full", "shared", "full", "full", "full"]}, "'shared' in layer 1, and the layer before has no indexer"),
    ({"layer_types": ["indexed_attention"] * 4, "indexer_types": ["full", "shared", "shared", "full"]}, "'shared' in layer 2"),
    ({**FIVE, "layer_types": ["indexed_attention"] * 5, "indexer_types": ["shared", *["full"] * 4]}, "first layer can't share positions"),
    ({"linear_attn_config": 7}, "linear_attn_config should be an object"),
)  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_models_that_transformers_class_does_not_compute_are_refused_by_name(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        family(NAME).read_hf(raw_config(NAME, **keys))


@pytest.mark.oracle
def test_transformers_and_megaconv_have_the_same_defaults() -> None:
    transformers = pytest.importorskip("transformers")
    table = family(NAME)
    theirs = transformers.Glm5NextTextConfig().to_dict()
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    ours = table.read_hf({key: theirs[key] for key in sizes})
    assert not lost_fields(ours, table.read_hf(theirs))
    assert fields_of(ours)["indexer.pool"] == 16


def test_the_trainer_and_megatrons_formats_refuse_the_model(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    _, config = read_config(sources["class"] / "config.json", text_only=True)
    with pytest.raises(NotExpressible, match="indexers that select groups of keys"):
        check_computed(config)
    with pytest.raises(
        CheckpointError, match=r"no names in .* choose --saver hf, dcp or deepspeed"
    ):
        megaconv.convert(sources["class"], tmp_path / "core", saver="core", text_only=True)
    assert not list(tmp_path.iterdir())
