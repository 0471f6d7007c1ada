"""Plans the optimizer of one rank file as Megatron core 0.16 writes it; rank.py shows the forms.

Groups come in the order of that release. They hold all settings that any release or its optimizers look for, so that
three kinds of Adam can continue: Transformer Engine's and Apex's (a step in every group) and torch's (a step with every
parameter).
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from formats.pickle_records import TorchDtype
from formats.pickle_writer import Constant, Placeholder
from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.param_groups import (
    group_class,
    is_expert,
    require_same,
    write_group,
    write_order,
)
from megaconv.megatron.optimizer.buffers import Buffer, BufferParameter, fill, gaps
from megaconv.model.ir import WEIGHT, Key, TensorInfo
from megaconv.model.natives import NativeTensor
from megaconv.model.training import ADAM, EXP_AVG, EXP_AVG_SQ, MASTER, SGD, OptimizerState

_BUFFER_NAMES = {"param": MASTER, EXP_AVG: EXP_AVG, EXP_AVG_SQ: EXP_AVG_SQ}


class Parameter(NamedTuple):
    """One parameter of a rank, in the order of the model."""

    model: str
    """`model`, `model0` ..."""
    native: NativeTensor
    shared: bool
    """True for a tied embedding with a copy on another stage."""

    @property
    def label(self) -> str:
        return f"{self.model}/{self.native.name}"


class Piece(NamedTuple):
    """The place of one of the optimizer's tensors."""

    native: NativeTensor
    slot: str
    record: str
    offset: int = 0
    """Offset in the record in elements."""


@dataclass(frozen=True)
class Planned:
    """The planned optimizer of one rank file."""

    state: Any
    """The entry `optimizer` of the rank file."""
    buffers: Any = None
    """The content of distrib_optim.pt; None without one."""
    pieces: list[Piece] = field(default_factory=list)
    gaps: list[tuple[str, int, int]] = field(default_factory=list)
    """(record, first element, number of elements) of ranges that stay zero."""


