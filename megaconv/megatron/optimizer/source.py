"""The optimizer of a whole rank-file checkpoint as slots of canonical tensors."""

from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from formats import rank_files, torch_zip
from formats.tensor import LazyTensor, Shape, number
from formats.wording import listing
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.megatron.arguments.param_groups import (
    WITHOUT,
    Class,
    group_class,
    is_expert,
    require_same,
)
from megaconv.megatron.optimizer.master_check import CheckedMaster
from megaconv.megatron.optimizer.rank import RankOptimizer, parameters, read
from megaconv.megatron.optimizer.structure import kind_of, step_of
from megaconv.megatron.states.names import BUFFERS, is_of_retrieval
from megaconv.megatron.states.ranks import RankId, Ranks
from megaconv.model.assembled import Assembled, Placed, assemble
from megaconv.model.check import well_formed
from megaconv.model.ir import Key, is_trained
from megaconv.model.training import MASTER, SLOTS, OptimizerState, ParamGroup


@dataclass(frozen=True)
class Optimizers:
    """The optimizer state of all rank files; empty if it isn't wanted, or if there is none."""

    by_rank: Mapping[RankId, RankOptimizer]

    def place(self, placed: Placed, rank: RankId, chunk: int) -> Placed:
        """The same place with the optimizer's tensors of this parameter."""
        found = self.by_rank.get(rank)
        key = chunk, placed.native.name
        if found is None or key not in found.slots:
            return placed
        return Placed(
            placed.native, placed.tensor, placed.where, found.slots[key], found.group_of[key]
        )


def holds_optimizer(ranks: Ranks) -> bool:
    first = min(ranks.states)
    return "optimizer" in ranks.states[first] or _buffer_file(ranks, first).exists()


def describe_optimizer(ranks: Ranks) -> OptimizerState | None:
    """The optimizer's kind, and its step if it is known without reading a tensor; None without an optimizer."""
    if not holds_optimizer(ranks):
        return None
    first = min(ranks.states)
    optimizer = ranks.states[first].get("optimizer")
    return OptimizerState(
        kind_of(optimizer, has_buffers=_buffer_file(ranks, first).exists()), step_of(optimizer)
    )


def _buffer_file(ranks: Ranks, rank: RankId) -> Path:
    return ranks.paths[rank].parent / rank_files.OPTIMIZER_FILE


def open_optimizers(
    ranks: Ranks, args: Namespace, shared: Mapping[int, str], aliases: Mapping[str, str]
) -> Optimizers:
    """Open the optimizer state of all rank files. Raises CheckpointError for an optimizer that can't be read.

    aliases: second names of tensors -> first names. shared: by stage, the name of an embedding with a copy on another
    stage.
    """
    buffers: dict[Path, Any] = {}
    by_rank = {}
    for rank, state in ranks.states.items():
        where = ranks.files[rank]
        if "optimizer" not in state:
            raise TensorMismatch(
                f"{where}: has no optimizer, where other rank files have one; {WITHOUT}"
            )
        path = _buffer_file(ranks, rank)
        if path not in buffers:
            buffers[path] = torch_zip.read(path) if path.exists() else None
        found = parameters(ranks.weights[rank], shared.get(rank.pp), aliases)
        with well_formed(f"{where}: its optimizer"):
            by_rank[rank] = read(
                optimizer=state["optimizer"],
                buffers=buffers[path],
                found=found,
                args=args,
                pp_rank=rank.pp,
                where=where,
            )
    return Optimizers(by_rank)


def untrained(placed: Iterable[Placed]) -> set[str]:
    """Canonical names of tensors that no optimizer trains."""
    return {
        name
        for item in placed
        if item.native.name.endswith(BUFFERS) or _is_frozen(item)
        for name in item.native.parts
    }


def _is_frozen(item: Placed) -> bool:
    """True for a tensor of a Retro's encoder, without optimizer state: trained with a gate of 0."""
    of_retro = any(name.startswith(("layers.", "retriever.")) for name in item.native.parts)
    return of_retro and not item.slots and is_of_retrieval(item.native.name)


