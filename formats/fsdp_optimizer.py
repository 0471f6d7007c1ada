"""The optimizer of an FSDP run of verl, as torch's Optimizer.state_dict gives it on every rank.

    state           number of a parameter -> step, exp_avg, exp_avg_sq
    param_groups    the settings of each group, and the numbers of its parameters

The numbers count the parameters in the order of the module's state dict, without buffers and without second names of
shared tensors. FSDP 2 has a DTensor for each parameter. FSDP 1 joins the parameters of each layer to one vector, and
all others to the first; the ranks hold equal parts of it, with padding at the end. With use_orig_params, each parameter
has a number, and a rank has the elements that lie in its part, or no state. Source: fsdp_checkpoint_manager.py of verl
0.9.1, torch/distributed/fsdp/_flat_param.py of torch 2.13.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, prod
from pathlib import Path
from typing import Any

from formats.chunked import ChunkedTensor
from formats.dtensor_files import SavedModel, files_of, join, read_file, require_same_values
from formats.errors import CorruptCheckpoint, UnsupportedInput
from formats.flattened import narrowed, vector
from formats.tensor import LazyTensor, Shape, number

_LAYER = re.compile(r"(.*?\.\d+)\.")
"""The outermost numbered module in a name: a layer, which FSDP wraps as one unit."""
_MOMENTS, _STEP = ("exp_avg", "exp_avg_sq"), "step"
_COUNTS = {"lr": 1, "eps": 1, "weight_decay": 1, "betas": 2}
"""The settings that Adam computes with, and how many numbers each one is."""
Unit = Mapping[str, Shape]
"""Parameters that FSDP joins, in their order."""


@dataclass(frozen=True)
class FsdpOptimizer:
    """The optimizer of a run, by names of parameters. Parameters that it doesn't train have no state."""

    slots: Mapping[str, Mapping[str, LazyTensor]]
    """exp_avg, exp_avg_sq -> tensors by name, in the shape of the parameter."""
    steps: Mapping[str, LazyTensor]
    """The number of updates, by name."""
    further: Sequence[str]
    """Names of state besides Adam's. It is not read."""
    groups: Sequence[Mapping[str, Any]]
    group_of: Mapping[str, int]


def read(path: Path, model: SavedModel, parameters: Mapping[str, Shape]) -> FsdpOptimizer:
    """The optimizer beside a model. parameters: those of the module, in its order.

    Raises CorruptCheckpoint if a rank is missing or if the state doesn't fit the parameters, UnsupportedInput for another
    form of state, and Python's own errors for values of a wrong kind.
    """
    files = files_of(path, "optim")
    if len(files) != model.ranks:
        raise CorruptCheckpoint(
            f"{path}: has the optimizer of {len(files)} ranks and the model of {model.ranks}; keep one run's"
        )
    ranks = [_read_state(file) for file in files]
    groups = _same_groups([rank["param_groups"] for rank in ranks], files)
    states = [rank["state"] for rank in ranks]
    numbers = [index for group in groups for index in group["params"]]
    units = _units(parameters, numbers, states[0], path)
    _require_known(states, files, len(units))
    found: dict[str, dict[str, LazyTensor]] = {slot: {} for slot in (*_MOMENTS, _STEP)}
    further = set[str]()
    for index, unit in enumerate(units):
        by_rank = [state.get(index, {}) for state in states]
        held = {slot for each in by_rank for slot, value in each.items() if value is not None}
        further |= held - found.keys()
        for slot in filter(held.__contains__, found):
            values = [each.get(slot) for each in by_rank]
            stored = _Stored(f"{slot} of parameter {index}", values, files, model.shards)
            found[slot] |= stored.steps(unit) if slot == _STEP else stored.moments(unit)
    return FsdpOptimizer(
        slots={slot: found[slot] for slot in _MOMENTS},
        steps=found[_STEP],
        further=sorted(further),
        groups=[_settings(group) for group in groups],
        group_of={
            name: place
            for place, group in enumerate(groups)
            for index in group["params"]
            for name in units[index]
        },
    )


def _read_state(file: Path) -> Mapping[str, Any]:
    state = read_file(file)
    if not {"state", "param_groups"} <= state.keys():
        raise UnsupportedInput(f"{file}: is not the state of one torch optimizer, by numbers")
    return state


def _same_groups(by_rank: Sequence[Any], files: Sequence[Path]) -> Sequence[Mapping[str, Any]]:
    plain = [
        [{name: _plain(value) for name, value in group.items()} for group in groups]
        for groups in by_rank
    ]
    for groups, file in zip(plain, files, strict=True):
        for group in groups:
            _require_numbers(group, file)
        if groups != plain[0]:
            raise CorruptCheckpoint(
                f"{file}: has other parameter groups than {files[0].name}; are the files from one run?"
            )
    return plain[0]


