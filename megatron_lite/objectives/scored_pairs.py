"""Reward modeling: a head of scores learns from pairs of answers, one chosen and one rejected."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megatron_lite.checkpoint.adapter_runs import reads_adapters
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.batches import Batch
from megatron_lite.data.datasets import check_sources
from megatron_lite.data.finetuning.pieces import scored_pairs_for, without_end
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.objectives.dropout import without_dropout
from megatron_lite.objectives.examples import read_examples_of
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_feeder import image_reader, with_encoder
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.score_head import with_score_head
from megatron_lite.objectives.score_loss import FIGURES, MARGIN, ScoreLoss
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.options import ModelOptions


class ScoredPairs(Objective):
    """The two answers of a pair are two rows. The scores of their last tokens are compared."""

    rows = 2
    perplexity: ClassVar = False
    data_words: ClassVar = " on pairs"

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "ScoredPairs | None":
        return cls() if settings.rewards.reward_modeling else None

    def prepared(
        self, start: Start | None, settings: Settings, say: Say, *, finetune: bool
    ) -> Start | None:
        """Return the start with a head for one score. Raises UsageError, NotExpressible."""
        if start is None:
            return None
        if reads_adapters(settings):
            # The head of the adapters' files replaces a new one.
            say = _nothing
        return with_score_head(start, _std(start.config, settings), settings.training.seed, say)

    def described(self, config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
        """Return the configuration with the token of padding, by which transformers finds the last token of a text."""
        return changed(config, {"pad_token_id": _padding(tokenizer)})

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        """Read the pairs, without tokens of padding at their ends: transformers takes the score of the token before."""
        check_sources(settings.data)
        images = image_reader(settings)
        data = read_examples_of(settings, tokenizer, pairs=True, margins=True, images=images)
        padding = _padding(tokenizer)
        valid = None if data.valid is None else without_end(data.valid, padding)
        train = without_end(data.train, padding)
        return replace(
            data, train=train, valid=valid, fit=partial(scored_pairs_for, padding=padding)
        )

    def options(self, options: ModelOptions, say: Say) -> ModelOptions:
        """Return the options without the model's dropout, as TRL trains."""
        return without_dropout(options, say, "scores of two answers are compared")

    def criterion(self, settings: Settings) -> Criterion:
        return ScoreLoss(settings.rewards.center_rewards_coefficient)

    def feeder(
        self, engine: Engine, start: Start | None, data: TrainingData, setup: Setup
    ) -> Feeder:
        """See Objective.feeder. Questions may have images."""
        return with_encoder(super().feeder(engine, start, data, setup), engine, data.reader, setup)

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        """Return the pairs as consecutive rows. Padding is at the end, where causal attention does not reach it."""
        length = batch["tokens"].shape[-1]
        tokens, labels = (batch[name].view(-1, length) for name in ("tokens", "labels"))
        # Tokens of a sample end before its last label, which is the token with the score.
        whole = torch.cat((tokens[:, :1], labels[:, :-1]), 1)
        last = torch.arange(length) == batch["lengths"].view(-1, 1) - 1
        margin = batch["margin"].flatten()
        extras = {MARGIN: margin.float()} if margin.numel() else {}
        return Microbatch(whole, whole, last.float(), extras=extras)

    def shown(self, figures: Mapping[str, float]) -> str:
        chosen, rejected, margin, accuracy = (figures[name] for name in FIGURES)
        return f" | scores {chosen:.4f} chosen, {rejected:.4f} rejected, margin {margin:.4f}, accuracy {accuracy:.1%}"


def _nothing(line: str) -> None:
    """Say nothing."""


def _padding(tokenizer: Tokenizer) -> int | None:
    """Return the token of padding as TRL chooses it: the tokenizer's own, else its end of text."""
    return tokenizer.eod if tokenizer.pad is None else tokenizer.pad


def _std(config: ModelConfig, settings: Settings) -> float:
    """Return the standard deviation of a new head: --init-method-std, else transformers' for the model."""
    given = (config.hf or {}).get("initializer_range")
    if "init_method_std" in settings.given or not isinstance(given, float):
        return settings.model.init_method_std
    return given
