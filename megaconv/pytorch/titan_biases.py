"""torchtitan's biases of experts, in models of families that have none.

torchtitan adds `expert_bias_E` to the scores by which a router chooses experts, and moves it after each step towards equal
loads (`load_balance_coeff`). No other software has such a bias for Qwen3 MoE, GPT-OSS and DeepSeek V2, and
torchtitan's own export to Hugging Face drops it. A bias of zeros changes nothing.

Source: models/common/moe.py and components/optimizer of torchtitan 0.3.0.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from formats.distcp_files import DistcpFiles
from formats.pickle_writer import Constant
from formats.tensor import LazyTensor, read_tensor
from megaconv.errors import NotExpressible, UsageError
from megaconv.model.config import ModelConfig
from megaconv.pytorch.titan_rows import EXPERT_BIAS, further_biases

_OPTION = "expert_bias"
OPTIONS = {
    _OPTION: "`drop`: leave out torchtitan's biases of experts, which the family doesn't have. Other experts may be chosen then"
}
_Tensor = TypeVar("_Tensor", bound=LazyTensor)
_log = logging.getLogger("megaconv")


def left_out(
    found: Mapping[str, _Tensor], path: Path, extra: Mapping[str, str]
) -> dict[str, _Tensor]:
    """The tensors without these biases. Raises NotExpressible if a bias isn't zero, unless the option says to drop it."""
    asked = extra.get(_OPTION)
    if asked not in (None, "drop"):
        raise UsageError(f"--option {_OPTION}={asked}: is not known; choose drop")
    biases = {name: tensor for name, tensor in found.items() if EXPERT_BIAS.fullmatch(name)}
    moved = [name for name, tensor in biases.items() if read_tensor(tensor).any()]
    if moved and asked is None:
        raise NotExpressible(
            f"{path}: {moved[0]} isn't zero: torchtitan balanced experts with a bias that the family doesn't have. "
            f"To leave it out, give --option {_OPTION}=drop; other experts may be chosen then"
        )
    if moved:
        _log.warning(
            "%s: the biases of experts of %d layers are left out; routers may choose other experts",
            path,
            len(moved),
        )
    return {name: tensor for name, tensor in found.items() if name not in biases}


def add_zeros(stored: DistcpFiles, config: ModelConfig) -> None:
    """Add the biases that torchtitan's checkpointer expects in a checkpoint."""
    for name in further_biases(config):
        experts = config.experts.count
        stored.add_constant(name, Constant((experts,), "float32", bytes(4 * experts)))
