"""The loss of finetuning whose labels are weighed by their probability (DFT, arXiv:2508.05629): - p log p, with a constant p.

Labels that the model finds unlikely change it less than with the cross entropy. Source: `loss_type="dft"` of TRL's SFTTrainer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload


@dataclass(frozen=True)
class ProbableLoss(Criterion):
    """The loss. The first figure is the cross entropy, so that runs with other losses and perplexities can be compared."""

    trains_mtp = False

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        return "loss", "dft_loss"

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        """See Criterion.loss. The head is computed twice, because a label's weight depends on its probability."""
        counting = run.label_weights()
        with torch.no_grad():
            _, losses = stage.label_losses(given, run.labels, counting)
        probabilities = (-losses).exp()
        weights = probabilities * counting * run.share
        total, _ = stage.label_losses(given, run.labels, weights)
        found = {
            "loss": Counted(losses, counting),
            "dft_loss": Counted(losses * probabilities, counting),
        }
        return total, found
