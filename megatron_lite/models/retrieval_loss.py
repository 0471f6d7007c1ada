"""The loss of a biencoder: each query has to select its own context among all contexts of a step.

    scores = queries @ contexts.T        [queries, contexts], float32; divided by sqrt(hidden) with --retriever-score-scaling
    loss   = mean over queries of -log softmax(scores)[its own context]

In Megatron the contexts are those of one microbatch of all data-parallel ranks. Here they are those of the whole global
batch, in every layout. So the engine first computes the embeddings of all microbatches without gradients (first pass).
Ranks exchange them, and each computes the loss and its gradients with respect to the embeddings. A second pass of each
microbatch then takes these gradients as those of its embeddings. One microbatch needs one pass.

A microbatch's contexts are its queries' own contexts in the order of queries, and then further negatives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.biencoder import Biencoder
from megatron_lite.models.criterion import Criterion, Extras, Outputs
from megatron_lite.models.moving import moved
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel import comm
from megatron_lite.parallel.comm import Group
from megatron_lite.parallel.payload import Payload

QUERY_GRADIENTS, CONTEXT_GRADIENTS = "query gradients", "context gradients"
"""Names among a microbatch's extras: float32, of the summed loss with respect to its embeddings."""
LOSSES, POSITIONS = "losses", "positions"
"""Names among a microbatch's extras: of each query the loss, and the number of contexts with better scores."""
RANK = "rank"
"""The mean position of a query's own context, counted from 0 as in Megatron."""
NEGATIVES = ("batch", "microbatch")
"""Values of --retriever-negatives."""


def texts_of(queries: Tensor, contexts: Tensor) -> Microbatch:
    """Return the microbatch of queries and contexts, each int64 [texts, length], with padding 0."""
    return Microbatch(
        queries,
        queries,
        types=torch.zeros_like(queries),
        visible=queries > 0,
        source=contexts,
        source_visible=contexts > 0,
    )


@dataclass(frozen=True)
class RetrievalLoss(Criterion):
    """The loss of a biencoder."""

    scales: bool = False
    """True if scores are divided by the square root of the hidden size."""
    topk: tuple[int, ...] = ()
    """Report how often a query's own context is among the k best, in percent."""
    negatives: str = "batch"
    """One of NEGATIVES: the contexts of the global batch, or of one microbatch of all data-parallel ranks."""
    reports_rank: bool = False
    replicas: Group = None
    """The ranks with other microbatches of the same step."""

    def on(self, replicas: Group) -> "RetrievalLoss":
        return replace(self, replicas=replicas)

    def check(self, config: ModelConfig) -> None:
        if config.family != "biencoder":
            raise NotExpressible(
                f"the model is a {config.family}; retrieval is learned by --model-type biencoder"
            )

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        ranks = (RANK,) if self.reports_rank else ()
        return "loss", *ranks, *(f"top{k}_acc" for k in self.topk)

    def counts(self, batch: Microbatch) -> int:
        return len(batch.tokens)

    def needs_all(self, microbatches: int) -> bool:
        return self.negatives == "batch" and microbatches > 1

    def outputs(self, stage: Network, given: Payload, run: Pass) -> Outputs:
        """Return the embeddings of queries and contexts, float32."""
        assert isinstance(stage, Biencoder)
        queries, contexts = stage.embeddings(given)
        return queries.float(), contexts.float()

    def extras(self, outputs: Sequence[Outputs], hidden: int) -> list[Extras]:
        divisor = sqrt(hidden) if self.scales else 1.0
        return compared(outputs, self.replicas, divisor)

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        assert isinstance(stage, Biencoder)
        queries, contexts = self.outputs(stage, given, run)
        known: Extras = run.extras
        if LOSSES not in known:
            (known,) = self.extras(
                [(queries.detach(), contexts.detach())], stage.plan.config.hidden
            )
        of_queries = (queries * known[QUERY_GRADIENTS]).sum()
        of_contexts = (contexts * known[CONTEXT_GRADIENTS]).sum()
        total = (of_queries + of_contexts) * (run.share / stage.alike)
        return total, self.figures(known)

    def figures(self, known: Extras) -> Mapping[str, Counted]:
        """Return the loss and the figures of a microbatch by name."""
        losses, positions = known[LOSSES], known[POSITIONS]
        ones = torch.ones_like(losses)
        found = {"loss": Counted(losses, ones)}
        if self.reports_rank:
            found[RANK] = Counted(positions.to(ones.dtype), ones)
        for k in self.topk:
            found[f"top{k}_acc"] = Counted(100.0 * (positions < k), ones)
        return found


