"""Files that MLX 0.32.4 quantized: its packed words are never read as weights.

tests/fixtures/mlx/<mode> is a Llama of one layer. `mlx.core.quantize` quantized each matrix in groups of 32, and
`mlx.core.save_safetensors` wrote the file.
"""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

MODES = ("affine", "mxfp4")


@pytest.mark.parametrize("mode", MODES)
def test_a_fixture_holds_packed_words_and_scales(mode: str) -> None:
    stored = load_file(FIXTURES / "mlx" / mode / "model.safetensors")
    words = stored["model.layers.0.mlp.up_proj.weight"]
    assert (words.dtype, words.shape) == (torch.uint32, (32, 4))
    assert "model.layers.0.mlp.up_proj.scales" in stored
    assert ("model.layers.0.mlp.up_proj.biases" in stored) == (mode == "affine")


@pytest.mark.parametrize("mode", MODES)
def test_a_conversion_to_megatron_and_a_plan_are_refused(mode: str, tmp_path: Path) -> None:
    model, target = FIXTURES / "mlx" / mode, tmp_path / "out"
    assert_refused(run("convert", model, target, "--saver", "core"), 3, "quantized (MLX)")
    assert_refused(run("plan", model), 3, "quantized (MLX)")
    assert not target.exists()


@pytest.mark.parametrize("saver", ["core", "hf"])
@pytest.mark.parametrize("mode", MODES)
def test_the_scales_are_unknown_tensors_if_the_settings_are_missing(
    mode: str, saver: str, tmp_path: Path
) -> None:
    model, target = copytree(FIXTURES / "mlx" / mode, tmp_path / "model"), tmp_path / "out"
    config = json.loads((model / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        del config[key]
    (model / "config.json").write_text(json.dumps(config))
    refused = run("convert", model, target, "--saver", saver)
    assert_refused(refused, 3, "tensors are unknown", "lm_head.scales")
    assert not target.exists()


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_keeps_the_words_and_a_cast_is_refused(mode: str, tmp_path: Path) -> None:
    model, target = FIXTURES / "mlx" / mode, tmp_path / "out"
    cast = run("convert", model, target, "--saver", "hf", "--dtype", "fp32")
    assert_refused(cast, 3, "--dtype: needs plain weights", "quantized (MLX)")
    assert run("convert", model, target, "--saver", "hf").status == 0
    before, after = (load_file(path / "model.safetensors") for path in (model, target))
    assert before.keys() == after.keys()
    assert all(
        before[name].dtype == after[name].dtype
        and torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
        for name in before
    )
