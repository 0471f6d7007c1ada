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
