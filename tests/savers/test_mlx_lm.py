"""The real mlx-lm reads what megaconv writes. mlx runs on Linux too: `pip install mlx[cpu] mlx-lm`."""

from pathlib import Path

import numpy as np
import pytest
import torch

import megaconv
from tests.mlx_oracle import cases, made_by_mlx, write_source
from tests.transformers_oracle import (
    BEYOND_MEGATRON,
    CONVERTED,
    MIXTURES,
    VARIANTS,
    compute,
    create,
    load,
)

pytest.importorskip("mlx_lm", reason="mlx-lm isn't installed; pip install mlx[cpu] mlx-lm")
CASES = cases()
ALL_VARIANTS = {**VARIANTS, **MIXTURES, **BEYOND_MEGATRON, **CONVERTED}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_digest_is_that_of_the_installed_release(name: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", CASES[name]["config"])
    assert made_by_mlx(source, tmp_path / "mlx") == CASES[name]["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_mlx_lm_loads_codes_and_quantizes_to_the_same(name: str, tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    config = CASES[name]["config"]
    source, is_inside = write_source(tmp_path / "source", config), "text_config" in config
    options = {"bits": "4", "group_size": "32"}
    for target, given in (("plain", {}), ("codes", options)):
        megaconv.convert(source, tmp_path / target, saver="mlx", text_only=is_inside, options=given)
    load_model(tmp_path / "codes", lazy=True, strict=True)
    plain = mx.load(str(tmp_path / "plain" / "model.safetensors"))
    codes = mx.load(str(tmp_path / "codes" / "model.safetensors"))
    modules = [key.removesuffix(".scales") for key in codes if key.endswith(".scales")]
    assert modules
    for module in modules:
        made = mx.quantize(plain[f"{module}.weight"], group_size=32, bits=4)
        for part, expected in zip(("weight", "scales", "biases"), made, strict=True):
            assert mx.array_equal(codes[f"{module}.{part}"], expected).item(), (module, part)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "bits", "size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
)
@pytest.mark.parametrize("name", CASES)
def test_mlx_lm_loads_floats_that_are_as_near_as_its_own(
    name: str, mode: str, bits: int, size: int, tmp_path: Path
) -> None:
    """On a CPU, mlx rounds ties of FP4 another way than on a GPU. The error of a tie is the same."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    config = CASES[name]["config"]
    source, is_inside = write_source(tmp_path / "source", config), "text_config" in config
    for target, given in (("plain", {}), ("codes", {"mode": mode})):
        megaconv.convert(source, tmp_path / target, saver="mlx", text_only=is_inside, options=given)
    load_model(tmp_path / "codes", lazy=True, strict=True)
    plain = mx.load(str(tmp_path / "plain" / "model.safetensors"))
    codes = mx.load(str(tmp_path / "codes" / "model.safetensors"))
    modules = [key.removesuffix(".scales") for key in codes if key.endswith(".scales")]
    assert modules
    form = {"group_size": size, "bits": bits, "mode": mode}
    for module in modules:
        weight = plain[f"{module}.weight"].astype(mx.float32)
        made = mx.quantize(weight, **form)
        ours = codes[f"{module}.weight"], codes[f"{module}.scales"]
        assert mx.array_equal(ours[1], made[1]).item(), module
        errors = [
            mx.abs(mx.dequantize(*each, **form, dtype=mx.float32) - weight) for each in (ours, made)
        ]
        assert mx.array_equal(*errors).item(), module


WITHIN = {
    **{name: {"sliding_window": 64} for name in ("dots1", "gemma2", "mistral", "phi3", "phimoe", "starcoder2")},
    **{name: {"layer_types": ["sliding_attention", "full_attention"] * 2} for name in ("cohere2", "gemma3_text")},
    **{name: {"layer_types": ["linear_attention", "full_attention"] * 2} for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    **{name: {"tie_word_embeddings": True} for name in ("lfm2", "lfm2_moe")},
    **{name: {"layer_norm_epsilon": 1e-5} for name in ("mamba", "falcon_mamba")},
    **{name: {} for name in ("apertus", "hunyuan_v1_dense, stretched", "llama", "qwen2", "solar_open")},
    "glm": {"partial_rotary_factor": 1.0},
    "granite_moe_hybrid": {"mamba_n_groups": 1},
    "granite_moe_hybrid, experts": {"mamba_n_groups": 1},
    "llama4": {"no_rope_layers": [1, 1, 1, 0]},
    "mamba2": {"n_groups": 1},
}  # fmt: skip
"""Variant of transformers_oracle.py -> settings with which mlx-lm computes it as transformers does."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHIN)
def test_mlx_lm_computes_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    create(ALL_VARIANTS[name], tmp_path / "hf", **WITHIN[name])
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])
    expected = compute(load(tmp_path / "hf"), tokens)[0].numpy()
    megaconv.convert(tmp_path / "hf", tmp_path / "mlx", saver="mlx", dtype="fp32")
    model, _ = load_model(tmp_path / "mlx", strict=True)
    found = np.array(model(mx.array(tokens.numpy())))[0]
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())
