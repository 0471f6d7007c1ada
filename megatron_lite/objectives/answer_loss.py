"""The loss of examples with a right answer: a class, or one of several choices. It is a mean over the examples of a step."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.bert import Bert
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload

ACCURACY = "accuracy"
"""The fraction of the examples with the right answer."""
ANSWERS = "answers"
"""Name among a microbatch's extras: int64 [examples], the class or the number of the right row of an example."""
COUNTING = "counting"
"""Name among a microbatch's extras: float32 [examples], the weight of each example."""


class AnswerLoss(Criterion):
    """Cross entropy of a BERT's classes or choices. A microbatch's labels are unused."""

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        return "loss", ACCURACY

    def counts(self, batch: Microbatch) -> int:
        return len(batch.extras[ANSWERS])

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        assert isinstance(stage, Bert)
        answers, weights = run.extras[ANSWERS], run.extras[COUNTING]
        scores = stage.scores(given[0], len(answers), run.seed)
        losses = F.cross_entropy(scores, answers, reduction="none")
        right = (scores.argmax(1) == answers).to(weights.dtype)
        total = torch.dot(losses, weights) * (run.share / stage.alike)
        return total, {"loss": Counted(losses.detach(), weights), ACCURACY: Counted(right, weights)}
