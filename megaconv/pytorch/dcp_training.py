"""The training state of a DCP source: the optimizer of its trained tensors, and the progress of the run."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from formats.tensor import LazyTensor, Shape
from formats.torch_dist import DistDirectory
from megaconv.errors import UsageError
from megaconv.megatron.arguments.zero_groups import megatron_groups, torch_groups
from megaconv.model.check import listing
from megaconv.model.training import OptimizerState, TrainingState
from megaconv.pytorch import stored_optimizer, titan_fused
from megaconv.pytorch.megatron_entry import ENTRY, with_entry
from megaconv.pytorch.progress import with_samples
from megaconv.pytorch.stored_optimizer import StoredOptimizer
from megaconv.pytorch.training_state import Parameters, with_masters

GLOBAL_BATCH_SIZE = "global_batch_size"
"""The --option for the samples of a step, which PyTorch's checkpoints don't count."""
_ITERATION = re.compile(r"(?:.*?\.)?train_state\.step")
_log = logging.getLogger("megaconv")


@dataclass(frozen=True)
class DcpRun:
    """The run that saved a checkpoint with a complete optimizer."""

    archives: DistDirectory
    optimizer: StoredOptimizer
    parameters: Parameters
    slots: Mapping[str, Mapping[str, LazyTensor]]
    """The optimizer's tensors in fp32, by slot and name."""

    def training(
        self, shapes: Mapping[str, Shape], extra: Mapping[str, str], *, takes_megatrons: bool
    ) -> TrainingState:
        """The training state. shapes: of the canonical tensors. extra: the loader's own options.

        takes_megatrons: True if Megatron may decay other parameters than the source did. Raises UsageError.
        """
        state = self._optimizer_state(shapes, takes_megatrons=takes_megatrons)
        iteration = self._iteration() or state.step
        training = TrainingState(iteration, optimizer=state, arguments={"optimizer": "adam"})
        asked = _batch_size(extra)
        if asked is not None:
            return with_samples(training, (iteration or 0) * asked)
        training = with_samples(training, 0)
        has_entry = ENTRY in self.archives.metadata.objects
        found = with_entry(training, self.archives.read_object(ENTRY)) if has_entry else training
        if found is training:
            _log.warning(
                "%s: counts no samples: for Megatron, give --option %s=N, the samples of a step",
                self.archives.path,
                GLOBAL_BATCH_SIZE,
            )
        return found

    def _optimizer_state(
        self, shapes: Mapping[str, Shape], *, takes_megatrons: bool
    ) -> OptimizerState:
        stored = self.optimizer
        own = self.parameters.by_canonical(stored.groups, stored.group_of)
        made = megatron_groups(own, shapes, None, takes_megatrons=takes_megatrons)
        incomplete = _incomplete(stored)
        return OptimizerState(
            "torch's Adam",
            max(stored.steps),
            made.groups,
            made.group_of,
            unsupported=made.unsupported or incomplete,
            torch=torch_groups(own, stored.groups),
            incomplete=incomplete,
        )

    def _iteration(self) -> int | None:
        for key in self.archives.objects():
            if _ITERATION.fullmatch(key):
                step: Any = self.archives.read_object(key)
                return step if type(step) is int else None
        return None


def open_run(
    archives: DistDirectory,
    weights: Mapping[str, LazyTensor],
    parameters: Parameters,
    name_of: Callable[[str], str],
    kv_heads: int,
) -> DcpRun | None:
    """The run behind a checkpoint; None if it has no complete state of Adam for all trainable weights.

    weights: the module's tensors by name. name_of: the name there of a parameter in the optimizer.
    """
    stored = stored_optimizer.read(archives, name_of)
    if stored is None:
        return None
    stored = titan_fused.separated(stored, weights, kv_heads)
    unknown = sorted(stored.group_of.keys() - weights.keys())
    frozen = parameters.frozen(weights, stored.group_of)
    if unknown or frozen:
        what = (
            f"has no weight {listing(unknown)}" if unknown else f"doesn't train {listing(frozen)}"
        )
        _log.warning("%s: optimizer state is left out, because the run %s", archives.path, what)
        return None
    return DcpRun(archives, stored, parameters, with_masters(weights, stored.slots))


def _incomplete(stored: StoredOptimizer) -> str | None:
    if stored.further:
        return f"the optimizer's state has {', '.join(stored.further)} besides the moments of Adam"
    if len(stored.steps) > 1:
        return f"the parameters were updated different numbers of times: {sorted(stored.steps)}"
    return None


def _batch_size(extra: Mapping[str, str]) -> int | None:
    asked = extra.get(GLOBAL_BATCH_SIZE)
    if asked is None:
        return None
    if not asked.isdecimal() or int(asked) == 0:
        raise UsageError(f"--option {GLOBAL_BATCH_SIZE}={asked}: should be a number of samples")
    return int(asked)
