"""The optimizer's parameter groups: which group a parameter belongs to, and how Megatron core writes the groups.

    decay       matrices: layers' weights, embeddings, head, router
    no decay    vectors: norms and biases
    decoupled   embedding and head, where they have their own learning rate

With expert parallelism, a second optimizer trains the experts; its groups are of the same kinds. Groups are recognised
by their values, never by their order, which differs between releases and pipeline stages. Checkpoints don't name the
parameters of a group, so groups of one kind can't be distinguished. They must be equal; only the groups of experts may
differ. Source: optimizer/__init__.py of Megatron core.
"""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from formats.tensor import Shape, number
from megaconv.errors import NotExpressible
from megaconv.model.training import ParamGroup

WITHOUT = "--no-optimizer converts the weights alone"

_IDENTITY = (
    "wd_mult",
    "lr_mult",
    "is_expert_parallel",
    "is_decoupled_lr",
    "default_config",
    "params",
    "step",
)
_DECOUPLED = ("word_embeddings.weight", "output_layer.weight", "word_embeddings_for_head.weight")
_PLAIN = (type(None), bool, int, float, str)

DEFAULTS: Mapping[str, Any] = {
    "lr": 0.0, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
}  # fmt: skip
"""The settings that a group of Adam needs so that torch's, Apex's and Transformer Engine's Adam can all continue.

max_lr and min_lr are left out: Megatron's scheduler uses the run's values for a group without them, and fails on None.
"""
_OF_TRAINING = ("max_lr", "min_lr", *DEFAULTS)


class Class(NamedTuple):
    """The common properties of the parameters in one group."""

    decay: bool
    decoupled: bool = False


def is_expert(name: str) -> bool:
    """True if a native name is that of a single expert's parameter (not of the router or a shared expert)."""
    return ".experts." in name


def class_of(name: str, shape: Shape, *, decoupled: bool, decayed_embeddings: bool = True) -> Class:
    """The class of a parameter. decoupled: True if embedding and head have their own learning rate in this run."""
    decay = (
        len(shape) > 1
        and not name.endswith(".bias")
        and "norm" not in name  # norms of single heads have a row for each head
        and (decayed_embeddings or "embedding" not in name)
    )
    return Class(decay, decoupled and name.endswith(_DECOUPLED))


def read_group(group: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> ParamGroup:
    """A group of a checkpoint. Objects among its settings are left out; ValueError if training needs them."""
    group = {name: _plain(value) for name, value in group.items() if name != "params"}
    factor = group.get("wd_mult", group.get("pre_wd_mult"))
    if factor is None:
        factor = _early_factor(group, others)
    lr_mult = float(group.get("lr_mult", group.get("pre_lr_mult", 1.0)))
    decoupled = bool(group.get("is_decoupled_lr"))
    if lr_mult == 1 and group.get("default_config") is False:
        decoupled = True
    settings = {
        name: value
        for name, value in group.items()
        if name not in _IDENTITY and is_plain_setting(value)
    }
    for name in _OF_TRAINING:
        if name in group and name not in settings:
            raise ValueError(f"{name} of a parameter group")
    return ParamGroup(float(factor), lr_mult, decoupled, settings)


def _early_factor(group: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> float:
    """The factor of the weight decay before 2022: there are two groups, which differ only in the weight decay."""
    decayed = any(other["weight_decay"] != 0 for other in others)
    return 0.0 if decayed and group["weight_decay"] == 0 else 1.0


def _plain(value: Any) -> Any:
    """A value with tensors of one element as numbers. Optimizers with captured steps keep rates in such tensors."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return number(value) if prod(getattr(value, "shape", (0,))) == 1 else value


def is_plain_setting(value: object) -> bool:
    """True for a value that every release of Megatron can load: None, a number, a text, or a list of these."""
    return (
        all(map(is_plain_setting, value))
        if isinstance(value, (tuple, list))
        else isinstance(value, _PLAIN)
    )


def group_class(group: ParamGroup) -> Class:
    return Class(group.wd_mult != 0, group.decoupled_lr)


def by_class(groups: Iterable[ParamGroup], args: Namespace, where: str) -> dict[Class, ParamGroup]:
    """The groups of one optimizer by class. Raises NotExpressible if the parameters of a group can't be determined."""
    found: dict[Class, ParamGroup] = {}
    no_decoupled_lr = hasattr(args, "decoupled_lr") and args.decoupled_lr is None
    for group in groups:
        if group.lr_mult != 1:
            raise NotExpressible(
                f"{where}: parameter groups with an lr_mult can't be distinguished; {WITHOUT}"
            )
        if group.decoupled_lr and no_decoupled_lr:
            rate = group.settings.get("max_lr")
            raise NotExpressible(
                f"{where}: a parameter group has a separate learning rate (max_lr {rate}), and the args have no decoupled_lr; "
                f"megaconv can't determine the parameters to which it applies; {WITHOUT}"
            )
        require_same(found.setdefault(group_class(group), group), group, where)
    for name in ("apply_wd_to_qk_layernorm", "no_weight_decay_cond_type"):
        if value := getattr(args, name, None):
            raise NotExpressible(
                f"{where}: {name} is {value!r}: the weight decay of norms can't be determined; {WITHOUT}"
            )
    return found


def require_same(group: ParamGroup, other: ParamGroup, where: str) -> None:
    """Raises NotExpressible, which names the differences, unless two groups of one class are equal."""
    if group == other:
        return
    ours = {"wd_mult": group.wd_mult, **group.settings}
    theirs = {"wd_mult": other.wd_mult, **other.settings}
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    differs = ", ".join(f"{name} {ours.get(name)} and {theirs.get(name)}" for name in names)
    decay, decoupled = group_class(group)
    kind = "with weight decay" if decay else "without weight decay"
    if decoupled:
        kind += ", of embedding and head"
    raise NotExpressible(
        f"{where}: parameter groups of one kind ({kind}) differ in {differs}; "
        "which parameters are in which can't be determined in another layout; "
        f"{WITHOUT}"
    )


def write_order(groups: Iterable[ParamGroup]) -> list[int]:
    """Indices in the order of core 0.16: the default group, then the others by their overrides, name by name."""

    def overrides(group: ParamGroup) -> list[tuple[str, float]]:
        found: dict[str, float] = {}
        if group.decoupled_lr:
            for name in ("max_lr", "min_lr"):
                found[name] = group.settings.get(name) or 0.0
        if group.lr_mult != 1:
            found["lr_mult"] = group.lr_mult
        if group.wd_mult != 1:
            found["wd_mult"] = group.wd_mult
        return sorted(found.items())

    listed = list(groups)
    return sorted(range(len(listed)), key=lambda index: overrides(listed[index]))


def write_group(group: ParamGroup, *, expert: bool, step: int) -> dict[str, Any]:
    """A group as it is written, without `params`: all settings that any release or its optimizers look for."""
    identity = {
        "is_expert_parallel": expert,
        "default_config": not group.decoupled_lr and group.lr_mult == 1,
        "wd_mult": group.wd_mult,
        "lr_mult": group.lr_mult,
        "is_decoupled_lr": False,  # since 0.16, default_config and max_lr determine it
    }
    defaults = {} if "momentum" in group.settings else DEFAULTS
    return {**identity, **defaults, **group.settings, "step": step}
