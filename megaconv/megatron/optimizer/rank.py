"""The optimizer of one rank file: assigns its tensors to parameters.

Tensors have no names. Ids count through the groups. Within a group, parameters come in the order of the model's own
dictionary. Source: megatron/core/optimizer of Megatron core 0.4 to 0.19.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, NoReturn

from formats.flattened import narrowed
from formats.pickle_records import TorchDtype
from formats.tensor import LazyTensor, Shape
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.megatron.arguments.param_groups import (
    WITHOUT,
    Class,
    by_class,
    class_of,
    group_class,
    is_expert,
    read_group,
)
from megaconv.megatron.optimizer.buffers import (
    Buffer,
    BufferParameter,
    bucket_sizes,
    fitting,
    matching,
)
from megaconv.megatron.optimizer.structure import (
    grad_scaler,
    groups_of,
    is_distributed,
    other_optimizer,
    parts,
    updates,
)
from megaconv.megatron.states.names import BUFFERS, is_of_retrieval
from megaconv.model.training import ADAM, EXP_AVG, EXP_AVG_SQ, MASTER, SGD, ParamGroup


class Parameter(NamedTuple):
    """One parameter of a rank, in the order of the model."""

    chunk: int
    name: str
    shape: Shape
    dtype: str
    shared: bool = False
    """True for a tied embedding with a copy on another stage."""


@dataclass
class RankOptimizer:
    """The optimizer state in one rank file."""

    where: str
    slots: dict[tuple[int, str], dict[str, LazyTensor]] = field(default_factory=dict)
    """(chunk, native name) -> the optimizer's tensors of that parameter."""
    group_of: dict[tuple[int, str], ParamGroup] = field(default_factory=dict)
    group_steps: set[int] = field(default_factory=set)
    parameter_steps: set[int] = field(default_factory=set)
    grad_scalers: list[Mapping[str, Any]] = field(default_factory=list)
    """The loss scale of each optimizer that has one."""


_BUFFERS = {MASTER: "param", EXP_AVG: EXP_AVG, EXP_AVG_SQ: EXP_AVG_SQ}
"""The slots of the distributed optimizer -> their names in its files."""


def parameters(
    chunks: Sequence[Mapping[str, LazyTensor]], shared: str | None, aliases: Mapping[str, str]
) -> list[Parameter]:
    """The parameters of a rank's chunks in order. shared: the name of an embedding with a copy on another stage.

    aliases: second names of tensors -> first names. Such a tensor counts once, at the position of the name that comes
    first.
    """
    found = dict[tuple[int, str], Parameter]()
    for chunk, weights in enumerate(chunks):
        for listed, tensor in weights.items():
            name = aliases.get(listed, listed)
            if name.endswith(BUFFERS) or (chunk, name) in found:
                continue
            found[chunk, name] = Parameter(
                chunk,
                name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                shared=name == shared,
            )
    return list(found.values())


def read(
    optimizer: Any,
    buffers: Any,
    found: Sequence[Parameter],
    args: Namespace,
    pp_rank: int,
    where: str,
) -> RankOptimizer:
    """The optimizer's tensors of a rank's parameters, except for those in the file of another expert rank.

    buffers: the content of distrib_optim.pt; None without one. Raises TensorMismatch if counts or shapes don't fit the
    model, NotExpressible for kinds that can't be read.
    """
    result = RankOptimizer(where)
    listed = parts(optimizer)
    shares = _share_out(listed, found)
    stored = buffers if isinstance(buffers, list) else [buffers] * len(listed)
    for part, share, flat in zip(listed, shares, stored, strict=True):
        if not share:  # a rank may have an optimizer for experts but no experts
            continue
        reader = _Part(part, share, args, pp_rank, where, result)
        if is_distributed(part):
            gathered_elsewhere = isinstance(buffers, list) and flat is None
            reader.read_buffers(flat, gathered_elsewhere=gathered_elsewhere)
        else:
            reader.read_states()
    return result


def _share_out(listed: Sequence[Any], found: Sequence[Parameter]) -> list[list[Parameter]]:
    """The parameters of each of several optimizers."""
    if len(listed) == 1:
        return [list(found)]
    kinds = [
        {bool(group.get("is_expert_parallel")) for group in groups_of(part)} for part in listed
    ]
    first_chunk_is_separate = kinds.count({False}) > 1
    shares = []
    for index, kind in enumerate(kinds):
        share = [parameter for parameter in found if is_expert(parameter.name) in kind]
        if first_chunk_is_separate and kind == {False}:
            is_first = index == 0
            share = [parameter for parameter in share if (parameter.chunk == 0) == is_first]
        shares.append(share)
    return shares


