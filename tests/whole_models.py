"""Whole multimodal models of transformers: loads them, computes with them, and compares their files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_class(directory: Path, name: str, **options: Any) -> "PreTrainedModel":
    """Load a model of this class in float32, with weights at aligned addresses.

    A mapped file has them at any address, which changes the rounding.
    """
    transformers = pytest.importorskip("transformers")
    model: PreTrainedModel
    model, report = getattr(transformers, name).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not report["missing_keys"]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return model.eval()


def tokens() -> torch.Tensor:
    """[2, 24], the same ones every time."""
    return torch.randint(7, 110, (2, 24), generator=torch.Generator().manual_seed(3))


def logits_of_text(model: "PreTrainedModel") -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens()).logits
    return logits


def hidden_states(model: Any) -> torch.Tensor:
    """The last hidden states for the same text, of a model without a head."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens()).last_hidden_state
    return found


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of all safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_files(found: Path, expected: Path) -> None:
    """Names, dtypes and values."""
    ours, theirs = weights(found), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
