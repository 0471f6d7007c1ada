"""DeepSpeed's universal checkpoints: ds_to_universal makes them of ZeRO checkpoints, with one set of optimizer files
per parameter.

    latest_universal                               the name of the newest directory
    global_step3_universal/*_model_states.pt       as in the original ZeRO checkpoint
    global_step3_universal/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
                                                   {"param": the whole tensor}, or under stage 3 only its elements
    global_step3_universal/zero/optimizer_state.pt the optimizer's groups; under stage 3 all state of the first rank

Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats import torch_zip
from formats.chunked import ChunkedTensor
from formats.compared import ComparedTensor
from formats.errors import CorruptCheckpoint, UnsafeContent
from formats.flattened import beginning, vector
from formats.pickle_records import Global
from formats.tensor import LazyTensor, Shape, reshaped

LATEST = "latest_universal"
FOLDER = "zero"
GROUPS = "optimizer_state.pt"
FILES = {"master": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
"""Slot -> its file in the directory of a parameter."""


_STAGES = {"ZeroStageEnum.optimizer_states": 1, "ZeroStageEnum.weights": 3}


class Universal(NamedTuple):
    """The optimizer of one step."""

    stage: int
    slots: Mapping[str, Mapping[str, LazyTensor]]
    """`master`, `exp_avg`, `exp_avg_sq` -> tensors by parameter."""
    groups: Sequence[Mapping[str, Any]]
    steps: Sequence[Any]
    """Numbers, or tensors of one number."""


def is_universal(step: Path) -> bool:
    return (step / FOLDER / GROUPS).is_file()


def read(step: Path, shapes: Mapping[str, Shape], shared: Collection[str] = ()) -> Universal:
    """Read the optimizer of a step.

    shapes: shape of every trained parameter, by the name of its directory. shared: second names of these parameters.
    Raises CorruptCheckpoint for a parameter that is missing, unknown or misshapen, and UnsafeContent for a name that
    leads elsewhere.
    """
    folder = step / FOLDER
    _require_directories(folder, shapes, shared)
    state_file = folder / GROUPS
    state = torch_zip.read(state_file)
    if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
        raise CorruptCheckpoint(f"{state_file}: has no param_groups")
    slots: dict[str, dict[str, LazyTensor]] = {}
    for slot, file in FILES.items():
        slots[slot] = {}
        for name, shape in shapes.items():
            slots[slot][name] = _tensor(folder / name / file, shape)
    for slot, whole in _first_rank(state).items():
        partitions = int(state["partition_count"])
        slots[slot] = _compared(step, slot, slots[slot], whole, partitions)
    stage = _stage(state.get("zero_stage"))
    steps = _steps_in_files(folder, shapes) or _steps_in_state(state)
    return Universal(stage, slots, state["param_groups"], steps)


def _require_directories(
    folder: Path, shapes: Mapping[str, Shape], shared: Collection[str]
) -> None:
    """Raise unless the folder has exactly one directory for each parameter; second names may have one too."""
    for name in shapes:
        if "/" in name or name in ("", ".", ".."):
            raise UnsafeContent(
                f"{folder.parent}: a parameter {name!r:.100} is no directory in {FOLDER}/"
            )
    there = {child.name for child in folder.iterdir() if child.is_dir()}
    missing = sorted(shapes.keys() - there)
    unknown = sorted(there - shapes.keys() - set(shared))
    if missing or unknown:
        what = (
            f"has no {missing[0]}"
            if missing
            else f"has {unknown[0]}, which no model_states.pt lists"
        )
        raise CorruptCheckpoint(
            f"{folder}: {what}; is the checkpoint complete?", code="missing-file"
        )


def _steps_in_files(folder: Path, names: Collection[str]) -> list[Any]:
    files = [folder / name / "step.pt" for name in names]
    return [torch_zip.read(file) for file in files if file.is_file()]


def _steps_in_state(state: Mapping[str, Any]) -> list[Any]:
    inner = state.get("optimizer_state_dict")
    if not isinstance(inner, dict):
        return []
    by_parameter = dict(inner.get("state") or {})
    return [held["step"] for held in by_parameter.values() if "step" in held]


def _first_rank(state: Mapping[str, Any]) -> dict[str, ChunkedTensor]:
    """Slot -> the vector of the first rank, under stage 3; empty under other stages."""
    masters, inner = state.get("fp32_flat_groups"), state.get("optimizer_state_dict")
    if not masters or not isinstance(inner, dict) or type(state.get("partition_count")) is not int:
        return {}
    by_group = [inner["state"][index] for index in range(len(masters))]
    vectors = {"master": masters} | {
        slot: [held[slot] for held in by_group] for slot in ("exp_avg", "exp_avg_sq")
    }
    return {slot: vector(parts) for slot, parts in vectors.items()}


def _compared(
    step: Path, slot: str, tensors: Mapping[str, LazyTensor], whole: ChunkedTensor, ranks: int
) -> dict[str, LazyTensor]:
    """The tensors, each of which is compared with the first rank's part of it while it is read. whole: that rank's
    vector."""
    found, start = dict[str, LazyTensor](), 0
    for name, tensor in tensors.items():
        file = step / FOLDER / name / FILES[slot]
        numel = prod(tensor.shape)
        piece = -(-numel // ranks)
        if tensor.dtype != whole.dtype:
            raise CorruptCheckpoint(f"{file}: is {tensor.dtype}, in {GROUPS} {whole.dtype}")
        copy = beginning(whole, start, min(piece, numel), tuple(tensor.shape))
        message = (
            f"{file}: differs from this parameter in {GROUPS}; "
            "was the file replaced by another parameter's? make the universal checkpoint again"
        )
        found[name] = ComparedTensor(tensor, copy, message)
        start += piece
    return found


def _tensor(file: Path, shape: Shape) -> LazyTensor:
    value, folder = torch_zip.read_saved(file)
    if folder != file.stem and f"{folder}.pt" in FILES.values():
        raise CorruptCheckpoint(
            f"{file}: was saved as {folder}.pt; make the universal checkpoint again"
        )
    held = value.get("param") if isinstance(value, dict) else value
    if not hasattr(held, "read_into"):
        raise CorruptCheckpoint(f"{file}: expected a tensor, found {type(held).__name__}")
    found: LazyTensor = held  # type: ignore[assignment]
    is_flat = len(found.shape) <= 1
    fits = prod(found.shape) == prod(shape) if is_flat else tuple(found.shape) == shape
    if not fits:
        raise CorruptCheckpoint(f"{file}: is {list(found.shape)}, the parameter {list(shape)}")
    return reshaped(found, shape)


def _stage(value: Any) -> int:
    """The stage, from a number or a ZeroStageEnum. Python 3.11.0 to 3.11.3 pickles the name of its member."""
    if isinstance(value, Global):
        return _STAGES.get(value.name, 2)
    number = value.args[0] if getattr(value, "args", ()) else value
    return number if type(number) is int and 1 <= number <= 3 else 2
