"""The optimizer of a DCP output, as torchtitan's checkpointer stores it: flat, below `optimizer`.

    optimizer.state.<parameter>.step, .exp_avg, .exp_avg_sq      tensors
    optimizer.param_groups.<parameter>.lr, .betas ...            objects
    lr_scheduler.last_epoch ...                                  objects
    train_state.step, train_state.ntokens_seen                   objects

Source: torchtitan 0.3.0, components/checkpointer, components/optimizer and trainer.py. Releases from 0.1 on read the
same keys.
"""

import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from formats.distcp_files import DistcpFiles
from formats.pickle_writer import Constant
from megaconv.engine.plan import Placement, Zeros, add_placements, padding_of
from megaconv.model.ir import Header, Key
from megaconv.model.natives import NativeTensor
from megaconv.model.training import ADAM, OptimizerState, TorchGroups, TrainingState
from megaconv.pytorch import progress
from megaconv.pytorch.groups import IMPLEMENTATION, SETTINGS, group_of, listed, torch_groups
from megaconv.pytorch.megatron_entry import ENTRY, entry

CONTAINERS = ("optimizer", "lr_scheduler", "train_state")
"""The dictionaries in the state that torchtitan saves."""
WEIGHTS_TRAINED = (
    "the weights are the optimizer's fp32 weights, which PyTorch's optimizer trains itself"
)
_TITANS = {"foreach": False, "fused": True}
"""The implementation that torchtitan chooses by default."""


class OutputOptimizer(NamedTuple):
    """The optimizer that an output gets."""

    header: Header
    state: OptimizerState
    groups: TorchGroups
    is_titans: bool
    """True for torchtitan's names."""

    def add(
        self, stored: DistcpFiles, natives: Mapping[str, NativeTensor], placements: dict[Key, list[Placement]], zeros: list[Zeros]
    ) -> tuple[str, ...]:  # fmt: skip
        """Add everything to the files. natives: the model's tensors by the name that they have there.

        Returns the notices for the user.
        """
        counts = Counter[int]()
        for name, native in natives.items():
            index = group_of(native, self.groups, self.header)
            if index is not None:
                counts[index] += 1
                self._add_parameter(stored, name, native, placements, zeros)
                for setting, value in self._settings(index).items():
                    stored.add_object(f"optimizer.param_groups.{name}.{setting}", value)
        self._add_progress(stored)
        return (WEIGHTS_TRAINED, *self._notices(counts))

    def _add_parameter(
        self, stored: DistcpFiles, name: str, native: NativeTensor, placements: dict[Key, list[Placement]], zeros: list[Zeros]
    ) -> None:  # fmt: skip
        state = f"optimizer.state.{name}"
        steps = Constant((), "float32", struct.pack("<f", self.state.step or 0))
        stored.add_constant(f"{state}.step", steps)
        corner = (0,) * len(native.shape)
        for slot in ADAM:
            file, record = stored.add_chunk(
                f"{state}.{slot}", native.shape, "float32", corner, native.shape
            )
            add_placements(placements, self.header, native, file, record, slot)
            zeros += padding_of(self.header, native, file, record, slot)

    def _settings(self, index: int) -> dict[str, Any]:
        group = self.groups.groups[index]
        made = {**SETTINGS, **IMPLEMENTATION, **(_TITANS if self.is_titans else {})}
        made |= {name: value for name, value in group.items() if name in made}
        return made | {"initial_lr": group.get("initial_lr", made["lr"])}

    def _add_progress(self, stored: DistcpFiles) -> None:
        training = self.header.training
        for name, value in progress.lr_scheduler(training, self.groups).items():
            stored.add_object(f"lr_scheduler.{name}", value)
        stored.add_object("train_state.step", progress.iteration_of(training))
        stored.add_object("train_state.ntokens_seen", _tokens(training))
        stored.add_object(ENTRY, entry(training))

    def _notices(self, counts: Mapping[int, int]) -> tuple[str, ...]:
        groups = self.groups.groups
        notices = [progress.left_out(self.header.training)]
        if len(groups) > 1:
            notices.append(f"give the run these parameter groups: {listed(groups, counts)}")
        return tuple(notices)


def _tokens(training: TrainingState) -> int:
    """The number of tokens seen, as far as the run's sequence length is known."""
    length = training.arguments.get("seq_length")
    return training.consumed_train_samples * (length if isinstance(length, int) else 0)


def output_optimizer(header: Header, *, is_titans: bool) -> OutputOptimizer | None:
    """The optimizer that an output gets; None for a source without one."""
    state = header.training.optimizer
    if state is None or not header.carries_optimizer:
        return None
    return OutputOptimizer(header, state, torch_groups(header), is_titans)
