"""DeepSpeed's ZeRO checkpoints: parameters and optimizer state as flat vectors that are cut over the ranks.

    latest                                         the name of the newest directory: global_step3
    global_step3/mp_rank_00_model_states.pt        stages 0 to 2: the module in full, in the dtype that it computes with
    global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt                   stage 3: one a rank, its tensors empty
    global_step3/[bf16_]zero_pp_rank_1_mp_rank_00_optim_states.pt            one a rank

Stages 1 and 2: `param_shapes` lists the parameters of each group of the optimizer; they lie one after the other, each followed
by its padding, in what the ranks' partitions of that group are when joined. The end is padded for all ranks to be equally long.
Stage 3: every parameter is cut by itself into ceil(numel / ranks) elements a rank, the last one padded; a rank's pieces lie one after
the other in its vector. Moments lie as the fp32 parameters do. Source: deepspeed 0.19.8, its engine and zero_to_fp32.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from formats import torch_zip, zero_universal
from formats.chunked import Chunk, ChunkedTensor
from formats.errors import CorruptCheckpoint, UnsafeContent, UnsupportedInput
from formats.flattened import narrowed
from formats.regular_files import read_small
from formats.tensor import LazyTensor, Shape, as_shape, read_tensor

LATEST = "latest"
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
_LATEST_BYTES = 4096
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = re.compile(r"layer_\d+_expert_.*|expp_rank_.*")
_WRAPPERS = re.compile(r"^(module\.)+|_orig_mod\.")


@dataclass(frozen=True)
class ZeroCheckpoint:
    """One step of a run; every tensor by the name that it has in the module."""

    directory: Path
    stage: int
    ranks: int
    module: Mapping[str, LazyTensor]
    """As stored: empty tensors under stage 3."""
    slots: Mapping[str, Mapping[str, LazyTensor]]
    """`master`, `exp_avg`, `exp_avg_sq` -> by name; of the parameters that are trained."""
    groups: Sequence[Mapping[str, Any]]
    """The optimizer's own, in its order."""
    group_of: Mapping[str, int]
    step: int | None
    """Updates done."""
    shared: Mapping[str, str]
    """Second name of a tensor -> its first one."""
    state: Mapping[str, Any] = field(repr=False)
    """The rest of the first model_states file."""
    universal: bool = False
    """Whether ds_to_universal made it (formats/zero_universal.py)."""

    @property
    def dtype(self) -> str:
        """That the module computes with."""
        return next((tensor.dtype for tensor in self.module.values()), "float32")


def find_step(path: Path) -> Path | None:
    """The directory that holds the files: the path itself, or the one that `latest` names. Raises UnsafeContent."""
    if _files(path, _MODEL):
        return path
    latest = next((path / name for name in (LATEST, zero_universal.LATEST) if (path / name).is_file()), None)
    if latest is None:
        return None
    name = read_small(latest, _LATEST_BYTES).decode(errors="replace").strip()
    if not name or "/" in name or name.startswith("."):
        raise UnsafeContent(f"{latest}: names {name!r:.80}, which is no directory beside it")
    return path / name if _files(path / name, _MODEL) else None


