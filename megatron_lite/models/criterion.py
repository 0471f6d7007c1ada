"""The loss of a training step: what the last stage computes, and what the mean counts."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.network_by_family import network
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.comm import Group
from megatron_lite.parallel.payload import Payload

Outputs = tuple[Tensor, ...]
"""The part of a microbatch's output that the loss of all microbatches of a step needs."""
Extras = Mapping[str, Tensor]
"""Tensors of a microbatch by name; see Microbatch.extras."""


class Criterion:
    """The loss that the network itself defines: of next tokens or of masked words. Subclasses define others."""

    trains_mtp: ClassVar[bool] = True
    """False if the loss doesn't depend on MTP layers: then they keep their values and are not computed."""
    trains_head: ClassVar[bool] = True
    """False if the loss doesn't depend on a head for words: then one that isn't tied keeps its values."""

    def check(self, config: ModelConfig) -> None:
        """Raise NotExpressible for a model that can't be trained with this loss."""

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        """Return the names of all losses and figures. The first one is the main loss."""
        return network(config).loss_names(config)

    def counts(self, batch: Microbatch) -> int:
        """Return the number of labels (or pairs, or examples) that the mean counts if none of them is masked."""
        return batch.tokens.numel()

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        """Return (loss to differentiate, losses and figures by name). given: the output of the last stage's forward.

        The loss to differentiate is a weighted sum over the counted labels, times run.share.
        """
        return stage.loss(given, run)

    def on(self, replicas: Group) -> "Criterion":
        """Return the criterion for one rank. replicas: the ranks with other microbatches of the same step."""
        del replicas
        return self

    def needs_all(self, microbatches: int) -> bool:
        """Return whether a microbatch's loss depends on the other microbatches of this rank's step.

        The engine then makes two passes. The first one collects `outputs` of all microbatches, without gradients. Their
        `extras` become extras of the microbatches for the second pass.
        """
        del microbatches
        return False

    def outputs(self, stage: Network, given: Payload, run: Pass) -> Outputs:
        """Return what `extras` needs of a microbatch. given: the output of the last stage's forward."""
        raise NotImplementedError

    def extras(self, outputs: Sequence[Outputs], hidden: int) -> list[Extras]:
        """Return the extras of each microbatch. Collective over the replicas. outputs: of this rank's microbatches."""
        raise NotImplementedError


OWN_LOSS = Criterion()
"""The network's own loss."""
