"""Settings of GRPO. The names and defaults are those of TRL's GRPOConfig.

They have the form of the settings in config.py.
"""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag


@dataclass(frozen=True)
class Grpo:
    """GRPO: learning from rewards of the model's own completions"""

    grpo: bool = flag(
        False,
        "--finetune-data holds prompts; the model completes them, and --reward judges the completions",
        samples=True,
    )
    reward: tuple[str, ...] | None = flag(
        None, "FILE.py:FUNCTION ...: functions of prompts and completions that return rewards"
    )
    reward_weights: tuple[float, ...] | None = flag(
        None, "weight of each --reward in the sum (default: 1)", samples=True
    )
    num_generations: int = flag(8, "completions of a prompt, which form a group", samples=True)
    max_completion_length: int = flag(512, "most tokens of a completion", samples=True)
    temperature: float = flag(
        1.0, "divisor of the logits, in sampling and in the loss", samples=True
    )
    num_iterations: int = flag(1, "updates with the completions of a step", samples=True)
    beta: float = flag(
        0.0, "weight of the divergence (KL) from the reference model, which is --load", samples=True
    )
    use_bias_correction_kl: bool = flag(
        True, "multiply the divergence of a token by its probability ratio", samples=True
    )
    epsilon: float = flag(0.2, "probability ratios are clipped to 1 - epsilon", samples=True)
    epsilon_high: float | None = flag(
        None,
        "probability ratios are clipped to 1 + this (default: --epsilon); with cispo, their limit itself (default: 5)",
        samples=True,
    )
    delta: float | None = flag(
        None,
        "limit of probability ratios also where a completion is worse than its group",
        samples=True,
    )
    importance_sampling_level: str = flag(
        "token",
        "probability ratios are those of tokens, or of completions: the mean over their tokens (GSPO)",
        choices=("token", "sequence"),
        samples=True,
    )
    loss_type: str = flag(
        "dapo",
        "mean over all tokens (dapo), over completions (grpo), or over completions of the most tokens (dr_grpo); ratios as limited "
        "weights (cispo), or a smooth limit in place of the clip (sapo)",
        choices=("dapo", "grpo", "dr_grpo", "cispo", "sapo"),
        samples=True,
    )
    sapo_temperature_pos: float = flag(
        1.0,
        "sapo: the steepness of the limit where a completion is better than its group",
        samples=True,
    )
    sapo_temperature_neg: float = flag(
        1.05, "sapo: the same where a completion is not better", samples=True
    )
    mask_truncated_completions: bool = flag(
        False,
        "completions without an end are not learned; their rewards count in their group",
        samples=True,
    )
    scale_rewards: str = flag(
        "group",
        "rewards are divided by the standard deviation of their group, of the step's batch, or not at all",
        choices=("group", "batch", "none"),
        samples=True,
    )
