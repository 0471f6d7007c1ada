"""Kimi K3 in the form of its published files: a prefix for the language model, packed experts, zeros after A_log's heads.

Names, shapes and dtypes here are those of the published files, by what public tools that read them state. No release of
transformers has the class, so that nothing computes with the output.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.families import family_of_hf
from megaconv.model.table import canonical_shapes
from tests.config_models import raw_config
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

Tensors = dict[str, torch.Tensor]
PUBLISHED_BYTES = 1_560_860_324_864
VISION_BYTES = 894_717_952
"""The published files' metadata.total_size, and the part of the vision tower and its projector."""
PUBLISHED_TENSORS = 497_220
VISION_TENSORS = 168
IN_FLOAT32 = ("kda.conv.", ".A_log", ".dt_bias", ".out_norm.", "router.bias")
HIDDEN, HEADS, KDA_HEADS, KDA_DIM, LATENT = 64, 4, 2, 16, 32
LAYERS, ATTENDING, EXPERTS = 3, (2,), 3
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of 4-bit floats."""


def published() -> dict[str, Any]:
    models = json.loads((FIXTURES / "published_models.json").read_text())
    found = next(each for each in models if each["model"].startswith("moonshotai/Kimi-K3"))
    config: dict[str, Any] = found["config"]
    return config


def test_the_published_model_has_the_size_of_its_files_to_the_byte() -> None:
    raw = published()
    family = family_of_hf(raw, "config.json")
    shapes = canonical_shapes(family.rows, family.read_hf(raw))
    stored_bytes = stored_tensors = 0
    for name, shape in shapes.items():
        count = prod(shape)
        if ".experts." in name:  # two elements a byte, and a scale for each 32 elements
            stored_bytes += count // 2 + count // 32
            stored_tensors += 2
        else:
            is_wide = any(part in name for part in IN_FLOAT32)
            stored_bytes += count * (4 if is_wide else 2)
            stored_tensors += not name.endswith("attn.k_up.weight")  # one tensor with v_up
    assert stored_bytes == PUBLISHED_BYTES - VISION_BYTES
    assert stored_tensors == PUBLISHED_TENSORS - VISION_TENSORS
    assert sum(map(prod, shapes.values())) == 2_779_484_478_208


def shapes_of_layer(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name without its prefix, shape) of a layer's tensors, but for routed experts."""
    for norm in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attention_res_norm",
        "mlp_res_norm",
    ):
        yield f"{norm}.weight", (HIDDEN,)
    for query in ("self_attention_res_proj", "mlp_res_proj"):
        yield f"{query}.weight", (1, HIDDEN)
    yield from shapes_of_attention() if layer in ATTENDING else shapes_of_kda()
    if not layer:
        yield from shapes_of_mlp("mlp", 96)
        return
    moe = "block_sparse_moe"
    yield f"{moe}.gate.weight", (EXPERTS, HIDDEN)
    yield f"{moe}.gate.e_score_correction_bias", (EXPERTS,)
    yield f"{moe}.routed_expert_down_proj.weight", (LATENT, HIDDEN)
    yield f"{moe}.routed_expert_norm.weight", (LATENT,)
    yield f"{moe}.routed_expert_up_proj.weight", (HIDDEN, LATENT)
    yield from shapes_of_mlp(f"{moe}.shared_experts", 64)


