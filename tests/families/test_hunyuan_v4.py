"""Hunyuan V4 under the names of its published files, of transformers' class, and of what save_pretrained makes of both."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.families import family
from megaconv.model.layout import Chunk, Layout
from megaconv.model.meaning import lost_fields
from megaconv.model.naming import HF
from megaconv.model.natives import native_tensors
from tests.config_models import raw_config
from tests.families.test_published_models import PUBLISHED
from tests.transformers_oracle import CONVERTED, compute, create, load
from tests.whole_models import (
    assert_same_files,
    hidden_states,
    load_class,
    logits_of_text,
    raw_config_of,
    weights,
    write_model_files,
)

Tensors = dict[str, torch.Tensor]
PREVIEW = PUBLISHED["tencent/Hy4-preview"]["config"]
IN_FLOAT32 = (
    "k_norm.weight",
    "k_norm.bias",
    "weights_proj.weight",
    "mlp.gate.weight",
    "e_score_correction_bias",
    "lm_head.weight",
    "_param",
)
"""Endings of the names of tensors that transformers keeps in float32, beside those of residual streams."""  # fmt: skip


def test_the_published_model_has_as_many_tensors_and_elements_as_public_projects_count() -> None:
    """Its files hold 2006 tensors, 27 of them for multi-token prediction."""
    table = family("hy_v4")
    config = table.read_hf(PREVIEW)
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    natives = list(native_tensors(table.rows, config, HF, Layout(), 0, whole, config.vocab))
    assert len(natives) == 2006 - 27
    assert sum(prod(each.shape) for each in natives if ".hc_" in each.name) == 30_770_717
    shapes = {each.name: each.shape for each in natives}
    assert shapes["model.layers.5.hc_attn_layer.hc_pre.hc_fn"] == (8, 24576)
    assert shapes["model.hc_head.hc_head_fn"] == (4, 24576)
    assert shapes["model.layers.5.mlp.experts.gate_up_proj"] == (256, 4096, 6144)
    assert config.layers_with("own_index") == (0, *range(1, 78, 4))


@pytest.mark.oracle
def test_transformers_and_megaconv_read_the_same_from_the_published_keys() -> None:
    transformers = pytest.importorskip("transformers")
    table = family("hy_v4")
    config = table.read_hf(PREVIEW)
    theirs = transformers.HYV4Config(**PREVIEW).to_dict()
    assert not lost_fields(config, table.read_hf(theirs))
    ours = transformers.HYV4Config(**table.write_hf(config)).to_dict()
    for key in ("layer_types", "indexer_types", "mlp_layer_types", "num_key_value_heads", "rope_parameters"):  # fmt: skip
        assert ours[key] == theirs[key], key


def published(name: str) -> str:
    """The published name of a tensor of transformers' class."""
    for old, new in (
        ("attn_hc.", "hc_attn_layer.hc_pre.hc_"),
        ("ffn_hc.", "hc_mlp_layer.hc_pre.hc_"),
        ("hc_head.hc_", "hc_head.hc_head_"),
        ("self_attn.gate_proj", "self_attn.linear_gate"),
        ("self_attn.sinks", "self_attn.learnable_sink_param"),
    ):
        name = name.replace(old, new)
    return name


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model under each kind of names, with the dtypes that transformers gives its tensors."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("forms")
    create(CONVERTED["hy_v4"], root / "float32")
    model = transformers.HYV4ForCausalLM.from_pretrained(root / "float32", dtype=torch.bfloat16)
    model.save_pretrained(root / "saved")
    of_class = {name: each.contiguous() for name, each in model.state_dict().items()}
    made: dict[str, Tensors] = {
        "published": {published(name): tensor for name, tensor in of_class.items()},
        "class": of_class,
    }
    for form, tensors in made.items():
        (root / form).mkdir()
        (root / form / "config.json").write_bytes((root / "saved" / "config.json").read_bytes())
        save_file(tensors, root / form / "model.safetensors", metadata={"format": "pt"})
    return {form: root / form for form in ("saved", *made)}


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["saved", "class", "published"])
def test_each_kind_of_names_becomes_the_published_names_with_every_bit(
    form: str, forms: dict[str, Path], tmp_path: Path
) -> None:
    megaconv.convert(forms[form], tmp_path / "dcp", saver="dcp", workers=1)
    megaconv.convert(tmp_path / "dcp", tmp_path / "hf", saver="hf", verify=True, workers=1)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    expected = load_file(forms["published"] / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        is_float32 = ".hc_" in name or name.endswith(IN_FLOAT32)
        assert tensor.dtype == (torch.float32 if is_float32 else torch.bfloat16), name
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name
    before, after = (load(path) for path in (forms["saved"], tmp_path / "hf"))
    tokens = torch.randint(7, 100, (1, 24), generator=torch.Generator().manual_seed(3))
    assert torch.equal(compute(after, tokens), compute(before, tokens))


@pytest.mark.oracle
def test_layers_for_further_tokens_are_left_out_with_a_warning(
    forms: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = load_file(forms["published"] / "model.safetensors")
    further = {f"model.mtp_layers.0.{name}.weight": torch.ones(3) for name in ("enorm", "eh_proj")}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((forms["published"] / "config.json").read_bytes())
    save_file(weights | further, source / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(source, tmp_path / "hf", saver="hf", verify=True, workers=1)
    assert "layers for multi-token prediction are not converted, 2 tensors" in caplog.text
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == weights.keys()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["fp8-block", "fp8-per-channel", "nvfp4"])
def test_routers_indexers_streams_and_sinks_are_not_quantized(
    kind: str, forms: dict[str, Path], tmp_path: Path
) -> None:
    megaconv.convert(forms["published"], tmp_path / "hf", saver="hf", quantize=kind, workers=1)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    scaled = {name.rpartition(".")[0] for name in written if "_scale" in name and ".hc_" not in name}  # fmt: skip
    assert "model.layers.1.mlp.shared_experts.up_proj" in scaled
    assert "model.layers.0.self_attn.linear_gate" in scaled
    kept = {"gate", "indexer", "hc_attn_layer", "hc_mlp_layer", "hc_head", "embed_tokens"}
    kept |= {"lm_head", "learnable_sink_param", "input_layernorm", "kv_a_layernorm"}
    assert not [name for name in scaled if set(name.split(".")) & kept]


def test_keys_that_transformers_ignores_are_read_if_they_say_what_it_computes() -> None:
    table, raw = family("hy_v4"), raw_config("hy_v4")
    older = {"num_key_value_heads": 1, "layer_types": ["deepseek_sparse_attention"] * 4}
    older |= {"enable_ihc": True, "num_nextn_predict_layers": 1, "learnable_sink_init": 0.5}
    assert not lost_fields(table.read_hf(raw), table.read_hf(raw | older))
    assert json.loads(json.dumps(table.write_hf(table.read_hf(raw | older))))["layer_types"] == ["indexed_attention"] * 4  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["published", "saved by transformers 5.24"])
def test_the_language_model_of_hunyuan_v4_vl_is_converted_alone_and_with_its_encoder(
    form: str, forms: dict[str, Path], tmp_path: Path
) -> None:
    """Published files name the language model's tensors as those of Hunyuan V4; save_pretrained changes three names."""
    text = raw_config_of(forms["published"])
    rope = {**text["rope_parameters"], "mrope_section": [1, 1, 0]}
    inside = {**text, "model_type": "hy_v4_vl_text", "rope_parameters": rope}
    raw = {"architectures": ["HYV4VLForConditionalGeneration"], "model_type": "hy_v4_vl",
           "text_config": inside, "vision_config": {}, "tie_word_embeddings": False}  # fmt: skip
    tower = {"vit.layers.0.self_attn.q_proj.weight": torch.ones(3, 4)}
    held = weights(forms["published"]) | tower
    published = write_model_files(tmp_path / "published", held, raw)
    if form != "published":
        held = {name.replace(".hc_head_", ".hc_pre.hc_head_"): each for name, each in held.items()}
    whole = write_model_files(tmp_path / "whole", held, raw)
    alone, copy = tmp_path / "alone", tmp_path / "copy"
    report = megaconv.convert(whole, alone, saver="hf", text_only=True, workers=1)
    found = report.header.config
    assert (found.family, found.latent.norm_epsilon) == ("hy_v4_vl_text", None)
    megaconv.convert(whole, copy, saver="hf", verify=True, workers=1)
    assert_same_files(copy, published)
    assert_same_files(alone, forms["published"])


@pytest.mark.oracle
def test_transformers_computes_the_same_with_a_hunyuan_v4_vl(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "HYV4VLConfig"):
        pytest.skip("transformers 5.24 is the first release with this class")
    rope = {"rope_type": "default", "rope_theta": 700.0, "mrope_section": [1, 1, 0]}
    text = {**CONVERTED["hy_v4"].settings, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4,
            "num_attention_heads": 8, "vocab_size": 131, "rms_norm_eps": 1e-3, "pad_token_id": 6, "rope_parameters": rope}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
              "patch_size": 14, "out_hidden_size": 64}  # fmt: skip
    torch.manual_seed(20)
    model = transformers.HYV4VLForConditionalGeneration(
        transformers.HYV4VLConfig(text_config=text, vision_config=vision)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    source, whole, alone = (tmp_path / name for name in ("hf", "whole", "alone"))
    model.float().save_pretrained(source)
    megaconv.convert(source, whole, saver="hf", verify=True, workers=1)
    megaconv.convert(source, alone, saver="hf", verify=True, workers=1, text_only=True)
    original, copy = (
        load_class(path, "HYV4VLForConditionalGeneration") for path in (source, whole)
    )
    assert torch.equal(logits_of_text(copy), logits_of_text(original))
    expected = hidden_states(original.model.language_model)
    assert torch.equal(hidden_states(load_class(alone, "HYV4VLTextModel")), expected)


def test_shared_experts_of_the_multimodal_model_have_the_usual_width_of_routed_ones() -> None:
    """HYV4VLTextConfig has another width than HYV4Config."""
    table, raw = family("hy_v4_vl_text"), raw_config("hy_v4_vl_text")
    del raw["moe_intermediate_size"]
    experts = table.read_hf(raw | {"n_shared_experts": 3}).experts
    assert (experts.ffn, experts.shared_ffn) == (2048, 3 * 2048)
