"""The description of a low-rank adapter: which weights of the model it changes, and with which matrices.

The adapter's tensors have canonical names too. One matrix may serve several weights. If the writer fused several
weights, they share one A. If a writer shares an adapter among all experts of a layer, they share both A and B.

    layers.0.attn.q.lora_a                      [rank, in]      of one weight
    layers.0.attn.{q|k|v}.lora_a                [rank, in]      of three weights
    layers.0.attn.q.lora_b                      [out, rank]
    layers.0.attn.q.lora_length                 [out]           DoRA only: the length of each row of the changed weight
    layers.0.mlp.experts.*.{gate|up}.lora_a     [rank, in]      of all experts

The adapter adds (B @ A) * alpha / rank to a weight.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_EXPERT = re.compile(r"\.experts\.(?:\d+|\*)\.")
_ANY_EXPERT = ".experts.*."


class LowRank(NamedTuple):
    """The low-rank update of one weight."""

    a: str
    """Canonical name of the A matrix."""
    b: str
    rank: int
    alpha: float
    length: str = ""
    """Canonical name of DoRA's magnitudes; empty if the adapter is LoRA."""

    @property
    def tensors(self) -> Iterator[str]:
        """The canonical names of the adapter's tensors for this weight."""
        yield from (name for name in (self.a, self.b, self.length) if name)


@dataclass(frozen=True)
class AdapterInfo:
    """The part of a header that describes an adapter, without its tensors."""

    weights: Mapping[str, LowRank]
    """Canonical name of a changed weight -> its low-rank update."""
    base: str = ""
    """The name of the base model, for people; empty if the adapter doesn't name it."""
    dropout: float = 0.0
    experts_share: bool = False
    """True if all experts of a layer train one adapter, although each expert's matrices have names of their own."""

    @property
    def is_dora(self) -> bool:
        """True if any weight has DoRA's magnitudes."""
        return any(low.length for low in self.weights.values())


def a_name(weights: Sequence[str]) -> str:
    """The canonical name of the A matrix that serves these weights. All of them belong to one module."""
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
    """The name that stands for this weight in all experts of its layer."""
    return _EXPERT.sub(_ANY_EXPERT, weight)


def of_each_expert(weight: str, experts: int) -> Iterator[str]:
    """Yield the weights that a name stands for: one for each expert, or the name itself if it stands for one weight."""
    if _ANY_EXPERT not in weight:
        yield weight
        return
    for expert in range(experts):
        yield weight.replace(_ANY_EXPERT, f".experts.{expert}.")
