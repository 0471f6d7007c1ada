"""Shared parts of the tests of BERT and T5: questions that Megatron answered when it wrote its fixtures, and the
comparison."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from megaconv.engine.conversion import fingerprint
from megaconv.errors import LayoutError, NotExpressible
from tests.conftest import FIXTURES

TOLERANCE = 1e-5
"""Largest difference of two float32 logits that mean the same; sums are taken in different orders."""

Tensors = dict[str, torch.Tensor]


def convert(source: Path, target: Path, saver: str = "core", **options: Any) -> Path:
    """Convert to the names of Megatron's local layers, the only ones that run without a GPU."""
    if saver == "core":
        options = {"transformer_impl": "local", **options}
    if saver in ("core", "legacy"):
        options = {"make_vocab_size_divisible_by": 8, **options}
    megaconv.convert(source, target, saver=saver, workers=2, **options)
    return target


def weights(path: Path) -> str:
    return fingerprint(path).weights


def question(name: str) -> tuple[Tensors, Tensors]:
    """(what Megatron was asked when it wrote a fixture, what it answered)."""
    stored = load_file(FIXTURES / name / "logits.safetensors")
    asked = {key: tensor for key, tensor in stored.items() if not key.endswith("logits")}
    return asked, {key: tensor for key, tensor in stored.items() if key.endswith("logits")}


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() <= TOLERANCE


def assert_answers(
    answer: tuple[torch.Tensor, torch.Tensor], asked: Tensors, expected: Tensors
) -> None:
    """Compare the answers. Outputs at masked tokens are not compared, because they mean nothing."""
    vocab, seen = expected["logits"].shape[-1], asked["attention_mask"].bool()
    assert_close(answer[0][..., :vocab][seen], expected["logits"][seen])
    assert_close(answer[1], expected["binary_logits"])


def bert_inputs(asked: Tensors) -> tuple[torch.Tensor, ...]:
    return asked["input_ids"], asked["attention_mask"], asked["token_type_ids"]


def first_file(root: Path) -> Path:
    return min(root.glob("*/mp_rank_*/model_optim_rng.pt"))


def refused(source: Path, target: Path, saver: str, **options: Any) -> str:
    """The message; nothing is left behind."""
    with pytest.raises((NotExpressible, LayoutError)) as caught:
        convert(source, target, saver, **options)
    assert not target.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)
