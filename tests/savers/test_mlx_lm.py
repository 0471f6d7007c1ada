"""The real mlx-lm reads what megaconv writes. mlx runs on Linux too: `pip install mlx[cpu] mlx-lm`."""

from pathlib import Path

import pytest

import megaconv
from tests.mlx_oracle import cases, made_by_mlx, write_source

pytest.importorskip("mlx_lm", reason="mlx-lm isn't installed; pip install mlx[cpu] mlx-lm")
CASES = cases()


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
