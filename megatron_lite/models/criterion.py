"""The loss of a training step: what the last stage computes, and what the mean counts."""

from collections.abc import Mapping

from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.network_by_family import network
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload


class Criterion:
    """The loss that the network itself defines: of next tokens or of masked words. Subclasses define others."""

    def check(self, config: ModelConfig) -> None:
        """Raise NotExpressible for a model that can't be trained with this loss."""

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        """Return the names of all losses and figures. The first one is the main loss."""
        return network(config.family).loss_names(config)

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


OWN_LOSS = Criterion()
"""The network's own loss."""
