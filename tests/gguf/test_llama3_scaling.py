"""A GGUF file with llama3's divisors: the published scaling is recognized, and any other needs --config."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megaconv
from formats.lazy_numpy import Floats
from megaconv.engine.opening import open_source
from megaconv.gguf.llama3_scaling import published_scaling
from megaconv.input import find_input
from megaconv.model.meaning import config_differences
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

HF = FIXTURES / "gguf-llama3-bpe/hf"
THETA = 500000.0
PUBLISHED: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def divisors(head_dim: int, scaling: dict[str, Any]) -> Floats:
    """The divisors one by one, in torch's float32 as in llama.cpp's converter."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    found: list[Any] = []
    for frequency in 1.0 / THETA**exponents:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("factor", [8.0, 16.0, 32.0])
def test_the_published_scaling_is_recognized_at_any_factor(head_dim: int, factor: float) -> None:
    scaling = PUBLISHED | {"factor": factor}
    assert published_scaling(divisors(head_dim, scaling), THETA) == scaling


@pytest.mark.parametrize(
    "other",
    [
        {"original_max_position_embeddings": 8191},
        {"original_max_position_embeddings": 4096},
        {"low_freq_factor": 1.001},
        {"high_freq_factor": 3.99},
        {"factor": 1.0},
    ],
    ids=str,
)
def test_another_scaling_is_not_taken_for_the_published_one(other: dict[str, Any]) -> None:
    assert published_scaling(divisors(64, PUBLISHED | other), THETA) is None


def test_divisors_that_are_no_scaling_are_not_recognized() -> None:
    found = divisors(64, PUBLISHED)
    assert published_scaling(found, 10000.0) is None
    for wrong in (found[:0], found[::-1], found.reshape(2, -1), found * np.float32(np.nan)):
        assert published_scaling(wrong, THETA) is None
    assert published_scaling(np.where(found == 8, np.float32(np.inf), found), THETA) is None


def scaled_file(directory: Path, **changed: Any) -> Path:
    """A GGUF file alone, of a small Llama with llama3's scaling."""
    source = Path(shutil.copytree(HF, directory / "hf"))
    file = source / "config.json"
    scaling = {**PUBLISHED, "rope_theta": THETA, **changed}
    config = json.loads(file.read_text()) | {"rope_parameters": scaling}
    file.write_text(json.dumps(config))
    megaconv.convert(source, directory / "gguf", saver="gguf")
    return Path(shutil.copy(directory / "gguf/model.gguf", directory / "alone.gguf"))


def test_a_file_alone_with_the_published_scaling_says_what_model_it_is(tmp_path: Path) -> None:
    file = scaled_file(tmp_path, factor=32.0)
    assert run("convert", file, tmp_path / "back", "--saver", "hf").status == 0
    expected, found = (open_source(find_input(tmp_path / name)) for name in ("hf", "back"))
    assert config_differences(expected.header.config, found.header.config) == []
    assert found.header.config.positions.scaling == PUBLISHED | {"factor": 32.0}
    assert megaconv.fingerprint(tmp_path / "back") == megaconv.fingerprint(tmp_path / "hf")


def test_another_scaling_needs_the_configuration(tmp_path: Path) -> None:
    file = scaled_file(tmp_path, original_max_position_embeddings=64)
    outcome = run("convert", file, tmp_path / "back", "--saver", "hf")
    assert_refused(outcome, 2, "scales positions", "give --config")
