"""Reads the optimizer of a distributed Megatron checkpoint (`torch_dist`, `zarr`, `fsdp_dtensor`) in every form.

Tensors with the model's shapes (fully_reshardable, non-distributed optimizers, Megatron-FSDP;
fully_sharded_model_space, flattened):

    [chained_0.]optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight
    optimizer.state.module.module.module.decoder.layers.0.mlp.linear_fc2.weight.exp_avg

Other forms have the tensors in buckets (optimizer_buckets.py).

Source: distrib_optimizer.py and optimizer.py in megatron/core/optimizer, core 0.6 to 0.19.
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from formats.chunked import ChunkedTensor, require_cover
from formats.flattened import unflatten
from formats.tensor import LazyTensor, Shape
from megaconv.errors import CheckpointError, TensorMismatch
from megaconv.megatron.arguments.param_groups import (
    WITHOUT,
    Class,
    by_class,
    class_of,
    is_expert,
    read_group,
)
from megaconv.megatron.distributed.keys import unstack
from megaconv.megatron.distributed.optimizer_buckets import OBJECT, Buckets, Directory
from megaconv.megatron.optimizer.rank import RankOptimizer
from megaconv.megatron.optimizer.source import Optimizers
from megaconv.megatron.optimizer.structure import (
    grad_scaler,
    other_optimizer,
    parts,
    step_of,
    updates,
)
from megaconv.megatron.states.names import BUFFERS, is_of_retrieval
from megaconv.megatron.states.ranks import RankId
from megaconv.model.assembled import Placed
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.training import ADAM, MASTER, SGD, OptimizerState, ParamGroup

_RNG = re.compile(r"rng_state/shard_(\d+)\.(\d+)_[\d.]+")
_KEPT = "|".join((*ADAM, *SGD))
_STATE = re.compile(rf"(?:chained_\d+\.)?optimizer\.state\.(fp32_param|param|{_KEPT})\.(.+)")
_FSDP_STATE = re.compile(rf"optimizer\.state\.(?:module\.)*(.+)\.({_KEPT})")
_STEP = re.compile(r"optimizer\.state\.(?:module\.)*.+\.step")
_OTHER_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(.+)")
_GROUP_IDENTITY = (
    "wd_mult",
    "lr_mult",
    "is_decoupled_lr",
    "is_expert_parallel",
    "max_lr",
    "min_lr",
)
_FSDP_GROUP = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)*(.+)\.(\w+)")
_MASTERS = ("fp32_param", "param")


@dataclass(frozen=True)
class DistOptimizer:
    """The optimizer of one opened directory."""

    where: str
    directory: Directory
    tensors: Mapping[str, ChunkedTensor]
    state: Mapping[str, Any]
    """The content of common.pt."""
    args: Namespace
    flattened: Mapping[str, Shape]
    """True shapes of tensors that are stored flat, by key."""

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """Everything that isn't sharded. Megatron-FSDP stores it as separate objects."""
        found: dict[str, Any] = dict(self.state)
        for name in self.directory.objects():
            outer, _, inner = name.partition(".")
            if outer == "opt_param_scheduler":
                found.setdefault(outer, {})[inner] = self.directory.read_object(name)
        return found

    @cached_property
    def in_buckets(self) -> bool:
        return any(".distributed.dp_group_idx_" in name for name in self.tensors) or any(
            name.endswith(".param_state/shard_0_1") for name in self.directory.objects()
        )

    def rng(self) -> dict[tuple[int, int, int], Any]:
        """Random-number generators by (tensor, pipeline, expert rank).

        Empty for runs with expert parallelism, whose grid has another axis.
        """
        found = {}
        for name in self.directory.objects():
            if place := _RNG.fullmatch(name):
                value = self.directory.read_object(name)
                found[int(place[2]), int(place[1]), 0] = (
                    value if isinstance(value, list) else [value]
                )
        return found

    def describe(self) -> OptimizerState:
        """The optimizer's kind, and its step if it is known. Never raises."""
        kind = self._kind()
        try:
            step = step_of({"param_groups": self._groups(first_only=True)})
        except (CheckpointError, AttributeError, LookupError, TypeError, ValueError):
            step = None
        return OptimizerState(kind, step if step is not None else step_of(self._common_optimizer()))

    def _kind(self) -> str:
        given = self.common.get("content_metadata")
        sharding = given.get("distrib_optim_sharding_type") if isinstance(given, dict) else None
        for part in parts(self._common_optimizer()):
            sharding = sharding or (
                part.get("param_state_sharding_type") if isinstance(part, dict) else None
            )
        if sharding:
            return f"distributed, {sharding}"
        if any(_FSDP_GROUP.fullmatch(name) for name in self.directory.objects()):
            return "Megatron-FSDP"
        return "mixed precision" if any(".fp32_param." in name for name in self.tensors) else "fp32"

    def _common_optimizer(self) -> Any:
        return self.common.get("optimizer", {})

    def open_buckets(
        self, config: ModelConfig, layout: Layout, padded: int, placed: Sequence[Placed]
    ) -> tuple[Optimizers, list[Placed]]:
        """The tensors in buckets, of every rank of the run that saved them: see Buckets.open."""
        buckets = Buckets(self.where, self.directory, self.tensors, self.args, self.common)
        return buckets.open(config, layout, padded, placed)

    def open(self, weights: Mapping[str, LazyTensor], aliases: Mapping[str, str]) -> Optimizers:
        """The optimizer's tensors of a single rank that holds the whole model; empty if they are in buckets.

        weights: the weights of that rank, by native name. aliases: second names of tensors -> first names; the
        optimizer may use either. Raises TensorMismatch if tensors are missing or have another shape.
        """
        if self.in_buckets:
            return Optimizers({})
        result = RankOptimizer(self.where)
        slots = self._slots(aliases, result.parameter_steps)
        with well_formed(f"{self.where}: its optimizer"):
            step = step_of(self._common_optimizer())
            if step is not None:
                result.group_steps.add(step)
            groups = self._groups()
            result.group_steps |= {updates(group["step"]) for group in groups if "step" in group}
            known = {
                False: self._by_class(groups, experts=False),
                True: self._by_class(groups, experts=True),
            }
            for part in parts(self._common_optimizer()):
                result.grad_scalers += grad_scaler(part) if isinstance(part, dict) else []
            of_retro = bool(getattr(self.args, "retro_add_retriever", False))
            for name, weight in weights.items():
                has_slots = any(name in each for each in slots.values())
                is_frozen = of_retro and is_of_retrieval(name) and not has_slots
                if not name.endswith(BUFFERS) and name not in aliases and not is_frozen:
                    result.slots[0, name] = self._slots_of(name, weight, slots)
                    result.group_of[0, name] = self._group_of(name, weight, known)
        return Optimizers({RankId(0, 0, 0): result})

    def _slots(
        self, aliases: Mapping[str, str], steps: set[int]
    ) -> dict[str, dict[str, LazyTensor]]:
        """The optimizer's tensors by slot and native name. Adds the step counters of parameters to `steps`.

        Raises NotExpressible for the state of an unsupported optimizer.
        """
        by_slot: dict[str, dict[str, ChunkedTensor]] = {}
        for key, tensor in self.tensors.items():
            if _STEP.fullmatch(key):
                with well_formed(f"{self.where}: {key}"):
                    steps.add(updates(tensor))
            elif place := self._slot_and_name(key):
                slot, name = place
                by_slot.setdefault(slot, {})[name] = self._whole(key, tensor)
        found: dict[str, dict[str, LazyTensor]] = {}
        for slot, tensors in by_slot.items():
            own_names = unstack(tensors)
            found[slot] = {aliases.get(name, name): each for name, each in own_names.items()}
        return found

    def _slot_and_name(self, key: str) -> tuple[str, str] | None:
        """(slot, native name) of a key; None if it is not an optimizer's tensor."""
        if found := _STATE.fullmatch(key):
            return MASTER if found[1] in _MASTERS else found[1], found[2]
        if found := _FSDP_STATE.fullmatch(key):
            return found[2], found[1]
        if found := _OTHER_STATE.fullmatch(key):
            raise other_optimizer(self.where, found[1])
        return None

    def _by_class(
        self, groups: Sequence[dict[str, Any]], *, experts: bool
    ) -> Mapping[Class, ParamGroup]:
        """The parameter groups of experts, or all other groups, by the class of their parameters."""
        wanted = [group for group in groups if bool(group.get("is_expert_parallel")) == experts]
        return by_class([read_group(group, groups) for group in wanted], self.args, self.where)

    def _whole(self, key: str, tensor: ChunkedTensor) -> ChunkedTensor:
        if key not in self.flattened:
            return tensor
        whole = unflatten(tensor, self.flattened[key])
        require_cover(
            f"{self.where}: {key}",
            whole.shape,
            [(chunk.offset, chunk.shape) for chunk in whole.chunks],
        )
        return whole

    def _slots_of(
        self, name: str, weight: LazyTensor, slots: Mapping[str, Mapping[str, LazyTensor]]
    ) -> dict[str, LazyTensor]:
        # Muon has SGD's slots for matrices, and Adam's for the rest.
        has = {slot for slot, tensors in slots.items() if name in tensors}
        kept = SGD if has.isdisjoint(ADAM) and not has.isdisjoint(SGD) else ADAM
        if not has <= {MASTER, *kept}:
            raise other_optimizer(self.where, f"{', '.join(sorted(has))} of {name}")
        wanted = kept if weight.dtype == "float32" else (MASTER, *kept)
        found = {
            slot: tensor for slot in wanted if (tensor := slots.get(slot, {}).get(name)) is not None
        }
        missing = [slot for slot in wanted if slot not in found]
        if missing:
            raise TensorMismatch(
                f"{self.where}: the optimizer has no {missing[0]} of {name} (was it frozen?); {WITHOUT}"
            )
        for slot, tensor in found.items():
            if tensor.shape != weight.shape or tensor.dtype != "float32":
                raise TensorMismatch(
                    f"{self.where}: {name} is {list(weight.shape)}, its {slot} in the optimizer {list(tensor.shape)} "
                    f"{tensor.dtype}; {WITHOUT}"
                )
        return found

    def _group_of(
        self, name: str, weight: LazyTensor, known: Mapping[bool, Mapping[Class, ParamGroup]]
    ) -> ParamGroup:
        """The parameter group of a weight.

        known: the groups of experts, if they have a separate optimizer, and all other groups.
        """
        theirs = known[True] if is_expert(name) and known[True] else known[False]
        decoupled = any(kind.decoupled for kind in theirs)
        group = theirs.get(class_of(name, weight.shape, decoupled=decoupled))
        if group is None:
            raise TensorMismatch(
                f"{self.where}: the optimizer has no group for {name} (was it frozen?); {WITHOUT}"
            )
        return group

    def _groups(self, *, first_only: bool = False) -> list[dict[str, Any]]:
        """The groups of all optimizers, wherever they are stored.

        first_only: groups of one rank, which suffice for the step.
        """
        found: list[dict[str, Any]] = []
        for part in parts(self._common_optimizer()):
            if isinstance(part, dict):
                found += part.get("optimizer", part).get("param_groups", ())
        if found:
            return found
        names = [
            name
            for name in self.directory.objects()
            if (m := OBJECT.fullmatch(name)) and m[3] == "optimizer"
        ]
        for name in names[:1] if first_only else names:
            value = self.directory.read_object(name)
            if isinstance(value, dict):
                found += value["param_groups"]
        return found or list(self._fsdp_groups())

    def _fsdp_groups(self) -> Iterator[dict[str, Any]]:
        """One group of each class. Every parameter has a copy of its whole group."""
        by_parameter: dict[str, list[tuple[str, str]]] = {}
        for name in self.directory.objects():
            if found := _FSDP_GROUP.fullmatch(name):
                by_parameter.setdefault(found[1], []).append((found[2], name))
        seen = set()
        for members in by_parameter.values():
            identity = {setting: name for setting, name in members if setting in _GROUP_IDENTITY}
            kind = tuple(self.directory.read_object(name) for name in identity.values())
            if kind not in seen:
                seen.add(kind)
                yield {setting: self.directory.read_object(name) for setting, name in members}
