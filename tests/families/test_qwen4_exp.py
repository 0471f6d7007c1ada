"""Qwen4-Exp: both forms of its tables of n-grams, files without the numbers of the hashes, the whole model, quantized outputs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import TensorMismatch
from megaconv.families import family
from tests.config_models import raw_config
from tests.transformers_oracle import CONVERTED, compute, create, load
from tests.whole_models import load_class

SHARD, TABLE = ".ngram_embedding.shard_", ".ngram_embedding.weight"
HASHES = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("qwen4") / "hf"
    create(CONVERTED["qwen4_exp_text"], directory)
    return directory


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(directory / "model.safetensors"))


def written_as(directory: Path, tensors: Tensors, config: bytes) -> Path:
    directory.mkdir()
    (directory / "config.json").write_bytes(config)
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def converted(source: Path, output: Path, **options: Any) -> Path:
    megaconv.convert(source, output, saver="hf", verify=True, workers=1, **options)
    return output


def tokens() -> torch.Tensor:
    return torch.randint(7, 120, (2, 24), generator=torch.Generator().manual_seed(3))


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_the_rows_of_the_tables_are_those_of_the_class() -> None:
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    raw = raw_config("qwen4_exp_text", ngram_vocab_size_base=20_000, split_ngram_parts=512)
    config = modeling.Qwen4ExpTextConfig(**raw)
    found = family("qwen4_exp_text").read_hf(raw)
    with torch.device("meta"):
        tables = [modeling.Qwen4ExpTextNGramEmbedding(config, 24, layer, layer // 2) for layer in (0, 2)]  # fmt: skip
    rows = [table.ngram_embedding.num_embeddings for table in tables]
    assert [found.layers[layer].ngram_rows for layer in range(4)] == [rows[0], 0, rows[1], 0]


@pytest.mark.oracle
def test_tables_in_one_tensor_are_read_and_stay_so(source: Path, tmp_path: Path) -> None:
    """So are experts in one tensor, as transformers' class has both; an output has each expert on its own."""
    load(source).save_pretrained(tmp_path / "class", save_original_format=False)
    of_class, weights = weights_of(tmp_path / "class"), weights_of(source)
    assert any(name.endswith(TABLE) for name in of_class)
    assert not any(SHARD in name for name in of_class)
    found = weights_of(converted(tmp_path / "class", tmp_path / "out"))
    others = {name for name in weights if SHARD not in name}
    assert found.keys() == others | {name for name in of_class if name.endswith(TABLE)}
    assert torch.equal(compute(load(tmp_path / "out"), tokens()), compute(load(source), tokens()))


@pytest.mark.oracle
def test_files_without_the_numbers_of_the_hashes_stay_so(source: Path, tmp_path: Path) -> None:
    """transformers computes them from the keys. The seed counts only in such files."""
    without = {name: held for name, held in weights_of(source).items() if not name.endswith(HASHES)}
    raw = json.loads((source / "config.json").read_text())
    for seed in (raw["seed"], 7):
        config = json.dumps({**raw, "seed": seed}).encode()
        files = written_as(tmp_path / f"from {seed}", without, config)
        output = converted(files, tmp_path / f"to {seed}")
        assert_equal(weights_of(output), without)
        logits = compute(load(output), tokens())
        assert torch.equal(logits, compute(load(files), tokens()))
        is_same = torch.equal(logits, compute(load(source), tokens()))
        assert is_same is (seed == raw["seed"])


@pytest.mark.oracle
def test_integers_and_float32_beside_bfloat16_stay_as_they_are(
    source: Path, tmp_path: Path
) -> None:
    kept = ("A_log", "linear_attn.norm.weight", *HASHES)
    mixed = {
        name: held if name.endswith(kept) else held.bfloat16()
        for name, held in weights_of(source).items()
    }
    files = written_as(tmp_path / "from", mixed, (source / "config.json").read_bytes())
    assert_equal(weights_of(converted(files, tmp_path / "out")), mixed)
    megaconv.convert(files, tmp_path / "dcp", saver="dcp", workers=1)
    assert_equal(weights_of(converted(tmp_path / "dcp", tmp_path / "again")), mixed)


