"""DeepSeek V4 under the names of its published files, of transformers' class, and of what save_pretrained makes of both."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.model.fields import fields_of
from megaconv.model.layout import Chunk, Layout
from megaconv.model.meaning import lost_fields
from megaconv.model.naming import HF
from megaconv.model.natives import native_tensors
from tests.families.test_published_models import PUBLISHED
from tests.transformers_oracle import CONVERTED, compute, create, load

NAMES = ("deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro")
BILLIONS = dict(zip(NAMES, (284, 1600), strict=True))
"""Parameters as their publisher rounds them."""
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("name", NAMES)
def test_a_published_model_has_as_many_parameters_as_its_publisher_says(name: str) -> None:
    table, raw = family("deepseek_v4"), PUBLISHED[name]["config"]
    config = table.read_hf(raw)
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    natives = native_tensors(table.rows, config, HF, Layout(), 0, whole, config.vocab)
    trained = sum(prod(each.shape) for each in natives if not each.name.endswith("tid2eid"))
    assert trained / 1e9 == pytest.approx(BILLIONS[name], rel=0.03)


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_transformers_writes_a_published_config_in_keys_that_mean_the_same(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    table, raw = family("deepseek_v4"), PUBLISHED[name]["config"]
    theirs = transformers.DeepseekV4Config(**raw).to_dict()
    assert "compress_ratios" not in theirs
    assert not lost_fields(table.read_hf(raw), table.read_hf(theirs))


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_our_keys_as_it_reads_the_published_ones(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    table, raw = family("deepseek_v4"), PUBLISHED[name]["config"]
    config = table.read_hf(raw)
    expected, found = (
        transformers.DeepseekV4Config(**keys) for keys in (raw, table.write_hf(config))
    )
    for key in ("rope_parameters", "layer_types", "mlp_layer_types", "compress_rates"):
        theirs, ours = getattr(expected, key), getattr(found, key)
        if key == "rope_parameters":
            theirs["compress"].pop("type")  # the older name of rope_type, which is there too
        assert theirs == ours, key
    assert table.write_hf(config)["compress_ratios"] == raw["compress_ratios"][:-1]


@pytest.mark.oracle
@pytest.mark.parametrize("factor", [{}, {"attention_factor": None}, {"attention_factor": 1.5}])
def test_attentions_factor_may_be_missing_null_or_a_number(factor: dict[str, float | None]) -> None:
    """A missing one is 1 in this class. null is yarn's own, which follows from the scaling's factor."""
    transformers = pytest.importorskip("transformers")
    table, raw = family("deepseek_v4"), PUBLISHED[NAMES[0]]["config"]
    stated = raw | {"rope_scaling": raw["rope_scaling"] | factor}
    written = table.write_hf(table.read_hf(stated))
    for form in (stated, transformers.DeepseekV4Config(**stated).to_dict()):
        assert fields_of(table.read_hf(form)) == fields_of(table.read_hf(written))
    expected, found = (
        compressed_rope(transformers.DeepseekV4Config(**keys)) for keys in (stated, written)
    )
    assert found == pytest.approx(expected)


def compressed_rope(config: Any) -> float:
    """The factor of cosine and sine in layers with entries."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    _, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu", layer_type="compress")
    return float(factor)


def published(name: str) -> str:
    """The published name of a tensor that save_pretrained wrote."""
    bare = name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")
    bare = bare.replace("embed_tokens.", "embed.")
    return re.sub(r"hc_head\.hc_", "hc_head_", bare)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model under each kind of names."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("forms")
    create(CONVERTED["deepseek_v4"], root / "saved")
    saved = load_file(root / "saved" / "model.safetensors")
    of_class = load(root / "saved").state_dict()
    made: dict[str, Tensors] = {
        "published": {published(name): tensor for name, tensor in saved.items()},
        "class": {name: tensor.contiguous() for name, tensor in of_class.items()},
    }
    raw: dict[str, Any] = json.loads((root / "saved" / "config.json").read_text())
    for form, tensors in made.items():
        (root / form).mkdir()
        (root / form / "config.json").write_text(json.dumps(raw))
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
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name
    before, after = load(forms["saved"]), load(tmp_path / "hf")
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor), name
    tokens = torch.randint(7, 100, (1, 24), generator=torch.Generator().manual_seed(3))
    assert torch.equal(compute(after, tokens), compute(before, tokens))


