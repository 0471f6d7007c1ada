"""DeepSpeed's ZeRO checkpoints: parameters and optimizer state as flat vectors that are sharded over the ranks.

    latest                                         the name of the newest directory: global_step3
    global_step3/mp_rank_00_model_states.pt        stages 0 to 2: the full module, in the dtype of its computation
    global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt                   stage 3: one per rank, with empty tensors
    global_step3/[bf16_]zero_pp_rank_1_mp_rank_00_optim_states.pt            one per rank

Stages 1 and 2: the ranks' partitions of an optimizer group are joined to one vector. The vector holds the group's
parameters one after another, each followed by its padding; `param_shapes` lists them. The end is padded so that all
ranks have the same length.
Stage 3: every parameter is sharded separately, with ceil(numel / ranks) elements per rank and padding in the last part.
A rank's parts follow each other in its vector.
Moments are stored like the fp32 parameters. Source: deepspeed 0.19.8, its engine and zero_to_fp32.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from formats import torch_zip, zero_ownership, zero_universal, zero_vectors
from formats.errors import CorruptCheckpoint, UnsafeContent, UnsupportedInput
from formats.regular_files import read_small
from formats.tensor import LazyTensor, Shape, as_shape, read_tensor

LATEST = "latest"
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
_LATEST_BYTES = 4096
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = re.compile(r"layer_\d+_expert_.*|expp_rank_.*")
_WRAPPERS = re.compile(r"^(module\.)+|_orig_mod\.")
_KEYS_BY_STAGE = {
    2: ("base_optimizer_state", "single_partition_of_fp32_groups"),
    3: ("optimizer_state_dict", "fp32_flat_groups"),
}
"""Keys of a rank's file, by stage: torch's optimizer state, and the fp32 vectors."""
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Counters in model_states that all ranks of a save have in common."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ZeroCheckpoint:
    """One step of a run. Every tensor has the name that it has in the module."""

    directory: Path
    stage: int
    ranks: int
    module: Mapping[str, LazyTensor]
    """The module's tensors as stored: empty under stage 3."""
    shared: Mapping[str, str]
    """Second name of a tensor -> its first name."""
    state: Mapping[str, Any] = field(repr=False)
    """The rest of the first model_states file."""
    slots: Mapping[str, Mapping[str, LazyTensor]] = field(default_factory=dict)
    """`master`, `exp_avg`, `exp_avg_sq` -> tensors by name, for the trained parameters."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The optimizer's own groups, in its order."""
    group_of: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    """Number of updates."""
    further: Sequence[str] = ()
    """Optimizer state of the parameters besides Adam's moments. It is not read."""
    universal: bool = False
    """True if ds_to_universal made the checkpoint (formats/zero_universal.py)."""

    @property
    def dtype(self) -> str:
        """Dtype of the module's computation."""
        return next((tensor.dtype for tensor in self.module.values()), "float32")


def find_step(path: Path) -> Path | None:
    """The directory that holds the files: the path itself, or the one that `latest` names. Raises UnsafeContent."""
    if _files(path, _MODEL):
        return path
    latest = next(
        (path / name for name in (LATEST, zero_universal.LATEST) if (path / name).is_file()), None
    )
    if latest is None:
        return None
    name = read_small(latest, _LATEST_BYTES).decode(errors="replace").strip()
    if not name or "/" in name or name.startswith("."):
        raise UnsafeContent(f"{latest}: names {name!r:.80}, which is not the name of a directory")
    return path / name if _files(path / name, _MODEL) else None


