"""Where in its training a model was: all that a run needs to go on, besides tensors.

The optimizer's tensors are slots of the parameters (see ir.Key), fp32, shaped like the weight:

    master          the fp32 copy that is trained where the weights are 16 bits wide; an fp32 weight is its own master
    exp_avg         first moment of Adam
    exp_avg_sq      second moment
    momentum_buffer momentum of SGD, which has these alone
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MOMENTUM = "momentum_buffer"
ADAM, SGD = (EXP_AVG, EXP_AVG_SQ), (MOMENTUM,)
"""What either keeps of every parameter."""
SLOTS = (MASTER, *ADAM, *SGD)
"""The optimizer's, in the order in which a parameter's tensors are streamed, behind its weight."""


@dataclass(frozen=True)
class ParamGroup:
    """One class of parameters and its hyper-parameters."""

    wd_mult: float = 1.0
    """Factor on the weight decay: 0 for norms and biases."""
    lr_mult: float = 1.0
    decoupled_lr: bool = False
    """Whether embedding and head have a learning rate of their own."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Everything else as Megatron calls it: lr, max_lr, min_lr, betas, eps, weight_decay ..."""


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer knows besides its tensors."""

    kind: str
    """For people: `mixed precision`, `fp32`, `distributed` ..."""
    step: int | None = None
    """Updates done, which Adam's bias correction counts; None where it is not known yet."""
    groups: tuple[ParamGroup, ...] = ()
    group_of: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Canonical name -> index of its group; of every parameter that is trained."""
    grad_scaler: Mapping[str, Any] | None = None
    """scale, growth_tracker, hysteresis_tracker of fp16's dynamic loss scale; empty for a constant one."""


@dataclass(frozen=True)
class TrainingState:
    """Where in its training the model was."""

    iteration: int | None = None
    """None where the source knows none."""
    release: bool = False
    """Whether Megatron would call it a release: loaded without regard to its iteration."""
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    optimizer: OptimizerState | None = None
    """None where the source has none."""
    floating_point_operations: int = 0
    """Spent so far, as Megatron counts them for its log."""
    scheduler: Mapping[str, Any] | None = None
    """Megatron's `opt_param_scheduler`: learning rate and weight decay over the samples seen. None for a value that is not known."""
    rng: Mapping[tuple[int, int, int], Any] = field(default_factory=dict, repr=False)
    """(tensor, pipeline, expert rank) -> its random-number generators, which mean nothing at another layout."""
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Megatron's arguments about optimization, where the source has them: optimizer, lr, adam_beta1 ..."""