def compared(outputs: Sequence[Outputs], replicas: Group, divisor: float) -> list[Extras]:
    """Return the losses of all queries and their gradients, by microbatch. Collective over `replicas`.

    outputs: of this rank's microbatches, embeddings (queries, contexts) without gradients. They may have a third tensor, int64
    [contexts, 2]: the number of a context's text and of the query that it answers. Then a query is compared neither with the
    text of its own context again, nor with other contexts that answer it, nor with those whose number is negative.
    divisor: of all scores. The gradients are those of the sum over the queries of all ranks.
    """
    queries, contexts, *numbers = _gathered(outputs, replicas)
    own_context = torch.cat(
        [
            torch.arange(count, device=queries.rows.device) + start
            for count, start in zip(queries.counts, contexts.starts, strict=True)
        ]
    )
    with torch.enable_grad():
        q, c = queries.rows.requires_grad_(), contexts.rows.requires_grad_()
        scores = q @ c.t() / divisor
        for each in numbers:
            scores = scores.masked_fill(_left_out(each.rows, own_context), -torch.inf)
        losses = F.cross_entropy(scores, own_context, reduction="none")
        q_gradients, c_gradients = torch.autograd.grad(losses.sum(), (q, c))
    found = (
        queries.own(q_gradients),
        contexts.own(c_gradients),
        queries.own(losses.detach()),
        queries.own(_positions(scores.detach(), own_context)),
    )
    names = QUERY_GRADIENTS, CONTEXT_GRADIENTS, LOSSES, POSITIONS
    return [dict(zip(names, each, strict=True)) for each in zip(*found, strict=True)]


def _left_out(numbers: Tensor, own: Tensor) -> Tensor:
    """Return bool [queries, contexts]: the contexts with which a query isn't compared. See compared.

    numbers: int64 [contexts, 2]. own: int64 [queries], each query's own context.
    """
    alike = (numbers[own].unsqueeze(1) == numbers.unsqueeze(0)).any(2)
    alike.scatter_(1, own.unsqueeze(1), False)
    return alike | (numbers[:, 0] < 0)


def _positions(scores: Tensor, own: Tensor) -> Tensor:
    """Return int64 [queries]: the number of contexts that come before the query's own one, in a stable order of scores.

    An earlier context with an equal score counts as better. So a model with equal embeddings selects nothing.
    """
    mine = scores.gather(1, own.unsqueeze(1))
    places = torch.arange(scores.shape[1], device=scores.device)
    is_earlier = places < own.unsqueeze(1)
    return ((scores > mine) | ((scores == mine) & is_earlier)).sum(1)


def _gathered(outputs: Sequence[Outputs], replicas: Group) -> list["_Gathered"]:
    """Return the rows of all microbatches of all ranks, for each kind of output. Collective."""
    kinds = list(zip(*outputs, strict=True))
    counts = [[len(part) for part in parts] for parts in kinds]
    by_kind = zip(kinds, _counts_of_all_ranks(counts, kinds[0][0].device, replicas), strict=True)
    return [_Gathered(parts, of_ranks, replicas) for parts, of_ranks in by_kind]


def _counts_of_all_ranks(
    own: list[list[int]], device: torch.device, replicas: Group
) -> list[list[list[int]]]:
    """Return the numbers of rows [kind][rank][microbatch]. Collective. own: [kind][microbatch]."""
    if replicas is None:
        return [[of_kind] for of_kind in own]
    here = moved(torch.tensor(own).flatten(), device)
    found = comm.gathered(here, replicas).view(comm.size(replicas), len(own), -1)
    counts: list[list[list[int]]] = found.transpose(0, 1).tolist()
    return counts


def _parts_of_all_ranks(
    parts: Sequence[Tensor], counts: Sequence[list[int]], replicas: Group
) -> list[Sequence[Tensor]]:
    """Return the parts [rows, width] of each rank's microbatches, by rank. Collective. counts: their rows, by rank."""
    if replicas is None:
        return [parts]
    own_rows = torch.cat(list(parts))
    most = max(map(sum, counts))
    padded = F.pad(own_rows, (0, 0, 0, most - len(own_rows)))
    rows = comm.gathered(padded, replicas).view(len(counts), most, -1)
    return [
        torch.split(of_rank[: sum(its_counts)], its_counts)
        for of_rank, its_counts in zip(rows, counts, strict=True)
    ]


class _Gathered:
    """Rows of all microbatches of all ranks: microbatch by microbatch, and rank by rank in each of them.

    This is the order of samples in a global batch, in every layout.
    """

    def __init__(
        self, parts: Sequence[Tensor], counts: Sequence[list[int]], replicas: Group
    ) -> None:
        """parts: of this rank's microbatches. counts: the rows of each rank's microbatches, of which ranks have equal numbers."""
        by_rank = _parts_of_all_ranks(parts, counts, replicas)
        own_rank = 0 if replicas is None else torch.distributed.get_rank(replicas)
        listed: list[Tensor] = []
        self._own: list[int] = []
        for number in range(len(parts)):
            for rank, of_rank in enumerate(by_rank):
                if rank == own_rank:
                    self._own.append(len(listed))
                listed.append(of_rank[number])
        self.rows = torch.cat(listed)
        """[rows, width]: all rows."""
        self.counts = [len(part) for part in listed]
        """The number of rows of each part."""
        self.starts = [sum(self.counts[:number]) for number in range(len(listed))]
        """The first row of each part."""

    def own(self, values: Tensor) -> list[Tensor]:
        """Return the values of this rank's rows, by microbatch. values: of all rows."""
        found = []
        for number in self._own:
            start = self.starts[number]
            found.append(values[start : start + self.counts[number]])
        return found
