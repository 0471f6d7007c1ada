"""A low-rank adapter in the place of a model: which weights of the model it changes, and with which matrices.

Its tensors are canonical ones too. One matrix A may serve several weights, where the writer had them fused:

    layers.0.attn.q.lora_a          [rank, in]      of one weight
    layers.0.attn.{q|k|v}.lora_a    [rank, in]      of three
    layers.0.attn.q.lora_b          [out, rank]

What is added to a weight is (B @ A) * alpha / rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class LowRank(NamedTuple):
    """What is added to one weight."""

    a: str
    """Canonical name of its A."""
    b: str
    rank: int
    alpha: float


@dataclass(frozen=True)
class AdapterInfo:
    """What a header says of an adapter beside its tensors."""

    weights: Mapping[str, LowRank]
    """By the canonical name of the weight that is changed."""
    base: str = ""
    """What it was trained on, for people; empty where nobody says it."""
    dropout: float = 0.0


def a_name(weights: Sequence[str]) -> str:
    """Of the A that serves these weights, which are of one module."""
    stem, _, _ = weights[0].removesuffix(".weight").rpartition(".")
    words = [name.removesuffix(".weight").removeprefix(f"{stem}.") for name in weights]
    return f"{stem}.{words[0] if len(words) == 1 else '{' + '|'.join(words) + '}'}.lora_a"


def b_name(weight: str) -> str:
    return weight.removesuffix("weight") + "lora_b"
