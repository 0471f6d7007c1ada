"""GRPO: a model learns from rewards of its own completions of prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from megatron_lite.checkpoint.adapters import values_of_base
from megatron_lite.checkpoint.restore import Start
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.batches import Batch
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.inference.prompts import stop_ids
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.lora.attached import without_adapters
from megatron_lite.objectives.dropout import without_dropout
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.image_feeder import image_reader, with_encoder
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.policy_loss import ADVANTAGES, LARGEST_WEIGHT, Policy, PolicyLoss
from megatron_lite.objectives.prompt_images import PromptImages
from megatron_lite.objectives.prompts import PromptData, prompts_of
from megatron_lite.objectives.reference import reference_of
from megatron_lite.objectives.rewards import load_rewards
from megatron_lite.objectives.rollouts import LogProbs, Rollouts
from megatron_lite.objectives.sampler import Sampler
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.grpo import Grpo
from megatron_lite.settings.options import ModelOptions

FIGURES = ("reward", "reward_std", "frac_reward_zero_std", "completion_length", "truncated")
"""Figures of completions that a run logs: means over completions."""


class Completed(Objective):
    """A sample is a prompt. Its completions are rows, which are compared with each other."""

    tokens: ClassVar = ()
    perplexity: ClassVar = False
    learning_rate: ClassVar = 1e-6
    adapter_learning_rate: ClassVar = 1e-5
    data_words: ClassVar = " on rewards"

    def __init__(self, grpo: Grpo) -> None:
        self.grpo, self.rows = grpo, grpo.num_generations

    @classmethod
    def of(cls, settings: Settings, model_type: str) -> "Completed | None":
        return cls(settings.grpo) if settings.grpo.grpo else None

    def read(self, settings: Settings, tokenizer: Tokenizer) -> TrainingData:
        """Read the prompts and load the reward functions. Raises UsageError, CorruptCheckpoint."""
        grpo = settings.grpo
        rewards = load_rewards(grpo)
        images = image_reader(settings)
        train, valid = prompts_of(settings, tokenizer, images)
        longest = grpo.max_completion_length
        return PromptData(train, valid, rewards, longest, grpo.num_generations, images)

    def options(self, options: ModelOptions, say: Say) -> ModelOptions:
        """Return the options without the model's dropout, and with the temperature. Adapters keep their dropout."""
        steady = without_dropout(options, say, "probabilities are compared with those of sampling")
        return replace(steady, loss_temperature=self.grpo.temperature)

    def criterion(self, settings: Settings) -> Criterion:
        grpo = settings.grpo
        usual = LARGEST_WEIGHT if grpo.loss_type == "cispo" else grpo.epsilon
        policy = Policy(
            loss_type=grpo.loss_type,
            most_tokens=grpo.max_completion_length,
            epsilon=grpo.epsilon,
            epsilon_high=usual if grpo.epsilon_high is None else grpo.epsilon_high,
            delta=grpo.delta,
            of_completions=grpo.importance_sampling_level == "sequence",
            temperatures=(grpo.sapo_temperature_pos, grpo.sapo_temperature_neg),
            beta=grpo.beta,
            corrects_divergence=grpo.use_bias_correction_kl,
            figures=_figures(grpo),
        )
        return PolicyLoss(policy)

    def feeder(
        self, engine: Engine, start: Start | None, data: TrainingData, setup: Setup
    ) -> Feeder:
        """Return the object that samples completions with the engine's weights, and loads the reference model."""
        assert isinstance(data, PromptData)
        settings = setup.settings
        plain = super().feeder(engine, start, data, setup)
        images = PromptImages.of(with_encoder(plain, engine, data.reader, setup), data.prompts)
        files = {} if start is None else start.files
        sampler = Sampler(
            engine,
            setup.tokenizer,
            stop_ids(setup.config, setup.tokenizer, files),
            data.rewards,
            settings.grpo,
            settings.training.seed,
            images,
        )
        reference = _reference(engine, start, setup) if settings.grpo.beta else None
        return Rollouts(
            **vars(plain),
            prompts=data.prompts,
            sampler=sampler,
            reference=reference,
            images=images,
        )

    def microbatch(self, batch: Batch, settings: Settings) -> Microbatch:
        names = (ADVANTAGES, *_figures(settings.grpo))
        extras = {name: batch[name] for name in names}
        return Microbatch(batch["tokens"], batch["labels"], batch["loss_mask"], extras=extras)

    def shown(self, figures: Mapping[str, float]) -> str:
        reward, deviation, silent, length, truncated = (figures[name] for name in FIGURES)
        several = "".join(
            f", {name.removeprefix('reward_')} {value:.4f}"
            for name, value in figures.items()
            if name.startswith("reward_") and name not in FIGURES
        )
        # A step whose completions are all masked has no label that counts.
        clipped = f" | clipped {figures['clip_ratio']:.2%}" if "clip_ratio" in figures else ""
        divergence = f" | KL {figures['kl']:.5f}" if "kl" in figures else ""
        return (
            f" | reward {reward:.4f} +- {deviation:.4f}{several} | groups without signal {silent:.1%}"
            f" | length {length:.1f}, truncated {truncated:.1%}{clipped}{divergence}"
        )


def _figures(grpo: Grpo) -> tuple[str, ...]:
    """Return FIGURES, and the reward of each function if there are several."""
    words = grpo.reward or ()
    several = words if len(words) > 1 else ()
    return *FIGURES, *(f"reward_{word.rpartition(':')[2]}" for word in several)


def _reference(engine: Engine, start: Start | None, setup: Setup) -> LogProbs:
    """Return the log-probabilities of the reference model: the base of adapters, else a model of its own. Collective."""
    assert start is not None
    found = reference_of(start, setup)
    weights = found.weights
    if engine.options.lora is not None:
        lora = engine.options.lora
        base = values_of_base(engine, weights) if lora.whole or lora.rows else []

        def of_base(microbatches: Sequence[Microbatch]) -> list[Tensor]:
            with without_adapters(engine.chunks, base):
                return engine.label_log_probs(microbatches)

        return of_base
    reference = Engine(setup.config, engine.grid, engine.options, None)
    load_weights(reference, weights)
    return reference.label_log_probs
