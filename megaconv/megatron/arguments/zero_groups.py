"""Groups of torch's and DeepSpeed's Adam as a Megatron run's: matrices decay, vectors don't, all have one learning rate.

Megatron's scheduler sets the learning rate of every group, and the weight decay of groups that decay. betas and eps
keep a group's values. A group is converted if Megatron would put the same parameters in such a group. Source:
optimizer/__init__.py and optimizer_param_scheduler.py of Megatron core 0.16; deepspeed 0.19.8, runtime/engine.py
(_configure_basic_optimizer).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from formats.tensor import Shape, number
from megaconv.errors import UsageError
from megaconv.megatron.arguments.param_groups import class_of, read_group
from megaconv.model.training import ParamGroup, TorchGroups

TAKE_MEGATRONS = "weight_decay"
"""The --option that accepts Megatron's choice of parameters that decay."""
GROUP_OPTIONS = {
    TAKE_MEGATRONS: "`megatron`: apply weight decay as Megatron does, to all matrices and no vectors, and ignore the source's groups"
}
"""The options of loaders whose sources have groups of torch's or DeepSpeed's Adam."""

_OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Settings that schedulers of torch and DeepSpeed leave in a group.

Megatron's would use max_lr and min_lr as its own.
"""
_OF_ADAM = frozenset({
    "params", "step", "lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "maximize", "foreach", "capturable",
    "differentiable", "fused", "decoupled_weight_decay", *_OF_SCHEDULES,
})  # fmt: skip
"""Settings of a group of torch's, Apex's and DeepSpeed's Adam."""


def takes_megatrons(extra: Mapping[str, str]) -> bool:
    """True if the user accepts Megatron's choice. Raises UsageError for another value of the option."""
    asked = extra.get(TAKE_MEGATRONS)
    if asked not in (None, "megatron"):
        raise UsageError(f"--option {TAKE_MEGATRONS}={asked}: choose megatron, or leave it out")
    return asked is not None


class MegatronGroups(NamedTuple):
    """The groups for a Megatron run, or the reason why it can't have them."""

    groups: tuple[ParamGroup, ...]
    group_of: Mapping[str, int]
    """Canonical name -> index of its group."""
    unsupported: str | None
    """The reason why the groups can't be kept; None if nothing is lost."""


def megatron_groups(
    own: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, Shape],
    ds_config: Any,
    *,
    takes_megatrons: bool,
) -> MegatronGroups:
    """The groups of a Megatron run.

    own: the optimizer's group of each trained canonical tensor. ds_config: DeepSpeed's configuration of the run.
    takes_megatrons: True if Megatron may decay other parameters than DeepSpeed did.
    """
    groups = list({id(group): group for group in own.values()}.values())
    decays = {name: class_of(name, shapes[name], decoupled=False).decay for name in own}
    unsupported = _other_adam(groups, ds_config) or _other_rates(groups)
    if not unsupported and not takes_megatrons:
        unsupported = _other_decay(own, decays)
    made: dict[bool, ParamGroup] = {}
    for name, group in own.items():
        decay = decays[name]
        found = _group(group, groups, decays=decay)
        first = made.setdefault(decay, found)
        if first != found and not unsupported:
            unsupported = f"groups of the optimizer differ in {_difference(first, found)}"
    order = list(made)
    group_of = {name: order.index(decay) for name, decay in decays.items()}
    return MegatronGroups(tuple(made.values()), group_of, unsupported)


def torch_groups(
    own: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], ds_config: Any = None
) -> TorchGroups:
    """The same groups for an output that torch's or DeepSpeed's Adam continues from.

    own: as for `megatron_groups`. groups: all groups of the source, in its order.
    """
    decoupled = {"decoupled_weight_decay": not _is_coupled(ds_config)}
    settings = tuple(decoupled | dict(read_group(group, groups).settings) for group in groups)
    places = {id(group): index for index, group in enumerate(groups)}
    return TorchGroups(settings, {name: places[id(group)] for name, group in own.items()})


def _group(
    group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], *, decays: bool
) -> ParamGroup:
    settings = {
        name: value
        for name, value in read_group(group, groups).settings.items()
        if name not in _OF_SCHEDULES
    }
    highest = max(_decay(each) for each in groups) if decays else 0.0
    return ParamGroup(float(decays), settings=settings | {"weight_decay": highest})


def _decay(group: Mapping[str, Any]) -> float:
    return float(number(group.get("weight_decay", 0.0)))


def _other_adam(groups: Sequence[Mapping[str, Any]], ds_config: Any) -> str | None:
    """The difference from Megatron's Adam, as a message; None if there is none.

    Megatron's Adam applies weight decay separately from gradients (AdamW).
    """
    coupled = _is_coupled(ds_config)
    for group in groups:
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                return f"the optimizer has {name}, which Megatron's Adam doesn't"
        if _decay(group) and not group.get("decoupled_weight_decay", not coupled):
            return "the optimizer is Adam with L2 regularization (adam_w_mode false), Megatron's is AdamW"
        # Strings are labels.
        unknown = sorted(
            name for name in group.keys() - _OF_ADAM if not isinstance(group[name], str)
        )
        if unknown:
            return f"groups of the optimizer have {unknown[0]}, which Megatron's Adam doesn't"
    return None


def _is_coupled(ds_config: Any) -> bool:
    """True if DeepSpeed was configured with an Adam that isn't AdamW.

    The groups don't show this for DeepSpeed's own Adam optimizers, nor for those of older torch.
    """
    asked = ds_config.get("optimizer") if isinstance(ds_config, dict) else None
    if not isinstance(asked, dict) or str(asked.get("type")).lower() != "adam":
        return False
    params = asked.get("params")
    return isinstance(params, dict) and params.get("adam_w_mode", True) is False


def _other_rates(groups: Sequence[Mapping[str, Any]]) -> str | None:
    rates = sorted({float(number(group.get("lr", 0.0))) for group in groups})
    if len(rates) > 1:
        return f"groups of the optimizer have their own learning rates ({rates[0]:g}, {rates[-1]:g}), Megatron's have one"
    return None


def _other_decay(own: Mapping[str, Mapping[str, Any]], decays: Mapping[str, bool]) -> str | None:
    """The first parameter whose weight decay would differ in Megatron, as a message; None if there is none."""
    highest = max(map(_decay, own.values()), default=0.0)
    for name, group in own.items():
        megatrons = highest if decays[name] else 0.0
        if _decay(group) != megatrons:
            return (
                f"{name} has weight decay {_decay(group):g} and would have {megatrons:g} in Megatron, which decays all matrices alike "
                f"and no vectors (--option {TAKE_MEGATRONS}=megatron goes on so)"
            )
    return None


def _difference(group: ParamGroup, other: ParamGroup) -> str:
    names = sorted(
        name
        for name in {*group.settings, *other.settings}
        if group.settings.get(name) != other.settings.get(name)
    )
    return ", ".join(
        f"{name} ({group.settings.get(name)} and {other.settings.get(name)})" for name in names
    )
