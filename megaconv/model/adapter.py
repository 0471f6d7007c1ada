"""A low-rank adapter in the place of a model: which weights of the model it changes, and with which matrices.

Its tensors are canonical ones too. One matrix may serve several weights: A of what the writer had fused, both of what all
experts of a layer share.

    layers.0.attn.q.lora_a                      [rank, in]      of one weight
    layers.0.attn.{q|k|v}.lora_a                [rank, in]      of three
    layers.0.attn.q.lora_b                      [out, rank]
    layers.0.attn.q.lora_length                 [out]           of DoRA: the length that each row of the changed weight has
    layers.0.mlp.experts.*.{gate|up}.lora_a     [rank, in]      of all experts

What is added to a weight is (B @ A) * alpha / rank.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_EXPERT = re.compile(r"\.experts\.(?:\d+|\*)\.")
_ANY_EXPERT = ".experts.*."


class LowRank(NamedTuple):
    """What is added to one weight."""

    a: str
    """Canonical name of its A."""
    b: str
    rank: int
    alpha: float
    length: str = ""
    """Of DoRA's magnitudes; empty where the adapter is LoRA."""

    @property
    def tensors(self) -> Iterator[str]:
        """Their canonical names."""
        yield from (name for name in (self.a, self.b, self.length) if name)


@dataclass(frozen=True)
class AdapterInfo:
    """What a header says of an adapter beside its tensors."""

    weights: Mapping[str, LowRank]
    """By the canonical name of the weight that is changed."""
    base: str = ""
    """What it was trained on, for people; empty where nobody says it."""
    dropout: float = 0.0

    @property
    def is_dora(self) -> bool:
        """Whether any weight has DoRA's magnitudes."""
        return any(low.length for low in self.weights.values())


def a_name(weights: Sequence[str]) -> str:
    """Of the A that serves these weights, which are of one module."""
    stem, _, _ = weights[0].removesuffix(".weight").rpartition(".")
    words = [name.removesuffix(".weight").removeprefix(f"{stem}.") for name in weights]
    return f"{stem}.{words[0] if len(words) == 1 else '{' + '|'.join(words) + '}'}.lora_a"


def b_name(weight: str) -> str:
    return weight.removesuffix("weight") + "lora_b"


def length_name(weight: str) -> str:
    return weight.removesuffix("weight") + "lora_length"


def is_of_expert(weight: str) -> bool:
    return _EXPERT.search(weight) is not None


def of_any_expert(weight: str) -> str:
    """The name that stands for the same weight of all experts of its layer."""
    return _EXPERT.sub(_ANY_EXPERT, weight)


def of_each_expert(weight: str, experts: int) -> Iterator[str]:
    """The weights that a name stands for: itself, if it doesn't stand for all experts'."""
    if _ANY_EXPERT not in weight:
        yield weight
        return
    for expert in range(experts):
        yield weight.replace(_ANY_EXPERT, f".experts.{expert}.")
