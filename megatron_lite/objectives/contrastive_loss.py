"""The loss of embedding models: each query has to select the document that answers it among all documents of a step (InfoNCE).

    scores = queries @ documents.T / temperature       cosines, because all vectors have length 1
    loss   = mean over queries of -log softmax(scores)[its own document]

The documents of a step are those of its global batch, in every layout: the own ones of all queries and their hard negatives
(models/retrieval_loss.py computes them in two passes). Documents that answer a query too are left out of its softmax: those with
the text of its own one, and those of other records with the same query. Source: MultipleNegativesRankingLoss of
sentence-transformers 6, arXiv:1807.03748, and arXiv:2101.06983 for the two passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.criterion import Criterion, Extras, Outputs
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.models.retrieval_loss import (
    CONTEXT_GRADIENTS,
    LOSSES,
    POSITIONS,
    QUERY_GRADIENTS,
    compared,
)
from megatron_lite.parallel.comm import Group
from megatron_lite.parallel.payload import Payload

QUERIES, DOCUMENTS = "queries", "documents"
"""Names among a microbatch's extras: the number of each query's text, int64 [samples], and of its documents' texts, int64
[samples, 1 + hard negatives], the own one first. Equal texts have equal numbers. -1: there is no such document."""
ACCURACY = "accuracy"
"""The share of queries whose own document has the best score."""
_OF_NO_QUERY = -1


@dataclass(frozen=True)
class ContrastiveLoss(Criterion):
    """The loss of embedding models.

    A microbatch's rows are, for each sample, the query, its own document and its hard negatives. Its loss mask is 1 at the
    tokens that are pooled. Its labels are unused.
    """

    trains_mtp: ClassVar = False
    trains_head: ClassVar = False

    temperature: float = 0.05
    replicas: Group = None
    """The ranks with other microbatches of the same step."""

    def on(self, replicas: Group) -> "ContrastiveLoss":
        return replace(self, replicas=replicas)

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        return "loss", ACCURACY

    def counts(self, batch: Microbatch) -> int:
        return len(batch.extras[QUERIES])

    def needs_all(self, microbatches: int) -> bool:
        return microbatches > 1

    def outputs(self, stage: Network, given: Payload, run: Pass) -> Outputs:
        """Return the vectors of queries and of documents, and for each document the numbers of its text and its query."""
        assert isinstance(stage, ModelChunk)
        queries, documents = run.extras[QUERIES], run.extras[DOCUMENTS]
        vectors = stage.embeddings(given, run).view(len(queries), documents.shape[1] + 1, -1)
        own, others = vectors[:, 1], vectors[:, 2:].flatten(0, 1)
        texts = torch.cat((documents[:, 0], documents[:, 1:].flatten()))
        answered = torch.cat((queries, torch.full_like(texts[len(queries) :], _OF_NO_QUERY)))
        return vectors[:, 0], torch.cat((own, others)), torch.stack((texts, answered), 1)

    def extras(self, outputs: Sequence[Outputs], hidden: int) -> list[Extras]:
        return compared(outputs, self.replicas, self.temperature)

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        queries, documents, numbers = self.outputs(stage, given, run)
        known: Extras = run.extras
        if LOSSES not in known:
            (known,) = compared(
                [(queries.detach(), documents.detach(), numbers)], self.replicas, self.temperature
            )
        of_queries = (queries * known[QUERY_GRADIENTS]).sum()
        of_documents = (documents * known[CONTEXT_GRADIENTS]).sum()
        losses = known[LOSSES]
        ones = torch.ones_like(losses)
        best = (known[POSITIONS] == 0).to(ones.dtype)
        figures = {"loss": Counted(losses, ones), ACCURACY: Counted(best, ones)}
        return (of_queries + of_documents) * run.share, figures