@pytest.mark.oracle
def test_a_missing_part_of_a_table_is_named(source: Path, tmp_path: Path) -> None:
    weights = weights_of(source)
    (name,) = [name for name in weights if name.endswith("layers.2.ple.ple_embedding.ngram_embedding.shard_3.weight")]  # fmt: skip
    del weights[name]
    files = written_as(tmp_path / "hf", weights, (source / "config.json").read_bytes())
    with pytest.raises(TensorMismatch, match=r"layers\.2\..*shard_3"):
        converted(files, tmp_path / "out")


@pytest.mark.oracle
def test_tables_in_fp8_with_one_scale_become_plain_ones(source: Path, tmp_path: Path) -> None:
    weights = weights_of(source)
    stored = dict(weights)
    scale = torch.tensor([0.01])
    for name in [name for name in weights if SHARD in name]:
        stored[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[name] = stored[name].float() * scale
        stored[name.partition(SHARD)[0] + ".ngram_embedding.weight_scale"] = scale.clone()
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_convert": ["ngram_embedding"]}  # fmt: skip
    raw = json.loads((source / "config.json").read_text()) | {"quantization_config": method}
    files = written_as(tmp_path / "fp8", stored, json.dumps(raw).encode())
    output = converted(files, tmp_path / "out", dtype="fp32")
    assert_equal(weights_of(output), weights)
    assert "quantization_config" not in json.loads((output / "config.json").read_text())
    load(output)


@pytest.mark.oracle
def test_a_quantized_output_leaves_routers_streams_and_tables_as_they_are(
    source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    megaconv.convert(source, output, saver="hf", quantize="fp8-per-channel", workers=1)
    in_fp8 = {
        name for name, held in weights_of(output).items() if held.dtype == torch.float8_e4m3fn
    }
    parts = {".".join(name.split(".")[3:5]) for name in in_fp8}
    of_attention = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
    assert parts == of_attention | {"mlp.experts", "mlp.shared_expert"}


TEXT: dict[str, Any] = {
    **CONVERTED["qwen4_exp_text"].settings, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 131, "bos_token_id": 1, "eos_token_id": [4, 5],
}  # fmt: skip
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


@pytest.mark.oracle
def test_transformers_computes_the_same_logits_from_a_whole_qwen4_exp(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(20)
    tokens_of = {"image_token_id": 129, "video_token_id": 130, "vision_start_token_id": 127, "vision_end_token_id": 128}  # fmt: skip
    config = transformers.Qwen4ExpConfig(text_config=TEXT, vision_config=VISION, **tokens_of)
    whole = transformers.Qwen4ExpForConditionalGeneration
    model = whole(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    source, text = tmp_path / "hf", tmp_path / "text"
    model.save_pretrained(source)
    output = converted(source, tmp_path / "whole")
    assert_equal(weights_of(output), weights_of(source))
    before, after = (
        load_class(path, whole.__name__, attn_implementation="eager") for path in (source, output)
    )
    image = image_inputs()
    assert torch.equal(after(**image).logits, before(**image).logits)
    converted(source, text, text_only=True)
    assert torch.equal(compute(load(text), tokens()), compute(before, tokens()))
    assert not any("visual" in name for name in weights_of(text))


def image_inputs() -> dict[str, torch.Tensor]:
    """A text with an image of 4 by 4 patches, which are 4 tokens."""
    ids = torch.tensor([[9, 127, 129, 129, 129, 129, 128, 20, 21]])
    patches = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(5))
    kinds = (ids == 129).int()
    grid = torch.tensor([[1, 4, 4]])
    return {
        "input_ids": ids,
        "pixel_values": patches,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }
