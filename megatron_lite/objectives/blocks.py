"""The inverse cloze task (ICT): a biencoder learns to find the block that a sentence was taken from."""

from typing import ClassVar

from formats.wording import counted
from megaconv.errors import UsageError
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.batches import Batch
from megatron_lite.data.blocks.dataset import BlockSampling
from megatron_lite.data.blocks.special import special_tokens
from megatron_lite.data.corpora import SPLITS, parse_corpora
from megatron_lite.data.datasets import Sampling, check_sources
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.retrieval_loss import RetrievalLoss, texts_of
from megatron_lite.objectives.corpus import Corpus, cache_path
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.towers import with_towers
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import Data


class Blocks(Objective):
    """Sentences and the blocks that they come from."""

    tokens: ClassVar = ("query", "context")
    perplexity: ClassVar = False
    nothing_found: ClassVar = (
        "documents of two sentences or more are needed (with --use-one-sent-docs: of one), none of them longer than 512 tokens: "
        "preprocess --json-keys text title --split-sentences"
    )

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "Blocks | None":
        return cls() if model_type == "biencoder" else None

    def prepared(
        self, start: Start | None, settings: Settings, say: Say, *, finetune: bool
    ) -> Start | None:
        return prepared_towers(start, settings, say)

    def extra_ids(self, settings: Settings) -> int | None:
        return 0

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        check_sources(settings.data)
        return Corpus(self.sampling, titles_by_corpus(settings))

    def sampling(self, setup: Setup) -> Sampling | None:
        settings = setup.settings
        asked = settings.retrieval
        return BlockSampling(
            titles_by_corpus(settings),
            setup.sizes.seq,
            special_tokens(setup.tokenizer),
            asked.query_in_block_prob,
            1 if asked.use_one_sent_docs else 2,
            settings.training.seed,
            setup.say,
            cache_path(settings),
        )

    def criterion(self, settings: Settings) -> Criterion:
        asked = settings.retrieval
        return RetrievalLoss(
            asked.retriever_score_scaling,
            asked.retriever_report_topk_accuracies or (),
            asked.retriever_negatives,
        )

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        return texts_of(batch["query"], batch["context"])


def prepared_towers(start: Start | None, settings: Settings, say: Say) -> Start | None:
    """Return the start of a biencoder; a BERT becomes its towers. Raises UsageError for any other checkpoint."""
    if start is None or start.config.family == "biencoder":
        return start
    return with_towers(start, settings.model, settings.training.seed, say)


def titles_by_corpus(settings: Settings) -> dict[str, str]:
    """Return the prefix of the titles of each corpus. Raises UsageError if there aren't as many as corpora."""
    titles = settings.retrieval.titles_data_path or ()
    corpora = _corpora(settings.data)
    if len(titles) != len(corpora):
        raise UsageError(
            f"--titles-data-path has {counted(len(titles), 'data set')} for {counted(len(corpora), 'data set')} of sentences; "
            "give the titles of each, in the same order (preprocess --json-keys text title makes them)"
        )
    return dict(zip(corpora, titles, strict=True))


def _corpora(data: Data) -> list[str]:
    """Return the prefixes of all corpora of sentences, in the order of the flags."""
    flags = {"--data-path": data.data_path}
    flags |= {f"--{name}-data-path": getattr(data, f"{name}_data_path") for name in SPLITS}
    found: list[str] = []
    for flag, words in flags.items():
        if words:
            found += parse_corpora(words, flag).prefixes
    return found