def _files(path: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Data-parallel rank -> its file; in numerical order."""
    if not path.is_dir():
        return {}
    found = [(int(match[1] or 0), child) for child in path.iterdir() if (match := pattern.fullmatch(child.name))]
    files = dict(sorted(found))
    if len(files) != len(found):
        names = sorted(child.name for rank, child in found if files[rank] != child)
        raise CorruptCheckpoint(f"{path / names[0]}: is another file of a rank that has one; keep one run's")
    return files


def open_step(path: Path) -> ZeroCheckpoint:
    """Reads all metadata. Raises CorruptCheckpoint for a step that is incomplete, UnsupportedInput for a kind that can't be read."""
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
            what = f"there are {len(optimizers)}" if missing is None else f"rank {missing}'s is missing"
            raise CorruptCheckpoint(
                f"{path}: was saved by {ranks} ranks, each with an *_optim_states.pt; {what}", code="missing-file"
            )
        module = {_plain(name): tensor for name, tensor in _tensors(state.get("module"), models[min(models)])}
        shared = {_plain(name): _plain(owner) for name, owner in dict(state.get("shared_params") or {}).items()}
        partitions = [_read(file)["optimizer_state_dict"] for file in optimizers.values()]
        if zero_universal.is_universal(path):
            return _universal(path, ranks, module, shared, state)
        return _joined(path, ranks, module, shared, state, partitions)


@contextmanager
def _known_form(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise CorruptCheckpoint(f"{path}: is not a ZeRO checkpoint of a known form ({error!r:.200})") from error


def _joined(
    path: Path,
    ranks: int,
    module: Mapping[str, LazyTensor],
    shared: Mapping[str, str],
    state: Mapping[str, Any],
    partitions: Sequence[Mapping[str, Any]],
) -> ZeroCheckpoint:
    rest = {name: value for name, value in state.items() if name != "module"}
    if not partitions:
        if any(0 in tensor.shape for tensor in module.values()):
            raise CorruptCheckpoint(
                f"{path}: its model_states are of stage 3, whose weights lie in *_optim_states.pt; none is there"
            )
        return ZeroCheckpoint(path, 0, ranks, module, {}, (), {}, None, shared, rest)
    shapes = [
        {_plain(name): as_shape(tuple(shape)) for name, shape in group.items()} for group in state["param_shapes"]
    ]
    whole = "fp32_flat_groups" in partitions[0]
    base = [partition["optimizer_state_dict" if whole else "base_optimizer_state"] for partition in partitions]
    if not all(isinstance(each, dict) for each in base):
        raise UnsupportedInput(f"{path}: is an elastic checkpoint of an old DeepSpeed, which is not supported")
    if whole and state.get("frozen_param_shapes"):
        raise UnsupportedInput(f"{path}: has frozen parameters under stage 3, which are not supported")
    masters = [
        partition["fp32_flat_groups" if whole else "single_partition_of_fp32_groups"] for partition in partitions
    ]
    vectors = {MASTER: masters} | {
        slot: [[each["state"][index][slot] for index in range(len(master))] for each, master in zip(base, masters, strict=True)]
        for slot in MOMENTS
        if all(slot in each["state"].get(0, {}) for each in base)
    }  # fmt: skip
    cut = _cut_by_itself if whole else _cut_as_groups
    paddings = partitions[0].get("param_alignment_paddings")
    slots = {slot: dict(cut(path, shapes, vector, paddings)) for slot, vector in vectors.items()}
    steps = {int(value) for each in base for value in _steps(each["state"])}
    if len(steps) > 1:
        raise CorruptCheckpoint(f"{path}: its groups were updated different numbers of times: {sorted(steps)}")
    group_of = {name: index for index, group in enumerate(shapes) for name in group}
    groups = tuple(dict(group) for group in base[0]["param_groups"])
    step = steps.pop() if steps else None
    return ZeroCheckpoint(path, 3 if whole else 2, ranks, module, slots, groups, group_of, step, shared, rest)


def _universal(
    path: Path, ranks: int, module: Mapping[str, LazyTensor], shared: Mapping[str, str], state: Mapping[str, Any]
) -> ZeroCheckpoint:
    groups = [{name: as_shape(tuple(shape)) for name, shape in group.items()} for group in state["param_shapes"]]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    found = zero_universal.read(path, shapes, tuple(state.get("shared_params") or ()))
    slots = {slot: {_plain(name): tensor for name, tensor in held.items()} for slot, held in found.slots.items()}
    group_of = {_plain(name): index for index, group in enumerate(groups) for name in group}
    steps = {int(value) for value in _steps(dict(enumerate({"step": step} for step in found.steps)))}
    if len(steps) > 1:
        raise CorruptCheckpoint(f"{path}: its parameters were updated different numbers of times: {sorted(steps)}")
    step, rest = steps.pop() if steps else None, {name: value for name, value in state.items() if name != "module"}
    return ZeroCheckpoint(
        path, found.stage, ranks, module, slots, found.groups, group_of, step, shared, rest, universal=True
    )


def _read(file: Path) -> Mapping[str, Any]:
    value = torch_zip.read(file)
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
    """The name that it has without what the module was wrapped in."""
    return _WRAPPERS.sub("", name)


def _steps(state: Mapping[int, Mapping[str, Any]]) -> Iterator[float]:
    for held in state.values():
        step: Any = held.get("step")
        if hasattr(step, "read_into"):
            if prod(step.shape) != 1:
                raise ValueError(f"a step of shape {list(step.shape)}")
            yield float(read_tensor(step).view("float32" if step.dtype == "float32" else "int64")[0, 0])
        elif step is not None:
            yield float(step)


@dataclass(frozen=True)
class _Held:
    """A tensor as a chunk of a larger one (formats.chunked.Stored)."""

    held: LazyTensor

    def tensor(self) -> LazyTensor:
        return self.held


def _vector(parts: Sequence[LazyTensor]) -> ChunkedTensor:
    """Vectors one after the other."""
    chunks, start = list[Chunk](), 0
    for part in parts:
        if len(part.shape) != 1:
            raise ValueError(f"a partition of shape {list(part.shape)}")
        chunks.append(Chunk.whole((start,), tuple(part.shape), _Held(part)))
        start += part.shape[0]
    return ChunkedTensor((start,), parts[0].dtype, [chunk for chunk in chunks if chunk.shape[0]])


def _cut_as_groups(
    path: Path, shapes: Sequence[Mapping[str, Shape]], ranks: Sequence[Sequence[LazyTensor]], paddings: Any
) -> Iterator[tuple[str, LazyTensor]]:
    """Stages 1 and 2. ranks: of each, its partition of each group."""
    for index, group in enumerate(shapes):
        whole, start = _vector([rank[index] for rank in ranks]), 0
        for number, (name, shape) in enumerate(group.items()):
            if start + prod(shape) > whole.shape[0]:
                break
            yield name, narrowed(whole, start, shape)
            start += prod(shape) + (paddings[index][number] if paddings else 0)
        else:
            number = len(group)
        align = 2 * len(ranks)
        if number < len(group) or -(-start // align) != -(-whole.shape[0] // align):
            raise CorruptCheckpoint(
                f"{path}: group {index} of the optimizer has {whole.shape[0]:,} elements, its parameters "
                f"{sum(map(prod, group.values())):,}; files of several runs, or incomplete ones?",
                code="truncated-file",
            )


def _cut_by_itself(
    path: Path, shapes: Sequence[Mapping[str, Shape]], ranks: Sequence[Sequence[LazyTensor]], paddings: Any
) -> Iterator[tuple[str, LazyTensor]]:
    """Stage 3. ranks: of each, its vectors."""
    vectors, start = [_vector(rank) for rank in ranks], 0
    for name, shape in (item for group in shapes for item in group.items()):
        piece = -(-prod(shape) // len(ranks))
        counts = [max(0, min(piece, prod(shape) - rank * piece)) for rank in range(len(ranks))]
        parts = [narrowed(vector, start, (count,)) for vector, count in zip(vectors, counts, strict=True) if count]
        yield name, narrowed(_vector(parts), 0, shape)
        start += piece
    if any(start > vector.shape[0] for vector in vectors):
        raise CorruptCheckpoint(
            f"{path}: its ranks hold fewer elements than its parameters have", code="truncated-file"
        )
