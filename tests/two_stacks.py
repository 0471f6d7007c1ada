"""Models of an encoder and a decoder between Hugging Face's files."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

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