@pytest.mark.oracle
def test_another_dtype_leaves_tables_of_experts_as_they_are(
    forms: dict[str, Path], tmp_path: Path
) -> None:
    megaconv.convert(forms["published"], tmp_path / "hf", saver="hf", dtype="bf16", workers=1)
    source, written = (
        load_file(path / "model.safetensors") for path in (forms["published"], tmp_path / "hf")
    )
    kept = {name for name in written if written[name].dtype != torch.bfloat16}
    assert kept == {name for name in written if name.endswith(("gate.tid2eid", "gate.bias"))}
    assert all(torch.equal(written[name], source[name]) for name in kept)


@pytest.mark.oracle
def test_layers_for_further_tokens_are_left_out_with_a_warning(
    forms: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = load_file(forms["published"] / "model.safetensors")
    further = {"mtp.0.enorm.weight": torch.ones(3), "mtp.0.attn.wkv.weight": torch.ones(3, 2)}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((forms["published"] / "config.json").read_bytes())
    save_file(weights | further, source / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(source, tmp_path / "hf", saver="hf", verify=True, workers=1)
    assert "layers for multi-token prediction are not converted, 2 tensors" in caplog.text
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == weights.keys()


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])  # fmt: skip
"""The values of 4-bit codes (E2M1), of which a byte of the published experts holds two, the low four bits first."""
IN_FP8 = re.compile(r".*\.(wq_a|wq_b|wkv|wo_a|wo_b|w2)\.weight")
IN_FP4 = re.compile(r".*\.experts\.\d+\.(w1|w3)\.weight")


def powers(*shape: int) -> torch.Tensor:
    """Random scales: powers of two."""
    exponents = torch.randint(120, 131, shape, dtype=torch.uint8)
    return exponents.view(torch.float8_e8m0fnu)


def quantized(weights: Tensors, block: int) -> tuple[Tensors, Tensors]:
    """(tensors as the published files hold them, the values that they mean in float32)."""
    stored, meant = dict(weights), {name: tensor.float() for name, tensor in weights.items()}
    for name, tensor in weights.items():
        scale = name.removesuffix("weight") + "scale"
        if IN_FP8.fullmatch(name) and "compressor" not in name:
            rows, cols = tensor.shape
            stored[scale] = powers(-(-rows // block), -(-cols // block))
            stored[name] = tensor.to(torch.float8_e4m3fn)
            spread = stored[scale].float().repeat_interleave(block, 0)[:rows]
            spread = spread.repeat_interleave(block, 1)[:, :cols]
            meant[name] = stored[name].float() * spread
        elif IN_FP4.fullmatch(name):
            rows, cols = tensor.shape
            codes = torch.randint(0, 16, (rows, cols // 2, 2))
            stored[scale] = powers(rows, cols // 32)
            stored[name] = (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8).view(torch.int8)
            spread = stored[scale].float().repeat_interleave(32, 1)
            meant[name] = FP4[codes.flatten(1)] * spread
    return stored, meant


@pytest.mark.oracle
def test_a_model_in_fp8_and_fp4_as_it_is_published_becomes_a_plain_one(
    forms: dict[str, Path], tmp_path: Path
) -> None:
    torch.manual_seed(21)
    stored, meant = quantized(load_file(forms["published"] / "model.safetensors"), block=16)
    raw = json.loads((forms["published"] / "config.json").read_text())
    method = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(
        json.dumps(raw | {"expert_dtype": "fp4", "quantization_config": method})
    )
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(source, tmp_path / "hf", saver="hf", verify=True, dtype="fp32", workers=1)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == meant.keys()
    assert all(torch.equal(written[name].float(), tensor) for name, tensor in meant.items())
    keys = json.loads((tmp_path / "hf" / "config.json").read_text()).keys()
    assert not keys & {"expert_dtype", "quantization_config"}
    load(tmp_path / "hf")


@pytest.mark.oracle
def test_quantized_outputs_are_refused_by_name(forms: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(NotExpressible, match="fp8-block: is not supported for deepseek_v4"):
        megaconv.convert(forms["published"], tmp_path / "hf", saver="hf", quantize="fp8-block")
    assert not list(tmp_path.iterdir())
