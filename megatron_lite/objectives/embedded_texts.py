"""Embedding models: the vector of a query learns to be closest to that of the document that answers it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from formats.wording import counted
from megaconv.errors import UsageError
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.batches import Batch
from megatron_lite.data.datasets import check_sources
from megatron_lite.data.embedding_form import (
    DOCUMENT,
    QUERY,
    EmbeddingForm,
    end_tokens,
    form_files,
    read_form,
)
from megatron_lite.data.finetuning.queries import Queries, read_queries
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.pooling import pooled_tokens
from megatron_lite.models.purposes import refuse_embedding
from megatron_lite.objectives.contrastive_loss import (
    ACCURACY,
    DOCUMENTS,
    QUERIES,
    ContrastiveLoss,
)
from megatron_lite.objectives.dropout import without_dropout
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.query_data import QueryData
from megatron_lite.objectives.training_data import Say, Setup
from megatron_lite.settings.config import Settings
from megatron_lite.settings.embedding import LAST
from megatron_lite.settings.options import ModelOptions


@dataclass(frozen=True)
class EmbeddedTexts(Objective):
    """A query, its document and its hard negatives are rows. Their pooled hidden states are compared."""

    tokens: ClassVar = ("tokens",)
    perplexity: ClassVar = False
    adapter_learning_rate: ClassVar = 1e-4
    data_words: ClassVar = " on queries"

    rows: int = 2

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "EmbeddedTexts | None":
        asked = settings.embeddings
        return cls(rows=2 + asked.embedding_negatives) if asked.embedding else None

    def prepared(
        self, start: Start | None, settings: Settings, say: Say, *, finetune: bool
    ) -> Start | None:
        """See Objective.prepared. Raises NotExpressible for a model without embeddings."""
        if start is not None:
            refuse_embedding(start.config, start.path)
        return start

    def settled(self, settings: Settings, start: Start | None, say: Say) -> Settings:
        """Return the settings with the pooling and the prompts of the checkpoint, unless flags give them."""
        form = EmbeddingForm() if start is None else read_form(start.files)
        asked, found = settings.embeddings, _form(settings, form)
        for name, kind in (("query", QUERY), ("document", DOCUMENT)):
            if found.prompt(kind) and f"embedding_{name}_prompt" not in settings.given:
                say(f"--embedding-{name}-prompt {found.prompt(kind)!r}: that of the checkpoint")
        if asked.embedding_pooling is None:
            say(f"--embedding-pooling {found.pooling}: the tokens that make a text's vector")
        settled = replace(
            asked,
            embedding_pooling=found.pooling,
            embedding_query_prompt=found.prompt(QUERY),
            embedding_document_prompt=found.prompt(DOCUMENT),
        )
        return replace(settings, embeddings=settled)

    def read(self, settings: Settings, tokenizer: Tokenizer) -> QueryData:
        """Read the queries. Raises UsageError, CorruptCheckpoint."""
        data = settings.data
        check_sources(data)
        assert data.finetune_data is not None
        form = _form(settings)
        valid = None
        if data.valid_finetune_data:
            valid = read_queries(data.valid_finetune_data, tokenizer, form, "--valid-finetune-data")
        train = read_queries(data.finetune_data, tokenizer, form)
        _require_stated_negatives(settings, train)
        negatives = settings.embeddings.embedding_negatives
        return QueryData(train, valid, negatives, end_tokens(tokenizer))

    def options(self, options: ModelOptions, say: Say) -> ModelOptions:
        """Return the options without the model's dropout, as most embedding models are trained."""
        return without_dropout(options, say, "vectors of texts are compared")

    def criterion(self, settings: Settings) -> Criterion:
        return ContrastiveLoss(settings.embeddings.embedding_temperature)

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        """Return the texts as rows. Padding is at the end, where causal attention does not reach it."""
        length = batch["tokens"].shape[-1]
        tokens = batch["tokens"].view(-1, length)
        pooling = settings.embeddings.embedding_pooling or LAST
        chosen = pooled_tokens(batch["lengths"].flatten(), length, pooling)
        extras = {QUERIES: batch["query"], DOCUMENTS: batch["documents"]}
        return Microbatch(tokens, tokens, chosen, extras=extras)

    def files(self, setup: Setup, beside: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return sentence-transformers' files, which say how the vectors are made."""
        form, config = _form(setup.settings), setup.config
        # Texts may be longer than those of the training.
        return form_files(form, config.hidden, config.max_positions, beside)

    def shown(self, figures: Mapping[str, float]) -> str:
        return f" | accuracy {figures[ACCURACY]:.1%}"


def _form(settings: Settings, beside: EmbeddingForm | None = None) -> EmbeddingForm:
    """Return the form that the flags give, else that of the checkpoint. beside: the checkpoint's."""
    asked, known = settings.embeddings, beside or EmbeddingForm()
    prompts = dict(known.prompts)
    for name, text in (
        (QUERY, asked.embedding_query_prompt),
        (DOCUMENT, asked.embedding_document_prompt),
    ):
        if text is not None:
            prompts[name] = text
    return EmbeddingForm(asked.embedding_pooling or known.pooling, prompts)


def _require_stated_negatives(settings: Settings, train: Queries) -> None:
    """Raise UsageError if the data has hard negatives, and no flag says how many are used."""
    most = train.others.longest
    if most and "embedding_negatives" not in settings.given:
        raise UsageError(
            f"--finetune-data: its queries have up to {counted(most, 'hard negative')}; say how many are used of each query: "
            f"--embedding-negatives {most} (0: none; each takes a row of a sample)"
        )
