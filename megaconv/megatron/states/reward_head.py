"""The head of a reward model or critic of NeMo-Aligner, beside GPTModel's own output layer, which it doesn't use.

    rm_head.weight [attributes, hidden], rm_head.bias [attributes]

A distributed checkpoint holds it whole. In rank files, each tensor-parallel rank has some of its columns. Source:
RewardModelHead of NeMo-Aligner (af2b3bd96ad7), a RowParallelLinear of Megatron core.
"""

import logging
from collections.abc import Mapping
from typing import TypeVar

from megaconv.megatron.states.names import EXTRA_STATE

_HEAD, _OUTPUT = "rm_head", "output_layer"
_Tensor = TypeVar("_Tensor")
_log = logging.getLogger("megaconv")


def has_reward_head(names: Mapping[str, object]) -> bool:
    """True if the tensors of a chunk have such a head."""
    return f"{_HEAD}.weight" in names


def with_head_as_output(tensors: Mapping[str, _Tensor], where: str) -> dict[str, _Tensor]:
    """The tensors with this head as the output layer, in the place of the head for words. where: for messages."""
    if not has_reward_head(tensors):
        return dict(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name != f"{_HEAD}{EXTRA_STATE}"}
    if f"{_OUTPUT}.weight" in kept:
        _log.warning("%s: the head for words is left out, which a reward model doesn't use", where)
        kept = {name: each for name, each in kept.items() if not name.startswith(f"{_OUTPUT}.")}
    return {name.replace(f"{_HEAD}.", f"{_OUTPUT}."): each for name, each in kept.items()}