def _plain(value: Any) -> Any:
    """A setting without tensors: a rate may be a tensor of one element, and so may each of two betas."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return number(value)


def _require_numbers(group: Mapping[str, Any], file: Path) -> None:
    """Raise CorruptCheckpoint if a group's settings aren't those of Adam, or if one is not a number (NaN)."""
    for name, value in group.items():
        values = value if isinstance(value, tuple) else (value,)
        if name in _COUNTS:
            sound = len(values) == _COUNTS[name] and all(map(_is_finite, values))
        else:
            sound = not any(isinstance(each, float) and isnan(each) for each in values)
        if not sound:
            expected = "two numbers" if _COUNTS.get(name) == 2 else "a number"
            raise CorruptCheckpoint(
                f"{file}: {name} of a parameter group is {value!r:.60}, expected {expected}"
            )


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _require_known(states: Sequence[Mapping[int, Any]], files: Sequence[Path], count: int) -> None:
    """Raise CorruptCheckpoint if a rank has state of a number beyond those of the parameter groups."""
    for state, file in zip(states, files, strict=True):
        for key in state.keys() - range(count):
            raise CorruptCheckpoint(
                f"{file}: has state of parameter {key!r:.40}, which is in no parameter group"
            )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _units(
    parameters: Unit, numbers: Sequence[int], state: Mapping[int, Any], path: Path
) -> Sequence[Unit]:
    """The parameters of each number of the optimizer. state: a rank's.

    Raises UnsupportedInput if the vectors of FSDP 1 aren't those of layers, CorruptCheckpoint for other numbers.
    """
    single = [{name: shape} for name, shape in parameters.items()]
    layers = _layers(parameters)
    units = single if len(single) == len(numbers) else layers
    if sorted(numbers) == list(range(len(units))):
        return units
    if all(hasattr(held.get(_MOMENTS[0]), "read_into") for held in state.values()):
        raise UnsupportedInput(
            f"{path}: its optimizer has {len(numbers)} vectors of FSDP 1, expected {len(layers)}: one for each layer and one for all other "
            "parameters; the run had another wrap policy, or the files are of two runs"
        )
    raise CorruptCheckpoint(
        f"{path}: its optimizer has {len(numbers)} parameters, its model {len(single)}; are the files from one run?"
    )


def _layers(parameters: Unit) -> Sequence[Unit]:
    """The parameters of FSDP 1's units: first those outside of layers, then those of each layer."""
    units: dict[str, dict[str, Shape]] = {"": {}}
    for name, shape in parameters.items():
        layer = _LAYER.match(name)
        units.setdefault(layer[1] if layer else "", {})[name] = shape
    return [unit for unit in units.values() if unit]


@dataclass(frozen=True)
class _Stored:
    """A kind of state of one number on all ranks; None on those without any."""

    what: str
    values: Sequence[Any]
    files: Sequence[Path]
    shards: Sequence[int]

    def steps(self, unit: Unit) -> dict[str, LazyTensor]:
        return dict.fromkeys(unit, self._joined())

    def moments(self, unit: Unit) -> dict[str, LazyTensor]:
        """The state of each parameter of a unit."""
        first = next(value for value in self.values if value is not None)
        if hasattr(first, "read_into"):
            return self._divided(unit)
        ((name, shape),) = unit.items()
        tensor = self._joined()
        if tuple(tensor.shape) != shape:
            raise self._misfit(f"{list(tensor.shape)}, where its model has {list(shape)}")
        return {name: tensor}

    def _joined(self) -> LazyTensor:
        """A DTensor, or a tensor that the ranks share."""
        files = {file: value for file, value in zip(self.files, self.values, strict=True) if value is not None}  # fmt: skip
        return join(self.what, list(files.values()), list(files))

    def _divided(self, unit: Unit) -> dict[str, LazyTensor]:
        """The parameters in a vector that is sharded over the ranks."""
        whole = self._vector()
        elements = sum(map(prod, unit.values()))
        lengths = {value.shape[0] for value in self.values if value is not None}
        # Padding gives all ranks parts of one length. With use_orig_params, the parts have other lengths and no padding.
        padding = max(self.shards) if len(lengths) == 1 else 0
        if not elements <= whole.shape[0] <= elements + padding:
            raise self._misfit(f"{whole.shape[0]:,} elements, where its model has {elements:,}")
        if len(lengths) > 1 and len(unit) > 1:
            raise self._misfit(f"{' and '.join(map(str, sorted(lengths)))} elements on the ranks")
        found: dict[str, LazyTensor] = {}
        start = 0
        for name, shape in unit.items():
            found[name] = narrowed(whole, start, shape)
            start += prod(shape)
        return found

    def _vector(self) -> ChunkedTensor:
        """The parts of all ranks, joined. Replicas of one part count once."""
        parts: dict[int, LazyTensor] = {}
        for value, file, shard in zip(self.values, self.files, self.shards, strict=True):
            if value is None:
                continue
            first = parts.setdefault(shard, value)
            if first.shape != value.shape or value.dtype != next(iter(parts.values())).dtype:
                raise self._misfit(f"{list(value.shape)} {value.dtype} in {file.name}")
            require_same_values(first, value, f"{file}: {self.what}")
        return vector([parts[shard] for shard in sorted(parts)])

    def _misfit(self, found: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self.files[0].parent}: {self.what} is {found}; are the files from one run?"
        )
