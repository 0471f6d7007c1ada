"""A model's training progress: everything that a run needs to continue, except tensors.

The optimizer's tensors are slots of the parameters (see ir.Key). They are fp32 and have the shape of the weight:

    master          the fp32 copy of a 16-bit weight, which is trained; an fp32 weight is its own master
    exp_avg         first moment of Adam
    exp_avg_sq      second moment of Adam
    momentum_buffer momentum of SGD, its only state
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MOMENTUM = "momentum_buffer"
ADAM, SGD = (EXP_AVG, EXP_AVG_SQ), (MOMENTUM,)
"""State tensors of each parameter, for Adam and for SGD."""
SLOTS = (MASTER, *ADAM, *SGD)
"""The optimizer's slots, in the order in which a parameter's tensors are streamed after its weight."""


@dataclass(frozen=True)
class ParamGroup:
    """One group of parameters, and its hyper-parameters."""

    wd_mult: float = 1.0
    """Factor on the weight decay: 0 for norms and biases."""
    lr_mult: float = 1.0
    decoupled_lr: bool = False
    """True if embedding and head have their own learning rate."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All other settings under Megatron's names: lr, max_lr, min_lr, betas, eps, weight_decay ..."""


@dataclass(frozen=True)
class TorchGroups:
    """The parameter groups of a torch optimizer."""

    groups: tuple[Mapping[str, Any], ...]
    """The settings of each group under torch's names, such as lr, betas, eps and weight_decay."""
    group_of: Mapping[str, int] = field(repr=False)
    """Canonical name of each trained parameter -> index of its group."""


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer, without its tensors."""

    kind: str
    """Kind of the optimizer, for people: `mixed precision`, `fp32`, `distributed` ..."""
    step: int | None = None
    """Number of updates, which Adam's bias correction needs; None if it is not known yet."""
    groups: tuple[ParamGroup, ...] = ()
    group_of: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Canonical name of each trained parameter -> index of its group."""
    grad_scaler: Mapping[str, Any] | None = None
    """scale, growth_tracker and hysteresis_tracker of fp16's dynamic loss scale; empty for a constant loss scale."""
    unsupported: str | None = None
    """The part of the state that no Megatron checkpoint can hold; None if nothing is lost."""
    torch: TorchGroups | None = None
    """The source's own groups, if it isn't Megatron's."""
    incomplete: str | None = None
    """The part of the state that is not read, so that no output can hold it; None if everything is read."""


@dataclass(frozen=True)
class TrainingState:
    """The training progress of a model."""

    iteration: int | None = None
    """Number of the iteration; None if the source doesn't say it."""
    release: bool = False
    """True if Megatron would call the checkpoint a release, which it loads without its iteration."""
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    optimizer: OptimizerState | None = None
    """State of the optimizer; None if the source has none."""
    floating_point_operations: float = 0
    """Floating-point operations so far, as Megatron counts them for its log."""
    scheduler: Mapping[str, Any] | None = None
    """Megatron's `opt_param_scheduler`: learning rate and weight decay over the samples seen. A value is None if it is
    not known."""
    rng: Mapping[tuple[int, int, int], Any] = field(default_factory=dict, repr=False)
    """(tensor rank, pipeline rank, expert rank) -> random-number generators of the rank. They are valid only in the
    same layout."""
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Megatron's arguments of the run that saved the source, as far as any release can load them: lr, seq_length,
    data_path ..."""
