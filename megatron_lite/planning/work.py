"""The work of a step beside the passes of pretraining: pairs of answers, completions, a reference model."""

from dataclasses import dataclass

from megatron_lite.settings.config import Settings
from megatron_lite.settings.learning import WITH_REFERENCE


@dataclass(frozen=True)
class Work:
    """The work of one step of an objective."""

    rows: int = 1
    """Sequences of a sample: 2 for a pair of answers, the completions of a prompt."""
    rests_mtp: bool = False
    """True if MTP layers keep their values and are not computed, without gradients and optimizer state."""
    rests_head: bool = False
    """True if a head that isn't tied keeps its values, and no head is computed."""
    head_again: bool = False
    """True if each pass computes the head once more before, without gradients."""
    losses: int = 0
    """Losses and figures that a step reports; 0: those of the model's own head."""
    taught_sums: int = 0
    """Sums over the vocabulary that the divergence from a teacher needs for each token, with the label's logit."""
    updates: int = 1
    """Updates of a step, each with its passes."""
    measured: int = 0
    """Passes without gradients of all sequences of a step: of the reference model, and of the model before its updates."""
    measured_once: int = 0
    """Passes of a reference model over all sequences of the run, before the first step."""
    reference: bool = False
    """True if the reference model is a second copy of the weights in memory."""
    keeps_base: bool = False
    """True if the base's values of embedding and head stay in memory for the reference, as far as adapters have others."""
    completion: int = 0
    """Tokens of a completion that the model generates in each step; 0: none."""


DPO_LOSSES = 5
"""The loss, the rewards of chosen and rejected answers, their margin and the accuracy."""

KTO_LOSSES = 4
"""The loss, the rewards of good and bad answers and the divergence from the reference."""

EMBEDDING_LOSSES = 2
"""The loss and the accuracy."""

DFT_LOSSES = 2
"""The cross entropy and the loss."""

TEACHER_LOSSES = 3
"""The loss, the cross entropy of the labels and the divergence from the teacher."""


def taught_sums(beta: float) -> int:
    """Return Work.taught_sums of a divergence (models/divergence.py): a mixture of both predictions needs two sums of its own."""
    return 1 + (1 if beta in (0, 1) else 2)


def work_of(settings: Settings) -> Work:
    """Return the work of a run's objective."""
    if settings.dpo.dpo:
        has_reference = settings.dpo.dpo_loss in WITH_REFERENCE
        return Work(
            rows=2,
            rests_mtp=True,
            head_again=True,
            losses=DPO_LOSSES,
            measured_once=int(has_reference),
        )
    if settings.kto.kto:
        # Each answer is measured with the answer to another question, by the reference and before each step.
        return Work(rests_mtp=True, head_again=True, losses=KTO_LOSSES, measured=1, measured_once=2)
    if settings.grpo.grpo:
        return _of_completions(settings)
    if settings.distilling.teacher_load is not None:
        on_policy = settings.distilling.distill_on_policy
        completion = settings.grpo.max_completion_length if on_policy else 0
        return Work(
            rests_mtp=True,
            losses=TEACHER_LOSSES,
            taught_sums=taught_sums(settings.distilling.distill_beta),
            completion=completion,
        )
    if settings.rewards.reward_modeling:
        return Work(rows=2, rests_mtp=True)
    if settings.embeddings.embedding:
        # A pass without gradients computes the vectors of all texts first (models/retrieval_loss.py).
        return Work(
            rows=2 + settings.embeddings.embedding_negatives,
            rests_mtp=True,
            rests_head=True,
            losses=EMBEDDING_LOSSES,
            measured=1,
        )
    if settings.data.finetune_loss == "dft":
        return Work(rests_mtp=True, head_again=True, losses=DFT_LOSSES)
    return Work()


def _of_completions(settings: Settings) -> Work:
    grpo = settings.grpo
    has_reference, updates = grpo.beta > 0, grpo.num_iterations
    functions = len(grpo.reward or ())
    # The loss, the clipped share, five figures of completions (objectives/policy.py), and more if there is more to report.
    losses = 7 + has_reference + (functions if functions > 1 else 0)
    return Work(
        rows=grpo.num_generations,
        rests_mtp=True,
        head_again=has_reference or updates > 1 or grpo.loss_type == "cispo",
        losses=losses,
        updates=updates,
        measured=has_reference + (updates > 1),
        reference=has_reference and not settings.lora.wanted,
        keeps_base=has_reference and settings.lora.wanted,
        completion=grpo.max_completion_length,
    )