def _files(path: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Data-parallel rank -> its file, in numerical order."""
    if not path.is_dir():
        return {}
    found = [
        (int(match[1] or 0), child)
        for child in path.iterdir()
        if (match := pattern.fullmatch(child.name))
    ]
    if pattern is _MODEL and zero_universal.is_universal(path):
        # A universal checkpoint for all stages has a file for stage 3 besides the one with the module.
        found = [each for each in found if each[1].name.startswith("mp_rank_")] or found
    files = dict(sorted(found))
    if len(files) != len(found):
        names = sorted(child.name for rank, child in found if files[rank] != child)
        raise CorruptCheckpoint(
            f"{path / names[0]}: is another file of a rank that has one; keep one run's"
        )
    return files


def open_step(path: Path) -> ZeroCheckpoint:
    """Open a step and read all its metadata.

    Raises CorruptCheckpoint for an incomplete step, and UnsupportedInput for a kind that can't be read.
    """
    _refuse_sharded_experts(path)
    models, optimizers = _files(path, _MODEL), _files(path, _OPTIMIZER)
    first = models[min(models)]
    state = _read(first)
    _require_one_save(models, state)
    with _known_form(path):
        module = {_plain(name): tensor for name, tensor in _tensors(state.get("module"), first)}
        shared = dict(state.get("shared_params") or {})
        step = ZeroCheckpoint(
            directory=path,
            stage=0,
            ranks=_rank_count(path, state, optimizers),
            module=module,
            shared={_plain(name): _plain(owner) for name, owner in shared.items()},
            state={name: value for name, value in state.items() if name != "module"},
        )
        if zero_universal.is_universal(path):
            return _with_universal_state(step)
        if not optimizers:
            _require_whole_module(step)
            return step
        contents = {file: _read(file)["optimizer_state_dict"] for file in optimizers.values()}
        return _with_partitions(step, _partitions(path, contents))


def _refuse_sharded_experts(path: Path) -> None:
    others = sorted(child.name for child in path.iterdir() if _OTHERS.fullmatch(child.name))
    if others:
        raise UnsupportedInput(
            f"{path}: {others[0]} is of experts sharded by DeepSpeed, which are not supported; "
            "save it as one model, or convert it with DeepSpeed's ds_to_universal"
        )


def _require_one_save(models: Mapping[int, Path], first: Mapping[str, Any]) -> None:
    """Raise CorruptCheckpoint if a rank's model_states are of another step than the first rank's."""
    first_rank = min(models)
    for rank, file in models.items():
        state = first if rank == first_rank else _read(file)
        for counter in _COUNTERS:
            if state.get(counter) != first.get(counter):
                found, expected = (str(each.get(counter))[:40] for each in (state, first))
                raise CorruptCheckpoint(
                    f"{file}: has {counter} {found}, and {models[first_rank].name} has {expected}; "
                    "they are of two steps. Copy all files of one step again"
                )


def _rank_count(path: Path, state: Mapping[str, Any], optimizers: Mapping[int, Path]) -> int:
    """The number of data-parallel ranks. Raises CorruptCheckpoint if an optimizer file of a rank is missing."""
    tensor_parallel_size = state.get("mp_world_size", 1)
    if tensor_parallel_size != 1:
        raise UnsupportedInput(
            f"{path}: is sharded over {tensor_parallel_size!r:.40} tensor-parallel ranks, which is not supported"
        )
    ranks = int(state.get("dp_world_size") or len(optimizers) or 1)
    is_complete = len(optimizers) == ranks and max(optimizers) == ranks - 1
    if not optimizers or is_complete:
        return ranks
    missing = next((rank for rank in range(ranks) if rank not in optimizers), None)
    found = f"there are {len(optimizers)}" if missing is None else f"rank {missing}'s is missing"
    raise CorruptCheckpoint(
        f"{path}: was saved by {ranks} ranks, each with an *_optim_states.pt; {found}",
        code="missing-file",
    )


def _require_whole_module(step: ZeroCheckpoint) -> None:
    if any(0 in tensor.shape for tensor in step.module.values()):
        raise CorruptCheckpoint(
            f"{step.directory}: its model_states are of stage 3, which stores weights in *_optim_states.pt; no such file exists"
        )


@contextmanager
def _known_form(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise CorruptCheckpoint(
            f"{path}: is not a ZeRO checkpoint of a known form ({error!r:.200})"
        ) from error


@dataclass(frozen=True)
class _Partitions:
    """The optimizer state of all ranks, in the order of the ranks."""

    files: Sequence[Path]
    """The *_optim_states.pt of each rank."""
    stage: int
    """3, or 2 for stages 1 and 2, which are stored alike."""
    states: Sequence[Mapping[str, Any]]
    """torch's state of each rank's optimizer: `state` by the number of a vector, and `param_groups`."""
    masters: Sequence[Sequence[LazyTensor]]
    """The fp32 vectors of each rank: one per group, several for a large group of stage 3."""
    paddings: Any
    """Elements behind each parameter of each group under stages 1 and 2, or None."""
    slices: Sequence[Sequence[Mapping[str, Any]]]
    """The slices of each group that a file lists as its own. Empty if DeepSpeed lists none."""

    def vectors(self, slot: str) -> list[list[LazyTensor]]:
        """The vectors of a moment, in the order of `masters`."""
        return [
            [state["state"][number][slot] for number in range(len(masters))]
            for state, masters in zip(self.states, self.masters, strict=True)
        ]

    def has(self, slot: str) -> bool:
        return all(slot in state["state"].get(0, {}) for state in self.states)

    def further_slots(self) -> list[str]:
        """Names of the optimizer state besides Adam's."""
        found = set[str]()
        for state in self.states:
            for held in state["state"].values():
                found.update(map(str, held))
        return sorted(found - {"step", *MOMENTS})


def _partitions(path: Path, contents: Mapping[Path, Mapping[str, Any]]) -> _Partitions:
    """contents: file -> content of each rank's *_optim_states.pt, in the order of the ranks."""
    ranks = list(contents.values())
    stage = 3 if "fp32_flat_groups" in ranks[0] else 2
    state_key, master_key = _KEYS_BY_STAGE[stage]
    states = [rank[state_key] for rank in ranks]
    if not all(isinstance(state, dict) for state in states):
        raise UnsupportedInput(
            f"{path}: is an elastic checkpoint of an old DeepSpeed, which is not supported"
        )
    return _Partitions(
        files=list(contents),
        stage=stage,
        states=states,
        masters=[rank[master_key] for rank in ranks],
        paddings=ranks[0].get("param_alignment_paddings"),
        slices=[rank.get("param_slice_mappings") or () for rank in ranks],
    )


def _with_partitions(step: ZeroCheckpoint, partitions: _Partitions) -> ZeroCheckpoint:
    """The step with the optimizer state of its ranks' partitions."""
    path, state = step.directory, step.state
    if partitions.stage == 3 and state.get("frozen_param_shapes"):
        raise UnsupportedInput(
            f"{path}: has frozen parameters under stage 3, which are not supported"
        )
    shapes = [_by_plain_name(_shapes_of(group)) for group in state["param_shapes"]]
    vectors = {MASTER: partitions.masters}
    vectors |= {slot: partitions.vectors(slot) for slot in MOMENTS if partitions.has(slot)}
    cut = (
        zero_vectors.parameters_of_stage_3
        if partitions.stage == 3
        else zero_vectors.parameters_of_groups
    )
    slots = {
        slot: dict(cut(path, shapes, ranks, partitions.paddings)) for slot, ranks in vectors.items()
    }
    if partitions.stage == 3:
        zero_ownership.require_different(partitions.files, partitions.masters)
    elif not _reorders(state):
        _require_own_slices(partitions, shapes)
    groups = tuple(dict(group) for group in partitions.states[0]["param_groups"])
    steps = [update for held in partitions.states for update in _steps(held["state"])]
    return replace(
        step,
        stage=partitions.stage,
        slots=slots,
        groups=groups,
        group_of=_group_of(shapes, groups),
        step=_same_step(path, steps, "groups"),
        further=partitions.further_slots(),
    )


def _reorders(state: Mapping[str, Any]) -> bool:
    """True if the run had round_robin_gradients. DeepSpeed then lists slices in another order than its vectors have."""
    configuration = state.get("ds_config")
    stages = configuration.get("zero_optimization") if isinstance(configuration, dict) else None
    return isinstance(stages, dict) and bool(stages.get("round_robin_gradients"))


def _require_own_slices(partitions: _Partitions, shapes: Sequence[Mapping[str, Shape]]) -> None:
    """Raise CorruptCheckpoint if a file lists other slices of a group than its rank has."""
    listed = [[_by_plain_name(group) for group in groups] for groups in partitions.slices]
    for index, group in enumerate(shapes):
        sizes = [vectors[index].shape[0] for vectors in partitions.masters]
        starts, _ = zero_vectors.starts(group, partitions.paddings, index)
        held = zero_ownership.slices(starts, group, sizes)
        zero_ownership.require_own_slices(partitions.files, index, held, listed)


def _with_universal_state(step: ZeroCheckpoint) -> ZeroCheckpoint:
    """The step with the optimizer state that ds_to_universal wrote, one folder per parameter."""
    path = step.directory
    groups = [_shapes_of(group) for group in step.state["param_shapes"]]
    shapes = dict[str, Shape]()
    for group in groups:
        shapes |= group
    second_names = tuple(step.state.get("shared_params") or ())
    found = zero_universal.read(path, shapes, second_names)
    held = {number: {"step": update} for number, update in enumerate(found.steps)}
    return replace(
        step,
        stage=found.stage,
        slots={slot: _by_plain_name(tensors) for slot, tensors in found.slots.items()},
        groups=found.groups,
        group_of=_by_plain_name(_group_of(groups, found.groups)),
        step=_same_step(path, _steps(held), "parameters"),
        universal=True,
    )


def _shapes_of(group: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: as_shape(tuple(shape)) for name, shape in group.items()}


def _by_plain_name(values: Mapping[str, _Value]) -> dict[str, _Value]:
    return {_plain(name): value for name, value in values.items()}


def _same_step(path: Path, found: Iterable[float], parts: str) -> int | None:
    """The number of updates that all parts of the optimizer have had, or None if no part has one."""
    steps = {int(step) for step in found}
    if len(steps) > 1:
        raise CorruptCheckpoint(
            f"{path}: its {parts} were updated different numbers of times: {sorted(steps)}"
        )
    return steps.pop() if steps else None


def _group_of(
    shapes: Sequence[Mapping[str, Shape]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """The optimizer group of each parameter. Stage 3 splits a large group into several vectors, whose numbers are in
    the group's `params`."""
    vectors = {number: index for index, group in enumerate(groups) for number in group["params"]}
    if sorted(vectors) != list(range(len(shapes))):
        raise ValueError(f"groups of the vectors {sorted(vectors)}, where there are {len(shapes)}")
    return {name: vectors[number] for number, group in enumerate(shapes) for name in group}


def _read(file: Path) -> Mapping[str, Any]:
    value, folder = torch_zip.read_saved(file)
    zero_ownership.require_own_name(file, folder)
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{file}: expected a dictionary, found {type(value).__name__}")
    return value


def _tensors(module: Any, file: Path) -> Iterator[tuple[str, LazyTensor]]:
    if not isinstance(module, dict):
        raise CorruptCheckpoint(f"{file}: has no module")
    for name, tensor in module.items():
        if not isinstance(name, str) or not hasattr(tensor, "read_into"):
            raise CorruptCheckpoint(f"{file}: {name!r} is not a tensor")
        yield name, tensor


def _plain(name: str) -> str:
    """The name without the prefixes of modules that wrapped the model."""
    return _WRAPPERS.sub("", name)


def _steps(state: Mapping[int, Mapping[str, Any]]) -> Iterator[float]:
    for held in state.values():
        step: Any = held.get("step")
        if hasattr(step, "read_into"):
            if prod(step.shape) != 1:
                raise ValueError(f"a step of shape {list(step.shape)}")
            dtype = "float32" if step.dtype == "float32" else "int64"
            values = read_tensor(step).view(dtype)
            yield float(values[0, 0])
        elif step is not None:
            yield float(step)
