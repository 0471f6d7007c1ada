"""DPO: learning from pairs of answers, one chosen and one rejected."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.batches import Batch
from megatron_lite.data.datasets import check_sources
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.objectives.compared import Compared
from megatron_lite.objectives.examples import read_examples_of
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_feeder import image_reader, with_encoder
from megatron_lite.objectives.pair_loss import FIGURES, REFERENCE, PairLoss, Preference
from megatron_lite.objectives.reference import with_reference
from megatron_lite.objectives.training_data import Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import WITHOUT_REFERENCE


class Pairs(Compared):
    """The two answers of a pair are two rows. Their log-probabilities are compared with a reference model's."""

    rows = 2
    data_words: ClassVar = " on pairs"

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "Pairs | None":
        return cls() if settings.dpo.dpo else None

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        check_sources(settings.data)
        return read_examples_of(settings, tokenizer, pairs=True, images=image_reader(settings))

    def criterion(self, settings: Settings) -> Criterion:
        dpo = settings.dpo
        smoothing, gamma = dpo.dpo_label_smoothing, dpo.simpo_gamma
        return PairLoss(Preference(dpo.dpo_beta, dpo.dpo_loss, smoothing, gamma))

    def feeder(
        self, engine: Engine, start: Start | None, data: TrainingData, setup: Setup
    ) -> Feeder:
        """See Objective.feeder. Questions may have images."""
        return with_encoder(super().feeder(engine, start, data, setup), engine, data.reader, setup)

    def load(
        self,
        engine: Engine,
        start: Start,
        datasets: Sequence[Dataset | None],
        feeder: Feeder,
        setup: Setup,
    ) -> list[Dataset | None]:
        """See Objective.load. The reference's log-probabilities of the answers become part of the datasets."""
        if setup.settings.dpo.dpo_loss in WITHOUT_REFERENCE:
            return super().load(engine, start, datasets, feeder, setup)
        return with_reference(engine, start, datasets, feeder, setup)

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        """Return the pairs as consecutive rows. Padding is at the end, where causal attention does not reach it."""
        length, reference = batch["tokens"].shape[-1], batch["reference"]
        tokens, labels, counting = (
            batch[name].view(-1, length) for name in ("tokens", "labels", "loss_mask")
        )
        # The reference's own pass comes first, and has no reference.
        extras = {REFERENCE: reference.flatten()} if reference.numel() else {}
        return Microbatch(tokens, labels, counting, extras=extras)

    def shown(self, figures: Mapping[str, float]) -> str:
        chosen, rejected, margin, accuracy = (figures[name] for name in FIGURES)
        return f" | rewards {chosen:.4f} chosen, {rejected:.4f} rejected, margin {margin:.4f}, accuracy {accuracy:.1%}"
