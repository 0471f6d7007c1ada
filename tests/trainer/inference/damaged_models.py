"""Models with damaged weights."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_nan(model: Path, copy: Path, name: str) -> Path:
    """A copy of a model of one file, whose tensor of this name has a number that is none."""
    shutil.copytree(model, copy)
    file = copy / "model.safetensors"
    weights = load_file(file)
    weights[name].view(-1)[0] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    return copy
