"""DeepSpeed's universal checkpoints: what ds_to_universal makes of a ZeRO checkpoint, the optimizer's state in files by parameter.

    latest_universal                               the name of the newest directory
    global_step3_universal/*_model_states.pt       as in the ZeRO checkpoint that it was made of
    global_step3_universal/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
                                                   {"param": the whole tensor}, or under stage 3 its elements alone
    global_step3_universal/zero/optimizer_state.pt the groups of the optimizer; under stage 3 its steps, too

Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats import torch_zip
from formats.errors import CorruptCheckpoint, UnsafeContent
from formats.tensor import LazyTensor, Shape, reshaped

LATEST = "latest_universal"
FOLDER = "zero"
_GROUPS = "optimizer_state.pt"
_FILES = {"master": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}


class Universal(NamedTuple):
    """The optimizer of one step."""

    stage: int
    slots: Mapping[str, Mapping[str, LazyTensor]]
    """`master`, `exp_avg`, `exp_avg_sq` -> by parameter."""
    groups: Sequence[Mapping[str, Any]]
    steps: Sequence[Any]
    """Numbers, or tensors of one."""


def is_universal(step: Path) -> bool:
    return (step / FOLDER / _GROUPS).is_file()


def read(step: Path, shapes: Mapping[str, Shape], shared: Collection[str] = ()) -> Universal:
    """shapes: of every parameter that is trained, by the name that its directory has. shared: second names of these.

    Raises CorruptCheckpoint for a parameter that is missing, unknown or misshapen, UnsafeContent for a name that leads elsewhere.
    """
    for name in shapes:
        if "/" in name or name in ("", ".", ".."):
            raise UnsafeContent(f"{step}: a parameter {name!r:.100} is no directory in {FOLDER}/")
    there = {child.name for child in (step / FOLDER).iterdir() if child.is_dir()}
    missing, unknown = sorted(shapes.keys() - there), sorted(there - shapes.keys() - set(shared))
    if missing or unknown:
        what = f"has no {missing[0]}" if missing else f"has {unknown[0]}, which no model_states.pt lists"
        raise CorruptCheckpoint(f"{step / FOLDER}: {what}; is the checkpoint complete?", code="missing-file")
    state = torch_zip.read(step / FOLDER / _GROUPS)
    if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
        raise CorruptCheckpoint(f"{step / FOLDER / _GROUPS}: has no param_groups")
    slots = {
        slot: {name: _tensor(step / FOLDER / name / file, shape) for name, shape in shapes.items()}
        for slot, file in _FILES.items()
    }
    steps = [torch_zip.read(file) for name in shapes if (file := step / FOLDER / name / "step.pt").is_file()]
    inner = state.get("optimizer_state_dict")
    if not steps and isinstance(inner, dict):
        steps = [held["step"] for held in dict(inner.get("state") or {}).values() if "step" in held]
    return Universal(_stage(state.get("zero_stage")), slots, state["param_groups"], steps)


def _tensor(file: Path, shape: Shape) -> LazyTensor:
    value = torch_zip.read(file)
    held = value.get("param") if isinstance(value, dict) else value
    if not hasattr(held, "read_into"):
        raise CorruptCheckpoint(f"{file}: expected a tensor, found {type(held).__name__}")
    found: LazyTensor = held  # type: ignore[assignment]
    if prod(found.shape) != prod(shape) or (len(found.shape) > 1 and tuple(found.shape) != shape):
        raise CorruptCheckpoint(f"{file}: is {list(found.shape)}, the parameter {list(shape)}")
    return reshaped(found, shape)


def _stage(value: Any) -> int:
    """Of a number, or of a ZeroStageEnum."""
    number = value.args[0] if getattr(value, "args", ()) else value
    return number if type(number) is int and 1 <= number <= 3 else 2