@dataclass
class _Part:
    """One optimizer of a rank, and the parameters that it trains."""

    part: Mapping[str, Any]
    parameters: list[Parameter]
    args: Namespace
    pp_rank: int
    where: str
    result: RankOptimizer

    def __post_init__(self) -> None:
        if "optimizer_state_dict" in self.part:
            raise NotExpressible(
                f"{self.where}: an optimizer of Megatron 1.0 can't be read; {WITHOUT}"
            )
        groups = groups_of(self.part)
        self.groups = [read_group(group, groups) for group in groups]
        self.by_class = by_class(self.groups, self.args, self.where)
        self.result.group_steps |= {updates(group["step"]) for group in groups if "step" in group}
        self.result.grad_scalers += grad_scaler(self.part)

    def members(
        self, parameters: Sequence[Parameter], *, decayed_embeddings: bool = True
    ) -> dict[Class, list[Parameter]]:
        """The parameters of each class, in order."""
        decoupled = any(group.decoupled_lr for group in self.groups)
        members: dict[Class, list[Parameter]] = {}
        for parameter in parameters:
            kind = class_of(
                parameter.name,
                parameter.shape,
                decoupled=decoupled,
                decayed_embeddings=decayed_embeddings,
            )
            members.setdefault(kind, []).append(parameter)
        return members

    def _enter(
        self, parameter: Parameter, group: ParamGroup, slots: Mapping[str, LazyTensor]
    ) -> None:
        key = parameter.chunk, parameter.name
        for slot, tensor in slots.items():
            if tuple(tensor.shape) != parameter.shape or tensor.dtype != "float32":
                raise TensorMismatch(
                    f"{self.where}: {parameter.name} is {list(parameter.shape)}, its {slot} in the optimizer "
                    f"{list(tensor.shape)} {tensor.dtype}; {WITHOUT}"
                )
        self.result.slots[key], self.result.group_of[key] = dict(slots), group

    # Tensors by parameter id.

    def read_states(self) -> None:
        inner = self.part.get("optimizer", self.part)
        states, listed = inner["state"], groups_of(self.part)
        masters = self.part.get("fp32_from_fp16_params", [[]] * len(listed))
        members = self._members_that_fit([len(group["params"]) for group in listed])
        for group, ids, theirs, copies in zip(
            self.groups, (group["params"] for group in listed), members, masters, strict=True
        ):
            unread = iter(copies)
            for index, parameter in zip(ids, theirs, strict=True):
                slots = self._moments(states.get(index), parameter)
                if parameter.dtype != "float32":
                    # An fp32 weight is its own master and has no entry.
                    slots[MASTER] = next(unread, None) or self._fail(
                        f"no fp32 copy of {parameter.name}"
                    )
                self._enter(parameter, group, slots)
            if next(unread, None) is not None:
                self._fail("more fp32 copies than 16-bit parameters")

    def _members_that_fit(self, counts: Sequence[int]) -> list[list[Parameter]]:
        """The parameters of each group.

        From core 0.14 on, embeddings may be in the group without weight decay. A Retro that was trained with a gate of 0
        has no state of its encoder and its cross attention.
        """
        outside_retrieval = [each for each in self.parameters if not is_of_retrieval(each.name)]
        for trained in (self.parameters, outside_retrieval):
            for decayed_embeddings in (True, False):
                found = self._by_group(trained, decayed_embeddings=decayed_embeddings)
                held = [len(theirs) for theirs in found]
                if held == list(counts) and sum(counts) == len(trained):
                    return found
        return self._refuse_counts(counts)

    def _by_group(
        self, parameters: Sequence[Parameter], *, decayed_embeddings: bool
    ) -> list[list[Parameter]]:
        members = self.members(parameters, decayed_embeddings=decayed_embeddings)
        return [members.get(group_class(group), []) for group in self.groups]

    def _refuse_counts(self, counts: Sequence[int]) -> NoReturn:
        expected = " + ".join(
            str(len(theirs)) for theirs in self._by_group(self.parameters, decayed_embeddings=True)
        )
        self._fail(
            f"{' + '.join(map(str, counts))} parameters in its groups, where the model has {expected} of such kinds and "
            f"{len(self.parameters)} in all (were some frozen?)"
        )

    def _moments(self, state: Any, parameter: Parameter) -> dict[str, LazyTensor]:
        if not state:
            self._fail(f"no state of {parameter.name} (was it never trained?)")
        stored = set(state) - {"step"}
        kind = next((kind for kind in (ADAM, SGD) if stored == set(kind)), None)
        if kind is None:
            entries = ", ".join(sorted(map(str, state)))
            raise other_optimizer(self.where, f"{entries} of {parameter.name}")
        if "step" in state:
            self.result.parameter_steps.add(updates(state["step"]))
        return {slot: state[slot] for slot in kind}

    def _fail(self, what: str) -> NoReturn:
        raise TensorMismatch(f"{self.where}: the optimizer holds {what}; {WITHOUT}")

    # Tensors in flat buffers.

    def read_buffers(self, flat: Any, *, gathered_elsewhere: bool) -> None:
        """Read the flat buffers.

        gathered_elsewhere: True if another rank file holds the state of all data-parallel ranks.
        """
        if gathered_elsewhere:
            return
        if flat is None:
            self._fail(
                "no tensors, and the file distrib_optim.pt, which should hold them, does not exist"
            )
        groups = self._groups_by_class()
        by_dtype: dict[tuple[int, str], list[Parameter]] = {}
        for parameter in self.parameters:
            by_dtype.setdefault((parameter.chunk, parameter.dtype), []).append(parameter)
        for index, ((chunk, dtype), theirs) in enumerate(by_dtype.items()):
            for parameter, slots in self._slice(flat, index, chunk, dtype, theirs):
                self._enter(parameter, groups[parameter.chunk, parameter.name], slots)

    def _groups_by_class(self) -> dict[tuple[int, str], ParamGroup]:
        found: dict[tuple[int, str], ParamGroup] = {}
        for kind, members in self.members(self.parameters).items():
            group = self.by_class.get(kind) or self._fail(
                f"no group for {members[0].name} (was it frozen?)"
            )
            found |= {(parameter.chunk, parameter.name): group for parameter in members}
        return found

    def _slice(
        self,
        flat: Mapping[Any, Any],
        index: int,
        chunk: int,
        dtype: str,
        theirs: Sequence[Parameter],
    ) -> Iterator[tuple[Parameter, dict[str, LazyTensor]]]:
        stored = _by_dtype(flat.get(index), dtype) or self._fail(
            f"no buffer {index} for {dtype} parameters"
        )
        if not {*_BUFFERS.values(), "numel_unpadded"} >= set(stored):
            raise other_optimizer(
                self.where, f"{', '.join(sorted(map(str, stored)))} of {theirs[0].name}"
            )
        first = stored["param"]
        sizes = (
            [int(tensor.shape[0]) for tensor in first]
            if isinstance(first, list)
            else [int(first.shape[0])]
        )
        unpadded = _unpadded(flat, stored, index, dtype, sizes)
        listed = [BufferParameter(each.name, each.shape, each.shared) for each in theirs]
        if isinstance(first, list):
            # A list has a tensor per bucket, so the buckets' sizes are known; otherwise try the likely bucket sizes.
            buffer = fitting(listed, unpadded)
        else:
            total = sum(prod(parameter.shape) for parameter in self.parameters)
            buffer = matching(
                listed, sum(unpadded), bucket_sizes(self.args, self.pp_rank, chunk, total)
            )
        if buffer is None:
            numel = sum(prod(parameter.shape) for parameter in listed)
            self._fail(
                f"a buffer of {sum(unpadded)} elements for parameters that have {numel} (were some frozen?)"
            )
        for parameter in theirs:
            slots = {}
            for slot, key in _BUFFERS.items():
                if slot != MASTER or dtype != "float32":
                    slots[slot] = _piece(stored[key], buffer, parameter)
            yield parameter, slots


def _by_dtype(buffers: Any, dtype: str) -> Any:
    """A buffer's entry for a dtype.

    The key is (dtype of parameters, of gradients); up to core 0.5, the dtype of gradients.
    """
    if not isinstance(buffers, dict):
        return None
    for key, entry in buffers.items():
        if key[0] == TorchDtype(dtype) if isinstance(key, tuple) else isinstance(key, TorchDtype):
            return entry
    return None


def _unpadded(
    flat: Mapping[Any, Any], stored: Any, index: int, dtype: str, sizes: Sequence[int]
) -> list[int]:
    """Elements of each stored tensor without the padding at its end.

    Core 0.4 doesn't give them, and has almost no padding.
    """
    if "numel_unpadded" in stored:
        return [int(stored["numel_unpadded"])]
    given = flat.get("per_bucket_numel_unpadded")
    return list(_by_dtype(given[index], dtype)) if given else list(sizes)


def _piece(stored: Any, buffer: Buffer, parameter: Parameter) -> LazyTensor:
    if isinstance(stored, list):
        place = buffer.places[parameter.name]
        return narrowed(stored[place.bucket], place.offset, parameter.shape)
    return narrowed(stored, buffer.offset(parameter.name), parameter.shape)
