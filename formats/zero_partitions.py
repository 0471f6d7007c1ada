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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from formats import torch_zip, zero_ownership, zero_universal
from formats.errors import CorruptCheckpoint, UnsafeContent, UnsupportedInput
from formats.flattened import narrowed, vector
from formats.regular_files import read_small
from formats.tensor import LazyTensor, Shape, as_shape, read_tensor

LATEST = "latest"
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
_LATEST_BYTES = 4096
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = re.compile(r"layer_\d+_expert_.*|expp_rank_.*")
_WRAPPERS = re.compile(r"^(module\.)+|_orig_mod\.")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ZeroCheckpoint:
    """One step of a run. Every tensor has the name that it has in the module."""

    directory: Path
    stage: int
    ranks: int
    module: Mapping[str, LazyTensor]
    """The module's tensors as stored: empty under stage 3."""
    slots: Mapping[str, Mapping[str, LazyTensor]]
    """`master`, `exp_avg`, `exp_avg_sq` -> tensors by name, for the trained parameters."""
    groups: Sequence[Mapping[str, Any]]
    """The optimizer's own groups, in its order."""
    group_of: Mapping[str, int]
    step: int | None
    """Number of updates."""
    shared: Mapping[str, str]
    """Second name of a tensor -> its first name."""
    state: Mapping[str, Any] = field(repr=False)
    """The rest of the first model_states file."""
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
    others = sorted(child.name for child in path.iterdir() if _OTHERS.fullmatch(child.name))
    if others:
        raise UnsupportedInput(
            f"{path}: {others[0]} is of experts cut by DeepSpeed, which are not supported; "
            "save it as one model, or convert it with DeepSpeed's ds_to_universal"
        )
    models, optimizers = _files(path, _MODEL), _files(path, _OPTIMIZER)
    state = _read(models[min(models)])
    with _known_form(path):
        if state.get("mp_world_size", 1) != 1:
            raise UnsupportedInput(
                f"{path}: is cut over {state['mp_world_size']!r:.40} tensor-parallel ranks, which is not supported"
            )
        ranks = int(state.get("dp_world_size") or len(optimizers) or 1)
        if optimizers and (len(optimizers) != ranks or max(optimizers) != ranks - 1):
            missing = next((rank for rank in range(ranks) if rank not in optimizers), None)
            what = (
                f"there are {len(optimizers)}"
                if missing is None
                else f"rank {missing}'s is missing"
            )
            raise CorruptCheckpoint(
                f"{path}: was saved by {ranks} ranks, each with an *_optim_states.pt; {what}",
                code="missing-file",
            )
        module = {
            _plain(name): tensor
            for name, tensor in _tensors(state.get("module"), models[min(models)])
        }
        shared = {
            _plain(name): _plain(owner)
            for name, owner in dict(state.get("shared_params") or {}).items()
        }
        if zero_universal.is_universal(path):
            return _universal(path, ranks, module, shared, state)
        partitions = {file: _read(file)["optimizer_state_dict"] for file in optimizers.values()}
        return _joined(path, ranks, module, shared, state, partitions)


