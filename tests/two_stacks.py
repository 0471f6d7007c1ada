"""Models of an encoder and a decoder between Hugging Face's files."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.families import family


def assert_same_tensors(found: Path, expected: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (found, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def with_new_config(directory: Path) -> Path:
    """The directory with a config.json made from the description of its model alone."""
    config = open_checkpoint(directory).config
    written = family(config.family).write_hf(config)
    (directory / "config.json").write_text(json.dumps(written))
    return directory


def assert_files_and_logits_come_back(
    source: Path, saver: str, logits: Callable[[Path], torch.Tensor], tmp_path: Path
) -> None:
    """They do so after a conversion to `saver` and back, and with a new config.json."""
    megaconv.convert(source, tmp_path / "there", saver=saver)
    megaconv.convert(tmp_path / "there", tmp_path / "back", saver="hf")
    assert_same_tensors(tmp_path / "back", source)
    expected = logits(source)
    assert torch.equal(logits(tmp_path / "back"), expected)
    assert torch.equal(logits(with_new_config(tmp_path / "back")), expected)
