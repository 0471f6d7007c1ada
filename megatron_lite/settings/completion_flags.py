"""The checks of flags of runs whose model completes prompts: what generation allows, and GRPO's numbers. They need no torch."""

from megatron_lite.settings.config import Settings, flags
from megatron_lite.settings.contradictions import Judged, flag_name
from megatron_lite.settings.grpo import Grpo

NOT_OF_PROMPTS = (
    "finetune_form",
    "finetune_turns",
    "show_sample",
    "split",
)
"""Settings of examples that prompts don't have."""
OF_COMPLETIONS = ("max_completion_length", "temperature")
"""Settings of GRPO that hold for all completions."""
BATCHES_THAT_CHANGE = ("rampup_batch_size", "step_batch_size_schedule")
NOT_GENERATED = (
    "context_parallel_size",
    "sequence_parallel",
    "fp8_format",
    "moe_pad_expert_input_to_capacity",
)
"""Settings with which the engine can't generate one token at a time."""


def judge_prompts(settings: Settings, flag: str) -> Judged:
    """Checks of an objective whose samples are prompts. flag: selects it."""
    for name in NOT_OF_PROMPTS:
        yield (
            name in settings.given,
            f"{flag} reads prompts, not examples; leave {flag_name(name)} out",
        )
    for name in BATCHES_THAT_CHANGE:
        yield (
            name in settings.given,
            f"{flag} has the same number of prompts in each step; leave {flag_name(name)} out",
        )
    for name in NOT_GENERATED:
        subject, item = flags()[name]
        differs = getattr(getattr(settings, subject), name) != item.default
        yield (
            differs,
            f"{flag} generates one token at a time, not with {flag_name(name)}; leave it out",
        )
    parallel = settings.parallel
    parts = parallel.expert_tensor_parallel_size or 1
    shares_experts = parallel.expert_model_parallel_size * parts > 1
    yield (
        shares_experts and parallel.moe_token_dispatcher_type == "allgather",
        f"--moe-token-dispatcher-type allgather needs equal ranks, but completions of {flag} differ in length; take alltoall",
    )
    for name in OF_COMPLETIONS:
        value = getattr(settings.grpo, name)
        yield (
            not 0 < value < float("inf"),
            f"{flag_name(name)} {value:g} must be more than 0",
        )


def judge_numbers(grpo: Grpo) -> Judged:
    """Checks of GRPO's numbers."""
    yield (
        grpo.num_generations < 2,
        f"--num-generations {grpo.num_generations} must be 2 or more: completions are compared in their group",
    )
    yield grpo.num_iterations < 1, f"--num-iterations {grpo.num_iterations} must be 1 or more"
    yield not grpo.beta >= 0, f"--beta {grpo.beta:g} must be 0 or more"
    yield not 0 <= grpo.epsilon < 1, f"--epsilon {grpo.epsilon:g} has to lie between 0 and 1"
    high = grpo.epsilon_high
    yield high is not None and not high >= 0, f"--epsilon-high {high} must be 0 or more"
    yield (
        grpo.loss_type == "cispo" and high == 0,
        "--epsilon-high 0: is the limit of the weights of --loss-type cispo; give more than 0, such as 5",
    )
    yield from _limits(grpo)


OF_CLIPPED = {
    "delta": ("cispo", "sapo"),
    "epsilon": ("cispo", "sapo"),
    "epsilon_high": ("sapo",),
}
"""Limits of GRPO's ratios -> the losses that don't have them."""


def limits_without_effect(settings: Settings) -> list[str]:
    """Return the given flags that limit ratios, if all ratios are 1: a run with one update of the same completions."""
    grpo = settings.grpo
    if not grpo.grpo or grpo.num_iterations > 1:
        return []
    limits = set(OF_CLIPPED)
    if grpo.loss_type == "cispo" and (grpo.epsilon_high or 1) < 1:
        limits.remove("epsilon_high")  # a weight below 1 counts for a ratio of 1 too
    return [flag_name(name) for name in sorted(limits & set(settings.given))]


def _limits(grpo: Grpo) -> Judged:
    """Checks of the limits that only some losses have."""
    delta, kind = grpo.delta, grpo.loss_type
    usual = Grpo()
    high = grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high
    yield (
        delta is not None and not delta > 1 + high,
        f"--delta {delta} must be more than {1 + high:g}, the limit of better completions",
    )
    for name, others in OF_CLIPPED.items():
        yield (
            getattr(grpo, name) != getattr(usual, name) and kind in others,
            f"{flag_name(name)} limits ratios that are clipped; leave it out with --loss-type {kind}",
        )
    for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
        value = getattr(grpo, name)
        yield not 0 < value < float("inf"), f"{flag_name(name)} {value:g} must be more than 0"
        yield (
            value != getattr(usual, name) and kind != "sapo",
            f"{flag_name(name)} is a number of --loss-type sapo; leave it out with --loss-type {kind}",
        )