def assemble_slots(
    shapes: Mapping[str, Shape],
    placed: Sequence[Placed],
    weights: Mapping[Key, LazyTensor],
    without: Collection[str],
) -> dict[Key, LazyTensor]:
    """Every weight, followed by its optimizer's tensors. Masters are compared with their weights when they are read.

    without: names of weights without optimizer state. Raises TensorMismatch if other weights have none, or only a part
    of it.
    """
    slots: dict[Key, LazyTensor] = {}
    for slot in SLOTS:
        slots |= assemble(
            shapes,
            [item.of_slot(slot) for item in placed if slot in item.slots],
            strict=False,
            slot=slot,
        )
    for key, tensor in slots.items():
        assert isinstance(tensor, Assembled)
        boxes = [part.region.box for part in tensor.parts]
        if sum(box.rows * box.cols for box in boxes) != prod(tensor.shape):
            raise TensorMismatch(f"{key}: the rank files hold a part of it only; {WITHOUT}")
    forgotten = [
        key.name for key in weights if key.name not in without and not is_trained(key.name, slots)
    ]
    if forgotten:
        raise TensorMismatch(f"the optimizer has no state of {listing(forgotten)}; {WITHOUT}")
    ordered: dict[Key, LazyTensor] = {}
    for key, weight in weights.items():
        ordered[key] = weight
        for slot in SLOTS:
            found = slots.get(Key(key.name, slot))
            if found is not None:
                ordered[Key(key.name, slot)] = (
                    CheckedMaster(key.name, found, weight) if slot == MASTER else found
                )
    return ordered


def optimizer_state(
    optimizers: Optimizers, placed: Iterable[Placed], known: OptimizerState, iteration: int | None
) -> OptimizerState:
    """Everything about the optimizer except its tensors. known: the part that is known without the rank files' groups.

    Raises TensorMismatch if parameters were updated different numbers of times, NotExpressible if ranks have different
    groups.
    """
    kinds: dict[tuple[bool, Class], ParamGroup] = {}
    groups: list[ParamGroup] = []
    group_of: dict[str, int] = {}
    for item in placed:
        if item.group is not None:
            # Experts have a separate optimizer, whose groups may differ from the others'.
            kind = is_expert(item.native.name), group_class(item.group)
            group = kinds.setdefault(kind, item.group)
            require_same(group, item.group, item.where)
            if group not in groups:
                groups.append(group)
            group_of |= dict.fromkeys(item.native.parts, groups.index(group))
    found = list(optimizers.by_rank.values())
    step = _step(found)
    return OptimizerState(
        known.kind,
        iteration if step is None else step,
        tuple(groups),
        group_of,
        _grad_scaler(found),
    )


def _grad_scaler(found: Iterable[RankOptimizer]) -> Mapping[str, Any] | None:
    scalers = [(scaler, rank.where) for rank in found for scaler in rank.grad_scalers]
    for scaler, where in scalers[1:]:
        first = scalers[0][0]
        if scaler != first:  # the experts' optimizer keeps a separate count
            raise NotExpressible(
                f"{where}: the optimizers of one run have different loss scales ({_shown(first)} and {_shown(scaler)}), which can't be "
                f"kept in another layout; {WITHOUT}"
            )
    return scalers[0][0] if scalers else None


def _shown(scaler: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in scaler.items())


def _step(found: Sequence[RankOptimizer]) -> int | None:
    """The number of updates: the larger one of the counts in groups and in parameters.

    Each optimizer counts in one of these places, and leaves the other as it was loaded.
    """
    counts: list[int] = []
    for steps in (
        {step for rank in found for step in rank.group_steps},
        {step for rank in found for step in rank.parameter_steps},
    ):
        if len(steps) > 1:
            raise TensorMismatch(
                f"the optimizer has updated some parameters {min(steps)} times and others {max(steps)} times, "
                f"which can't be kept in another layout; {WITHOUT}"
            )
        counts += steps
    return max(counts, default=None)


def read_scheduler(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scheduler's state with present names; None without one. Before 2022 the entry was called lr_scheduler."""
    found = state.get("opt_param_scheduler", state.get("lr_scheduler"))
    if not isinstance(found, dict) or "num_steps" not in found:
        return None
    with well_formed("the scheduler's state (opt_param_scheduler)"):
        numbers = {str(name): number(value) for name, value in found.items()}
    plain = {
        name: value
        for name, value in numbers.items()
        if isinstance(value, (int, float, str, type(None)))
    }
    return {_PRESENT_NAMES.get(name, name): value for name, value in plain.items()}


_PRESENT_NAMES = {
    "warmup_steps": "lr_warmup_steps",
    "decay_style": "lr_decay_style",
    "decay_steps": "lr_decay_steps",
}
