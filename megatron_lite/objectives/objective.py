"""A training objective: what a run learns, and from which data."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint.restore import Start, load
from megatron_lite.data.batches import Batch
from megatron_lite.data.datasets import Sampling, check_sources
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import OWN_LOSS, Criterion
from megatron_lite.models.purposes import refuse_scores
from megatron_lite.objectives.corpus import Corpus
from megatron_lite.objectives.examples import read_examples_of
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.probable_loss import ProbableLoss
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.options import ModelOptions


class Objective:
    """The training objective of a run. The defaults are those of a decoder that predicts the next token.

    An object has no state of a run. Methods are in the order in which a run calls them.
    """

    tokens: ClassVar[tuple[str, ...]] = ("tokens", "labels")
    """The arrays of a sample that contain tokens of the vocabulary."""
    rows: int = 1
    """Sequences of a sample."""
    perplexity: ClassVar[bool] = True
    """True if the exponential of the loss is the model's perplexity."""
    learning_rate: ClassVar[float] = 1e-5
    """Default of the command `finetune`."""
    adapter_learning_rate: ClassVar[float] = 2e-4
    """Default of `finetune` for adapters."""
    data_words: ClassVar[str] = ""
    """The data in the log line about the learning rate, such as ` on pairs`."""
    nothing_found: ClassVar[str] = "see --split"
    """The advice if there is no sample."""

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "Objective | None":
        """Return the objective if the flags select it, else None. model_type: `gpt`, `bert` or `t5`."""
        return cls()

    def prepared(
        self, start: Start | None, settings: Settings, say: Say, *, finetune: bool
    ) -> Start | None:
        """Return the start with the heads that the objective needs. None: random weights.

        Raises UsageError for a checkpoint that can't be trained on the objective.
        """
        if start is not None and start.config.has("pooler !binary_head"):
            raise UsageError(
                "the checkpoint is a model for a task, without a head for words; give --task and its files"
            )
        if start is not None:
            refuse_scores(start.config, start.path)
        return start

    def extra_ids(self, settings: Settings) -> int | None:
        """Return the number of sentinels that Megatron adds to BERT's vocabulary, besides [BOS] and [EOS].

        None: nothing is added.
        """
        return None

    def described(self, config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
        """Return the model's configuration with the tokens of the tokenizer that the objective needs in it."""
        return config

    def settled(self, settings: Settings, start: Start | None, say: Say) -> Settings:
        """Return the settings with those that follow from the checkpoint. say: receives a line for each of them."""
        return settings

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        """Read the data that is read at once; corpora are opened later. Raises UsageError, CorruptCheckpoint."""
        check_sources(settings.data)
        if settings.data.finetune_data:
            return read_examples_of(settings, tokenizer)
        for name in ("valid_finetune_data", "finetune_form", "image_encoder", "show_sample"):
            if name in settings.given:
                raise UsageError(f"--{name.replace('_', '-')} requires --finetune-data")
        return Corpus(self.sampling)

    def sampling(self, setup: Setup) -> Sampling | None:
        """Return the method that makes samples of a corpus; None: windows of tokens. Raises UsageError."""
        return None

    def options(self, options: ModelOptions, say: Say) -> ModelOptions:
        """Return the options that the objective needs. say: receives a line for each change."""
        return options

    def criterion(self, settings: Settings) -> Criterion:
        """Return the loss."""
        return ProbableLoss() if settings.data.finetune_loss == "dft" else OWN_LOSS

    def feeder(
        self, engine: Engine, start: Start | None, data: TrainingData, setup: Setup
    ) -> Feeder:
        """Return the object that makes microbatches of batches. Collective. Raises CheckpointError.

        The engine's weights are loaded later.
        """
        grid = engine.grid
        return Feeder(self.microbatch, setup.settings, grid.device, grid.dp, grid.dp_rank)

    def load(
        self,
        engine: Engine,
        start: Start,
        datasets: Sequence[Dataset | None],
        feeder: Feeder,
        setup: Setup,
    ) -> list[Dataset | None]:
        """Load the weights, and return the datasets for training, evaluation and test. Collective.

        An objective may compute something from other weights first, and add it to the datasets. Raises CheckpointError.
        """
        load(engine, start)
        return list(datasets)

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        """Convert samples' arrays [micro_batch_size, ...] to a microbatch."""
        data, mask = settings.data, batch["loss_mask"]
        packed = data.finetune_data is not None  # examples don't attend to each other
        return Microbatch(
            batch["tokens"],
            batch["labels"],
            loss_mask=None if bool(mask.all()) else mask,
            positions=batch["position_ids"] if data.reset_position_ids or packed else None,
            documents=_lengths(batch["documents"]) if data.reset_attention_mask or packed else None,
        )

    def files(self, setup: Setup, beside: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return further files that a checkpoint needs beside config.json and tokenizer, by name.

        beside: the contents of those that it has without them.
        """
        return {}

    def shown(self, figures: Mapping[str, float]) -> str:
        """Return the part of a log line with the losses and figures after the main loss."""
        return "".join(
            f" | {name.replace('_', ' ')} {value:.5f}" for name, value in figures.items()
        )


def _lengths(documents: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of each sequence's documents. documents: index of each token's document, [batch, sequence]."""
    return tuple(
        tuple(torch.unique_consecutive(row, return_counts=True)[1].tolist()) for row in documents
    )