def shapes_of_mlp(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (width, HIDDEN)
    yield f"{name}.up_proj.weight", (width, HIDDEN)
    yield f"{name}.down_proj.weight", (HIDDEN, width)


def shapes_of_attention() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "self_attn.q_a_proj.weight", (32, HIDDEN)
    yield "self_attn.q_a_layernorm.weight", (32,)
    yield "self_attn.q_b_proj.weight", (HEADS * 24, 32)
    yield "self_attn.kv_a_proj_with_mqa.weight", (24, HIDDEN)
    yield "self_attn.kv_a_layernorm.weight", (16,)
    yield "self_attn.kv_b_proj.weight", (HEADS * 28, 16)
    yield "self_attn.g_proj.weight", (HEADS * 12, HIDDEN)
    yield "self_attn.o_proj.weight", (HIDDEN, HEADS * 12)


def shapes_of_kda() -> Iterator[tuple[str, tuple[int, ...]]]:
    width = KDA_HEADS * KDA_DIM
    for part in "qkv":
        yield f"self_attn.{part}_proj.weight", (width, HIDDEN)
        yield f"self_attn.{part}_conv1d.weight", (width, 1, 4)
    yield "self_attn.f_a_proj.weight", (KDA_DIM, HIDDEN)
    yield "self_attn.f_b_proj.weight", (width, KDA_DIM)
    yield "self_attn.b_proj.weight", (KDA_HEADS, HIDDEN)
    yield "self_attn.g_proj.weight", (width, HIDDEN)
    yield "self_attn.A_log", (KDA_DIM,)
    yield "self_attn.dt_bias", (width,)
    yield "self_attn.o_norm.weight", (KDA_DIM,)
    yield "self_attn.o_proj.weight", (HIDDEN, width)


def tensors_of(*, decays: int = KDA_DIM) -> Tensors:
    """The language model's tensors with packed experts. decays: elements of A_log."""
    shapes = {
        "model.embed_tokens.weight": (131, HIDDEN), "lm_head.weight": (131, HIDDEN), "model.norm.weight": (HIDDEN,),
        "model.output_attn_res_norm.weight": (HIDDEN,), "model.output_attn_res_proj.weight": (1, HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes_of_layer(layer)}
    wide = ("conv1d.weight", "dt_bias", "o_norm.weight", "e_score_correction_bias")
    found: Tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape)
        found[name] = values if name.endswith(wide) else values.bfloat16()
        if name.endswith("A_log"):
            found[name] = torch.zeros(decays)
            found[name][:KDA_HEADS] = torch.randn(KDA_HEADS)
    for layer in range(1, LAYERS):
        found |= packed_experts(f"model.layers.{layer}.block_sparse_moe.experts")
    return found


def packed_experts(prefix: str) -> Tensors:
    found: Tensors = {}
    for expert in range(EXPERTS):
        for name, rows, cols in (("w1", 32, LATENT), ("w3", 32, LATENT), ("w2", LATENT, 32)):
            weight = f"{prefix}.{expert}.{name}.weight"
            found[f"{weight}_packed"] = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
            found[f"{weight}_scale"] = torch.randint(
                118, 130, (rows, cols // 32), dtype=torch.uint8
            )
    return found


def plain(tensors: Tensors) -> Tensors:
    """The same tensors with the values of packed ones in bfloat16."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            weight = name.removesuffix("_packed")
            codes = torch.stack([tensor & 15, tensor >> 4], dim=-1).long()
            scales = 2.0 ** (tensors[f"{weight}_scale"].float() - 127)
            values = CODES[codes].reshape(len(tensor), -1) * scales.repeat_interleave(32, dim=1)
            found[weight] = values.bfloat16()
        elif not name.endswith("_scale"):
            found[name] = tensor
    return found


def text_config() -> dict[str, Any]:
    sizes = {
        "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": 131,
        "num_key_value_heads": HEADS, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "num_experts": EXPERTS, "num_experts_per_token": 2, "moe_intermediate_size": 32,
        "routed_expert_hidden_size": LATENT, "attn_res_block_size": 2,
    }  # fmt: skip
    lists = {"kda_layers": [1, 2], "full_attn_layers": [3]}
    linear = {"num_heads": KDA_HEADS, "head_dim": KDA_DIM, **lists}
    config = published()
    return {**config, **sizes, "linear_attn_config": config["linear_attn_config"] | linear}


def write(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_whole(path: Path) -> tuple[Path, Tensors]:
    """(the model in the form of the published files, its tensors)."""
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "tie_word_embeddings": False, "text_config": text_config(), "vision_config": {"vt_hidden_size": 32},
    }  # fmt: skip
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors_of().items()}
    tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.randn(48, 32).bfloat16()
    tensors["mm_projector.post_norm.weight"] = torch.randn(HIDDEN).bfloat16()
    return write(path, config, tensors), tensors


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_the_whole_model_becomes_a_plain_one_with_its_vision_tower(tmp_path: Path) -> None:
    source, tensors = write_whole(tmp_path / "hf")
    megaconv.convert(source, tmp_path / "out", saver="hf", verify=True, workers=1)
    assert_equal(load_file(tmp_path / "out/model.safetensors"), plain(tensors))
    text = json.loads((tmp_path / "out/config.json").read_text())["text_config"]
    assert "quantization_config" not in text
    assert text["attn_res_block_size"] == 2


@pytest.mark.parametrize("decays", [KDA_DIM, KDA_HEADS])
def test_the_language_model_goes_to_dcp_and_back_with_or_without_zeros_after_the_heads(
    decays: int, tmp_path: Path
) -> None:
    tensors = tensors_of(decays=decays)
    write(tmp_path / "hf", text_config(), tensors)
    megaconv.convert(tmp_path / "hf", tmp_path / "dcp", saver="dcp", workers=1)
    megaconv.convert(tmp_path / "dcp", tmp_path / "back", saver="hf", workers=1)
    assert_equal(load_file(tmp_path / "back/model.safetensors"), plain(tensors))


def test_decays_for_some_of_the_heads_are_refused_by_name(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", text_config(), tensors_of(decays=KDA_HEADS))
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.self_attn.A_log"
    save_file({**tensors, name: torch.zeros(1)}, source / "model.safetensors")
    assert_refused(run("fingerprint", source), 3, f"{name} is [1]")


def test_one_class_name_is_kimi_linears_or_kimi_k3s() -> None:
    for name in ("kimi_k3", "kimi_linear"):
        raw = raw_config(name)
        assert raw["architectures"] == ["KimiLinearForCausalLM"]
        assert family_of_hf(raw, "config.json").name == name