@contextmanager
def _known_form(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise CorruptCheckpoint(
            f"{path}: is not a ZeRO checkpoint of a known form ({error!r:.200})"
        ) from error


def _joined(
    path: Path,
    ranks: int,
    module: Mapping[str, LazyTensor],
    shared: Mapping[str, str],
    state: Mapping[str, Any],
    by_file: Mapping[Path, Mapping[str, Any]],
) -> ZeroCheckpoint:
    """by_file: file -> content of each rank's *_optim_states.pt, in the order of the ranks."""
    partitions = list(by_file.values())
    rest = {name: value for name, value in state.items() if name != "module"}
    if not partitions:
        if any(0 in tensor.shape for tensor in module.values()):
            raise CorruptCheckpoint(
                f"{path}: its model_states are of stage 3, which stores weights in *_optim_states.pt; no such file exists"
            )
        return ZeroCheckpoint(path, 0, ranks, module, {}, (), {}, None, shared, rest)
    shapes = [
        {_plain(name): as_shape(tuple(shape)) for name, shape in group.items()}
        for group in state["param_shapes"]
    ]
    whole = "fp32_flat_groups" in partitions[0]
    base = [
        partition["optimizer_state_dict" if whole else "base_optimizer_state"]
        for partition in partitions
    ]
    if not all(isinstance(each, dict) for each in base):
        raise UnsupportedInput(
            f"{path}: is an elastic checkpoint of an old DeepSpeed, which is not supported"
        )
    if whole and state.get("frozen_param_shapes"):
        raise UnsupportedInput(
            f"{path}: has frozen parameters under stage 3, which are not supported"
        )
    masters = [
        partition["fp32_flat_groups" if whole else "single_partition_of_fp32_groups"]
        for partition in partitions
    ]
    vectors = {MASTER: masters} | {
        slot: [[each["state"][index][slot] for index in range(len(master))] for each, master in zip(base, masters, strict=True)]
        for slot in MOMENTS
        if all(slot in each["state"].get(0, {}) for each in base)
    }  # fmt: skip
    paddings = partitions[0].get("param_alignment_paddings")
    cut = _cut_by_itself if whole else _cut_as_groups
    slots = {slot: dict(cut(path, shapes, held, paddings)) for slot, held in vectors.items()}
    if whole:
        zero_ownership.require_different(list(by_file), masters)
    elif not _reorders(state):
        _require_own_slices(by_file, shapes, masters, paddings)
    steps = {int(value) for each in base for value in _steps(each["state"])}
    if len(steps) > 1:
        raise CorruptCheckpoint(
            f"{path}: its groups were updated different numbers of times: {sorted(steps)}"
        )
    groups = tuple(dict(group) for group in base[0]["param_groups"])
    group_of = _group_of(shapes, groups)
    step = steps.pop() if steps else None
    kept = {str(name) for each in base for held in each["state"].values() for name in held}
    return ZeroCheckpoint(
        path, 3 if whole else 2, ranks, module, slots, groups, group_of, step, shared, rest,
        further=sorted(kept - {"step", *MOMENTS}),
    )  # fmt: skip


def _reorders(state: Mapping[str, Any]) -> bool:
    """True if the run had round_robin_gradients. DeepSpeed then lists slices in another order than its vectors have."""
    configuration = state.get("ds_config")
    stages = configuration.get("zero_optimization") if isinstance(configuration, dict) else None
    return isinstance(stages, dict) and bool(stages.get("round_robin_gradients"))


def _require_own_slices(
    by_file: Mapping[Path, Mapping[str, Any]],
    shapes: Sequence[Mapping[str, Shape]],
    masters: Sequence[Sequence[LazyTensor]],
    paddings: Any,
) -> None:
    """Raise CorruptCheckpoint if a file lists other slices of a group than its rank has."""
    listed = []
    for partition in by_file.values():
        groups = partition.get("param_slice_mappings") or ()
        listed.append([{_plain(name): at for name, at in group.items()} for group in groups])
    for index, group in enumerate(shapes):
        partitions = [vectors[index].shape[0] for vectors in masters]
        starts, _ = _starts(group, paddings, index)
        held = zero_ownership.slices(starts, group, partitions)
        zero_ownership.require_own_slices(list(by_file), index, held, listed)


def _starts(group: Mapping[str, Shape], paddings: Any, index: int) -> tuple[dict[str, int], int]:
    """(first element of each parameter of a group in the joined vector, end of the last padding), under stages 1 and 2."""
    starts, start = dict[str, int](), 0
    for number, (name, shape) in enumerate(group.items()):
        starts[name] = start
        start += prod(shape) + (paddings[index][number] if paddings else 0)
    return starts, start


def _universal(
    path: Path,
    ranks: int,
    module: Mapping[str, LazyTensor],
    shared: Mapping[str, str],
    state: Mapping[str, Any],
) -> ZeroCheckpoint:
    groups = [_shapes_of(group) for group in state["param_shapes"]]
    shapes = dict[str, Shape]()
    for group in groups:
        shapes |= group
    second_names = tuple(state.get("shared_params") or ())
    found = zero_universal.read(path, shapes, second_names)
    return ZeroCheckpoint(
        directory=path,
        stage=found.stage,
        ranks=ranks,
        module=module,
        slots={slot: _by_plain_name(tensors) for slot, tensors in found.slots.items()},
        groups=found.groups,
        group_of=_by_plain_name(_group_of(groups, found.groups)),
        step=_universal_step(path, found.steps),
        shared=shared,
        state={name: value for name, value in state.items() if name != "module"},
        universal=True,
    )


def _shapes_of(group: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: as_shape(tuple(shape)) for name, shape in group.items()}


def _by_plain_name(values: Mapping[str, _Value]) -> dict[str, _Value]:
    return {_plain(name): value for name, value in values.items()}


def _universal_step(path: Path, held: Sequence[Any]) -> int | None:
    """The number of updates that all parameters have had, or None if no file has one."""
    numbered = {number: {"step": step} for number, step in enumerate(held)}
    steps = {int(step) for step in _steps(numbered)}
    if len(steps) > 1:
        raise CorruptCheckpoint(
            f"{path}: its parameters were updated different numbers of times: {sorted(steps)}"
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


def _cut_as_groups(
    path: Path,
    shapes: Sequence[Mapping[str, Shape]],
    ranks: Sequence[Sequence[LazyTensor]],
    paddings: Any,
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of stages 1 and 2. ranks: each rank's partition of each group."""
    for index, group in enumerate(shapes):
        whole = vector([rank[index] for rank in ranks])
        starts, end = _starts(group, paddings, index)
        last = max((starts[name] + prod(shape) for name, shape in group.items()), default=0)
        elements = whole.shape[0]
        align = 2 * len(ranks)
        if last > elements or -(-end // align) != -(-elements // align):
            in_parameters = sum(map(prod, group.values()))
            raise CorruptCheckpoint(
                f"{path}: group {index} of the optimizer has {elements:,} elements, its parameters "
                f"{in_parameters:,}; files of several runs, or incomplete ones?",
                code="truncated-file",
            )
        for name, shape in group.items():
            yield name, narrowed(whole, starts[name], shape)


def _cut_by_itself(
    path: Path,
    shapes: Sequence[Mapping[str, Shape]],
    ranks: Sequence[Sequence[LazyTensor]],
    paddings: Any,
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of stage 3. ranks: each rank's vectors."""
    vectors, start = [vector(rank) for rank in ranks], 0
    for name, shape in (item for group in shapes for item in group.items()):
        piece = -(-prod(shape) // len(ranks))
        counts = [max(0, min(piece, prod(shape) - rank * piece)) for rank in range(len(ranks))]
        parts = [
            narrowed(held, start, (count,))
            for held, count in zip(vectors, counts, strict=True)
            if count
        ]
        yield name, narrowed(vector(parts), 0, shape)
        start += piece
    if any(start > held.shape[0] for held in vectors):
        raise CorruptCheckpoint(
            f"{path}: its ranks hold fewer elements than its parameters have", code="truncated-file"
        )
