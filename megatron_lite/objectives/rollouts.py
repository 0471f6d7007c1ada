"""The microbatches of GRPO: prompts with completions that the model has just sampled, their advantages and figures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lite.data.batches import Batch
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.policy_loss import ADVANTAGES, OLD, REFERENCE
from megatron_lite.objectives.prompt_images import PromptImages
from megatron_lite.objectives.prompts import Prompt
from megatron_lite.objectives.rewards import judge
from megatron_lite.objectives.sampler import Completions, Sampler
from megatron_lite.parallel import comm

LENGTH_UNIT = 64
"""Rows have a multiple of this number of tokens."""
LogProbs = Callable[[Sequence[Microbatch]], list[Tensor]]
"""See RankComputation.label_log_probs."""


@dataclass(frozen=True, kw_only=True)
class CompletingFeeder(Feeder):
    """Samples completions for each batch of prompts."""

    prompts: Sequence[Prompt]
    """By number."""
    sampler: Sampler
    images: PromptImages | None = None
    """The images of the prompts; None if there are none."""

    def asked(self, batch: Batch) -> list[Prompt]:
        """Return the prompts of the global batch in its order. Collective."""
        return [self.prompts[number] for number in self._of_all_ranks(batch["number"])]

    def rows(self, asked: Sequence[Prompt], completions: Completions) -> dict[str, Tensor]:
        """Return the arrays of the global batch, [rows, ...]; the completions of a prompt follow each other."""
        generations = self.sampler.grpo.num_generations
        prompts = [prompt.ids for prompt in asked for _ in range(generations)]
        rows = padded_rows(prompts, completions.ids)
        return rows if self.images is None else self.images.added(rows, asked, generations)

    def own_rows(self, arrays: Batch, batch: Batch) -> Batch:
        """Return this rank's part of arrays [rows, ...] of the global batch, whose prompts have adjacent rows."""
        rows = batch["number"].shape[1] * self.sampler.grpo.num_generations
        return {
            name: array.view(-1, rows, *array.shape[1:])[self.dp_rank :: self.dp]
            for name, array in arrays.items()
        }

    def _of_all_ranks(self, own: Tensor) -> list[int]:
        """Return the numbers of the global batch in its order. own: [microbatches, micro_batch_size] of this rank."""
        group = self.sampler.engine.grid.group("replicas")
        whole = own if group is None else comm.gathered(own.to(self.device), group)
        # [dp, microbatches, samples] -> the order of the batch, where the ranks' microbatches alternate
        ordered = whole.view(self.dp, *own.shape).transpose(0, 1)
        numbers: list[int] = ordered.flatten().tolist()
        return numbers


@dataclass(frozen=True, kw_only=True)
class Rollouts(CompletingFeeder):
    """Uses the completions of a batch for --num-iterations updates."""

    reference: LogProbs | None
    """Log-probabilities of the reference model; None without one."""

    def updates(self, consumed: int, batch: Batch) -> Iterator[list[Microbatch]]:
        """See Feeder.updates. All updates have the same completions."""
        asked = self.asked(batch)
        completions = self.sampler.complete(asked, consumed)
        own = self.own_rows(self._arrays(asked, completions), batch)
        microbatches = self._with_log_probs(self.microbatches(own))
        for _ in range(self.sampler.grpo.num_iterations):
            yield microbatches

    def _arrays(self, asked: Sequence[Prompt], completions: Completions) -> dict[str, Tensor]:
        """Return the arrays of the global batch with what the loss compares and what is logged."""
        grpo = self.sampler.grpo
        weights = [reward.weight for reward in self.sampler.rewards]
        total = completions.rewards @ torch.tensor(weights, dtype=torch.float64)
        judged = judge(total, grpo.num_generations, grpo.scale_rewards)
        lengths = [len(ids) for ids in completions.ids]
        stopped = [ids[-1] in self.sampler.stop_ids for ids in completions.ids]
        figures = {
            ADVANTAGES: judged.advantages,
            "reward": total,
            "reward_std": total.std().expand_as(total),
            "frac_reward_zero_std": judged.silent,
            "completion_length": torch.tensor(lengths),
            "truncated": ~torch.tensor(stopped),
        }
        for column, reward in enumerate(self.sampler.rewards):
            figures[f"reward_{reward.name}"] = completions.rewards[:, column]
        floats = {name: values.float() for name, values in figures.items()}
        rows = self.rows(asked, completions)
        if grpo.mask_truncated_completions:
            rows["loss_mask"] = rows["loss_mask"] * torch.tensor(stopped).unsqueeze(1)
        return {**rows, **floats}

    def completed(self, made: Microbatch, arrays: Batch) -> Microbatch:
        return made if self.images is None else self.images.feeder.completed(made, arrays)

    def _with_log_probs(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """Return the microbatches with the log-probabilities that the loss compares. Collective."""
        found: dict[str, list[Tensor]] = {}
        if self.sampler.grpo.num_iterations > 1:
            found[OLD] = self.sampler.engine.label_log_probs(microbatches)
        if self.reference is not None:
            found[REFERENCE] = self.reference(microbatches)
        made = []
        for number, batch in enumerate(microbatches):
            # Only the last stage has log-probabilities.
            further = {name: values[number] for name, values in found.items() if values}
            made.append(replace(batch, extras={**batch.extras, **further}))
        return made


def padded_rows(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Return `tokens`, `labels` and `loss_mask`, [rows, sequence]. The labels of completions count.

    Padding is at the end, where causal attention does not reach it.
    """
    longest = max(
        len(prompt) + len(completion) - 1
        for prompt, completion in zip(prompts, completions, strict=True)
    )
    shape = len(prompts), -(-longest // LENGTH_UNIT) * LENGTH_UNIT
    tokens = torch.zeros(shape, dtype=torch.int64)
    labels = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([*prompt, *completion])
        # Each token but the last one predicts the next.
        end = len(ids) - 1
        tokens[row, :end] = ids[:-1]
        labels[row, :end] = ids[1:]
        loss_mask[row, len(prompt) - 1 : end] = 1
    return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
