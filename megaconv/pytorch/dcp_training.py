"""The training state of a DCP source: the optimizer of its trained tensors, and the progress of the run."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from formats.tensor import LazyTensor, Shape
from formats.torch_dist import DistDirectory
from formats.wording import listing
from megaconv.model.training import TrainingState
from megaconv.pytorch import stored_optimizer, titan_fused
from megaconv.pytorch.adam_state import adam_state
from megaconv.pytorch.megatron_entry import ENTRY, with_entry
from megaconv.pytorch.progress import batch_size_of, with_counted_samples, with_samples
from megaconv.pytorch.stored_optimizer import StoredOptimizer
from megaconv.pytorch.training_state import Parameters, with_masters

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
        state = adam_state(self.optimizer, self.parameters, shapes, takes_megatrons=takes_megatrons)
        iteration = self._iteration() or state.step
        training = TrainingState(iteration, optimizer=state, arguments={"optimizer": "adam"})
        batch_size = batch_size_of(extra)
        if batch_size is None and ENTRY in self.archives.metadata.objects:
            uncounted = with_samples(training, 0)
            found = with_entry(uncounted, self.archives.read_object(ENTRY))
            if found is not uncounted:
                return found
        return with_counted_samples(training, batch_size, self.archives.path)

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
