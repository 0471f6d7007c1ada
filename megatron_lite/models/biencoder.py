"""A biencoder: two BERTs, or one for both, that embed queries and contexts. Names are those of families/biencoder.py.

    a query      -> query_model   -> final norm -> first token -> (pooler) -> (projection_enc) -> an embedding
    a context    -> context_model -> the same

`shared_model` takes the place of both. A stage has its layers of both towers. Queries are the tokens of a microbatch,
contexts are its source. The loss compares embeddings of all microbatches: megatron_lite/models/retrieval_loss.py.
"""

from collections.abc import Iterator, Mapping
from typing import NoReturn

from torch import Tensor, nn

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk
from megatron_lite.models.batch import Lengths
from megatron_lite.models.bert import Dense, Pooler, first_token
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.chunk import Stack, own_layers
from megatron_lite.models.ends import Embedding
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload, Wires

_NO_WORDS = "the model is a biencoder, which embeds texts and predicts no words"


class Tower(nn.Module):
    """One virtual stage of a tower."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__()
        self.ranks = plan.ranks
        retriever, hidden = plan.config.retriever, plan.config.hidden
        self.embedding = Embedding(plan) if chunk.is_first else None
        self.encoder = Stack(plan, own_layers(plan, chunk), ends=chunk.is_last)
        has_pooler = chunk.is_last and retriever.pooler
        has_projection = chunk.is_last and retriever.projection > 0
        self.pooler = Pooler(plan) if has_pooler else None
        self.projection_enc = Dense(hidden, retriever.projection) if has_projection else None

    def forward(self, x: Tensor | None, run: Pass) -> Tensor:
        """x: the activations of the previous stage; None on the first stage."""
        if self.embedding is not None:
            x = self.embedding(run)
        assert x is not None
        encoded: Tensor = self.encoder(x, run)
        return encoded

    def embeddings(self, hidden: Tensor) -> Tensor:
        """Return [texts, width] from the last stage's activations; the same on every tensor rank."""
        first = first_token(hidden, self.ranks) if self.pooler is None else self.pooler(hidden)
        found: Tensor = first if self.projection_enc is None else self.projection_enc(first)
        return found

    def units(self) -> Iterator[nn.Module]:
        """Yield the modules that wait for their parameters."""
        ends = self.encoder.final_layernorm, self.pooler, self.projection_enc
        for module in (self.embedding, *self.encoder.layers, *ends):
            if module is not None:
                yield module


class Biencoder(Network):
    """One virtual stage of a biencoder."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__(plan, chunk)
        shared = plan.config.has("shared_tower")
        self.query_model = None if shared else Tower(plan, chunk)
        self.context_model = None if shared else Tower(plan, chunk)
        self.shared_model = Tower(plan, chunk) if shared else None

    @property
    def towers(self) -> tuple[Tower, Tower]:
        """The tower of queries, and the tower of contexts."""
        query = self.query_model or self.shared_model
        context = self.context_model or self.shared_model
        assert query is not None
        assert context is not None
        return query, context

    @classmethod
    def loss_names(cls, config: ModelConfig) -> tuple[str, ...]:
        return ("loss",)

    def units(self) -> Iterator[nn.Module]:
        for tower in dict.fromkeys(self.towers):
            yield from tower.units()

    def takes(self, lengths: Lengths) -> Wires:
        """Return the shapes of the stage's input: activations of queries, then those of contexts."""
        return () if self.is_first else self._both(lengths)

    def gives(self, lengths: Lengths) -> Wires:
        return () if self.is_last else self._both(lengths)

    def _both(self, lengths: Lengths) -> Wires:
        queries = self.activations(lengths.rows, lengths.tokens)
        contexts = self.activations(lengths.source_rows, lengths.source)
        return queries, contexts

    def forward(self, taken: Payload, run: Pass) -> Payload:
        assert run.source is not None, "there are contexts"
        query, context = self.towers
        queries, contexts = taken or (None, None)
        return query(queries, run), context(contexts, run.source)

    def embeddings(self, given: Payload) -> tuple[Tensor, Tensor]:
        """Return embeddings of the queries and of the contexts, each [texts, width], from the last stage's output."""
        query, context = self.towers
        queries, contexts = given
        return query.embeddings(queries), context.embeddings(contexts)

    @property
    def alike(self) -> int:
        """Number of ranks that compute the same loss and sum its gradients: tp with sequence parallelism, else 1."""
        return self.plan.ranks.size if self.plan.ranks.sequence else 1

    def loss(self, given: Payload, run: Pass) -> tuple[Tensor, Mapping[str, Counted]]:
        _refuse()

    def label_losses(
        self, given: Payload, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        _refuse()

    def logits(self, given: Payload) -> Tensor:
        _refuse()


def _refuse() -> NoReturn:
    raise NotExpressible(_NO_WORDS)
