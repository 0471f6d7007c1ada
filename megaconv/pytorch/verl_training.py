"""The training state of an FSDP run of verl: the optimizer of its model, and the progress of its schedule.

verl steps the schedule once for each step of the run, and the optimizer once for each minibatch.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from formats import dtensor_files, fsdp_optimizer
from formats.dtensor_files import SavedModel
from formats.fsdp_optimizer import FsdpOptimizer
from formats.tensor import LazyTensor, Shape
from formats.wording import listing
from megaconv.errors import CorruptCheckpoint, UnsafeContent, UnsupportedInput
from megaconv.huggingface.stored_names import unwrapped
from megaconv.model.check import well_formed
from megaconv.model.training import ADAM, TrainingState
from megaconv.pytorch.adam_state import adam_state
from megaconv.pytorch.progress import batch_size_of, with_counted_samples
from megaconv.pytorch.stored_optimizer import MOST_STEPS, StoredOptimizer, numbers
from megaconv.pytorch.training_state import Parameters, with_masters

_log = logging.getLogger("megaconv")


@dataclass(frozen=True)
class VerlTraining:
    """The run that saved a checkpoint with a complete optimizer."""

    path: Path
    optimizer: StoredOptimizer
    parameters: Parameters
    slots: Mapping[str, Mapping[str, LazyTensor]]
    """The optimizer's tensors in fp32, by slot and name."""
    steps_of_schedule: int | None
    """None without a schedule."""

    def training(
        self, shapes: Mapping[str, Shape], extra: Mapping[str, str], *, takes_megatrons: bool
    ) -> TrainingState:
        """The training state. shapes: of the canonical tensors. extra: the loader's own options.

        takes_megatrons: True if Megatron may decay other parameters than the source did. Raises UsageError.
        """
        state = adam_state(self.optimizer, self.parameters, shapes, takes_megatrons=takes_megatrons)
        steps = self.steps_of_schedule or state.step
        training = TrainingState(steps, optimizer=state, arguments={"optimizer": "adam"})
        return with_counted_samples(training, batch_size_of(extra), self.path)


def open_run(
    path: Path, model: SavedModel, weights: Mapping[str, LazyTensor], parameters: Parameters
) -> VerlTraining | None:
    """The run behind a checkpoint; None, after a warning, if its optimizer can't be converted.

    weights: the model's tensors without wrappers in their names. Raises CorruptCheckpoint for an optimizer that doesn't
    fit the model.
    """
    # A tied head is a tensor of the state dict, and no parameter of its own.
    names = map(unwrapped, model.parameters)
    own = [name for name in names if name not in parameters.copies]
    others = [name for name in own if name not in parameters.natives]
    if others:
        _warn(path, f"the run has parameters besides the model's: {listing(others)}")
        return None
    shapes = {name: tuple(weights[name].shape) for name in own}
    try:
        with _with_remedy(), well_formed(str(path)):
            found = fsdp_optimizer.read(path, model, shapes)
    except UnsupportedInput as error:
        _log.warning("optimizer state is left out: %s", error)
        return None
    reason = _reason_to_leave_out(found, own, parameters)
    if reason is not None:
        _warn(path, reason)
        return None
    with _with_remedy():
        steps = frozenset(numbers(path, found.steps))
        steps_of_schedule = _steps_of_schedule(path, model.ranks)
    stored = StoredOptimizer(
        found.slots,
        steps,
        found.groups,
        {name: index for name, index in found.group_of.items() if name in found.steps},
        found.further,
    )
    slots = with_masters(weights, found.slots)
    return VerlTraining(path, stored, parameters, slots, steps_of_schedule)


@contextmanager
def _with_remedy() -> Iterator[None]:
    try:
        yield
    except (CorruptCheckpoint, UnsafeContent) as error:
        raise type(error)(
            f"{error} (--no-optimizer converts the weights alone)", code=error.code
        ) from error


def _steps_of_schedule(path: Path, ranks: int) -> int | None:
    """The number of steps in `extra_state`; None without such files or without a schedule. Raises CorruptCheckpoint."""
    file = path / f"extra_state_world_size_{ranks}_rank_0.pt"
    schedule = dtensor_files.read_file(file).get("lr_scheduler") if file.exists() else None
    steps = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    if type(steps) is not int:
        return None
    if not 0 <= steps <= MOST_STEPS:
        raise CorruptCheckpoint(f"{file}: last_epoch {steps} is no number of steps")
    return steps


def _reason_to_leave_out(
    found: FsdpOptimizer, own: list[str], parameters: Parameters
) -> str | None:
    trained = found.steps.keys()
    if not trained or any(found.slots[slot].keys() != trained for slot in ADAM):
        state = listing([*found.further, *(slot for slot in ADAM if found.slots[slot])]) or "none"
        return f"it isn't that of torch's Adam ({state})"
    frozen = parameters.frozen(own, trained)
    return f"the run doesn't train {listing(frozen)}" if frozen else None


def _warn(path: Path, reason: str) -> None:
    _log.warning("%s: optimizer state is left out, because %s", path, reason)