@dataclass(frozen=True)
class OptimizerWriter:
    """The optimizers of all rank files of one output."""

    state: OptimizerState
    manifest: Mapping[Key, TensorInfo]
    several: bool
    """True if experts have a separate optimizer, which they have with expert parallelism."""
    fp16: bool
    gradients_in_fp32: bool
    """True for fp16 models with fp32 gradients, whose dtype is a part of the buffers' names."""

    def optimizers(self) -> tuple[bool | None, ...]:
        """The optimizers: True for that of the experts, False for that of other parameters, None for one of all."""
        return (False, True) if self.several else (None,)

    def groups(self, experts: bool | None) -> list[dict[str, Any]]:
        """The groups of one optimizer, without parameters."""
        return [self._group(index, experts) for index, _ in self._members((), experts)]

    def wrapped(self, inner: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """A mixed-precision optimizer around another one."""
        scaler = (
            {}
            if self.state.grad_scaler is None or not self.fp16
            else {"grad_scaler": self._scaler()}
        )
        return {"optimizer": inner, **scaler, **more}

    @cached_property
    def masters(self) -> bool:
        """True if any parameter has a master."""
        return any(key.slot == MASTER for key in self.manifest)

    @cached_property
    def moments(self) -> tuple[str, ...]:
        """The slots of every trained parameter, besides its master."""
        return ADAM if any(key.slot == ADAM[0] for key in self.manifest) else SGD

    def trains(self, native: NativeTensor) -> bool:
        """True if a native tensor has optimizer state. Raises NotExpressible if only a part of it has."""
        return self.has(native, self.moments[0])

    def counter(self, name: str) -> dict[str, Constant]:
        """The step as torch's AdamW counts it; empty for SGD, which counts none."""
        return (
            {name: Constant((), "float32", struct.pack("<f", self.state.step or 0))}
            if self.moments == ADAM
            else {}
        )

    def plain(self, parameters: Sequence[Parameter]) -> Planned:
        """Tensors by parameter: mixed precision, or fp32 if no parameter has a master."""
        planned = Planned([])
        for experts in self.optimizers():
            states: dict[int, Any] = {}
            groups: list[dict[str, Any]] = []
            masters: list[list[Placeholder]] = []
            for index, members in self._members(parameters, experts):
                ids = range(len(states), len(states) + len(members))
                masters.append([])
                for number, parameter in zip(ids, members, strict=True):
                    states[number] = self.counter("step")
                    states[number] |= {
                        slot: self._whole(parameter, slot, planned) for slot in self.moments
                    }
                    if self.has(parameter.native, MASTER):
                        masters[-1].append(self._whole(parameter, MASTER, planned))
                groups.append(self._group(index, experts) | {"params": list(ids)})
            inner = {"state": states, "param_groups": groups}
            planned.state.append(
                self.wrapped(inner, {"fp32_from_fp16_params": masters}) if self.masters else inner
            )
        return self._unwrapped(planned)

    def distributed(self, parameters: Sequence[Parameter], *, gathers_dense: bool) -> Planned:
        """Tensors in flat buffers, as one data-parallel rank gathers them.

        gathers_dense: True for the first of the expert ranks, which all have the same dense parameters.
        """
        planned, buffers = Planned([]), list[Any]()
        for number, experts in enumerate(self.optimizers()):
            planned.state.append(self.wrapped({"param_groups": self.groups(experts)}, {}))
            theirs = [
                each
                for each in parameters
                if experts is None or is_expert(each.native.name) == experts
            ]
            gathered = gathers_dense or experts is not False
            buffers.append(
                self._buffers(theirs, f"optimizer{number}", planned) if gathered else None
            )
        made = Planned(
            planned.state, buffers if self.several else buffers[0], planned.pieces, planned.gaps
        )
        return self._unwrapped(made)

    def has(self, native: NativeTensor, slot: str) -> bool:
        """True if a native tensor has this slot. Raises NotExpressible if only a part of it has."""
        held = {Key(name, slot) in self.manifest for name in native.parts}
        if len(held) > 1:
            raise NotExpressible(
                f"{native.name}: only some of the tensors that it joins have optimizer state ({slot}); --no-optimizer leaves it out"
            )
        return held == {True}

    def _members(
        self, parameters: Sequence[Parameter], experts: bool | None
    ) -> Iterator[tuple[int, list[Parameter]]]:
        """(index of a group, its parameters on this rank) for all groups of any rank, in order."""
        for index in self._order[experts]:
            yield (
                index,
                [each for each in parameters if self._is_member(each.native, index, experts)],
            )

    @cached_property
    def _order(self) -> dict[bool | None, list[int]]:
        """The groups of each optimizer that have a parameter."""
        used: dict[bool | None, set[int]] = {None: set(), False: set(), True: set()}
        for name, index in self.state.group_of.items():
            used[is_expert(name)].add(index)
            used[None].add(index)
        order = write_order(self.state.groups)
        orders = {
            experts: [index for index in order if index in indices]
            for experts, indices in used.items()
        }
        for experts in self.optimizers():
            groups = [self.state.groups[index] for index in orders[experts]]
            for group, other in combinations(groups, 2):
                if group_class(group) == group_class(other):
                    require_same(group, other, "one optimizer for experts and all others (ep 1)")
        return orders

    def _is_member(self, native: NativeTensor, index: int, experts: bool | None) -> bool:
        return self.state.group_of[next(iter(native.parts))] == index and experts in (
            None,
            is_expert(native.name),
        )

    def _group(self, index: int, experts: bool | None) -> dict[str, Any]:
        return write_group(
            self.state.groups[index], expert=bool(experts), step=self.state.step or 0
        )

    def _scaler(self) -> dict[str, Any]:
        known = dict(self.state.grad_scaler or {})
        if "scale" in known:
            known["scale"] = Constant((1,), "float32", struct.pack("<f", known["scale"]))
        return known

    def _unwrapped(self, planned: Planned) -> Planned:
        """The plan without the list around a single optimizer."""
        state = planned.state if self.several else planned.state[0]
        return Planned(state, planned.buffers, planned.pieces, planned.gaps)

    def _whole(self, parameter: Parameter, slot: str, planned: Planned) -> Placeholder:
        record = f"{slot}/{parameter.label}"
        planned.pieces.append(Piece(parameter.native, slot, record))
        return Placeholder(record, parameter.native.shape, "float32")

    def _buffers(
        self, parameters: Sequence[Parameter], prefix: str, planned: Planned
    ) -> dict[Any, Any]:
        """One bucket per buffer, as in a run without overlap_grad_reduce."""
        by_dtype: dict[tuple[str, str], list[Parameter]] = {}
        for parameter in parameters:
            dtype = self.manifest[Key(next(iter(parameter.native.parts)))].dtype
            by_dtype.setdefault((parameter.model, dtype), []).append(parameter)
        made: dict[Any, Any] = {"buckets_coalesced": True}
        for index, ((_, dtype), theirs) in enumerate(by_dtype.items()):
            listed = [
                BufferParameter(each.label, each.native.shape, each.shared) for each in theirs
            ]
            buffer = fill(listed)
            gradients = "float32" if dtype == "bfloat16" or self.gradients_in_fp32 else dtype
            entry: dict[str, Any] = {}
            for name, slot in _BUFFER_NAMES.items():
                record = f"{prefix}/{index}/{name}"
                entry[name] = Placeholder(record, (buffer.numel,), "float32")
                planned.gaps.extend(
                    (record, start, length) for start, length in gaps(buffer, listed)
                )
                planned.pieces.extend(self._pieces(theirs, slot, record, buffer))
            made[index] = {
                (TorchDtype(dtype), TorchDtype(gradients)): entry | {"numel_unpadded": buffer.numel}
            }
        return made

    def _pieces(
        self, parameters: Sequence[Parameter], slot: str, record: str, buffer: Buffer
    ) -> Iterator[Piece]:
        """The pieces of one slot. An fp32 weight is its own master, and is stored a second time."""
        for parameter in parameters:
            held = slot if self.has(parameter.native, slot) else WEIGHT
            yield Piece(parameter.native, held, record, buffer.offset(parameter.label))


def once(natives: Sequence[NativeTensor]) -> list[NativeTensor]:
    """The native tensors without second names. The first name gives the position, as in a model's parameters.

    An unused copy beside its tensor is a separate parameter.
    """
    first: dict[tuple[bool, tuple[str, ...]], NativeTensor] = {}
    for native in natives:
        first.setdefault((native.copy is None or native.copy.used, tuple(native.parts)), native)
    return list(first.values())
