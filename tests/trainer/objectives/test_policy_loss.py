"""GRPO: advantages and losses computed by hand, and reward functions that fail."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaconv.errors import CheckpointError, UsageError
from megatron_lite.objectives.policy import Completed
from megatron_lite.objectives.policy_loss import (
    ADVANTAGES,
    OLD,
    REFERENCE,
    Policy,
    PolicyLoss,
    judge_labels,
)
from megatron_lite.objectives.rewards import Reward, judge, load_rewards
from megatron_lite.objectives.rollouts import padded_rows
from megatron_lite.settings.grpo import Grpo
from megatron_lite.settings.options import ModelOptions


def test_advantages_compare_the_completions_of_a_group() -> None:
    rewards = torch.tensor([1.0, 3.0, 5.0, 5.0], dtype=torch.float64)
    group = judge(rewards, 2, "group")
    # The standard deviation of 1 and 3 is the square root of 2.
    assert group.advantages.tolist() == pytest.approx([-1 / 1.41431356, 1 / 1.41431356, 0, 0])
    assert group.silent.tolist() == [0, 0, 1, 1]
    assert judge(rewards, 2, "none").advantages.tolist() == [-1, 1, 0, 0]
    # The squares of the distances from 3.5 add up to 11.
    deviation = (11 / 3) ** 0.5 + 1e-4
    assert judge(rewards, 2, "batch").advantages[1].item() == pytest.approx(1 / deviation)


def test_rows_count_the_labels_of_completions() -> None:
    rows = padded_rows([(5, 6), (7,)], [[8, 9], [3]])
    assert rows["tokens"].shape == (2, 64)
    assert rows["tokens"][:, :4].tolist() == [[5, 6, 8, 0], [7, 0, 0, 0]]
    assert rows["labels"][:, :4].tolist() == [[6, 8, 9, 0], [3, 0, 0, 0]]
    assert rows["loss_mask"][:, :4].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]


RATIOS = torch.tensor([[1.5, 0.5], [1.5, 1.0]])
COUNTING = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
"""Row 0 has advantage 2: its first ratio is clipped to 1.2. Row 1 has advantage -1, and the ratio 1.5 stays."""
EXTRAS = {ADVANTAGES: torch.tensor([2.0, -1.0]), OLD: torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("loss_type", "loss", "weights"),
    [
        # -1.2 x 2, -0.5 x 2, 1.5; the clipped label has no gradient
        ("dapo", [[-2.4, -1.0], [1.5, 0]], [[0, 1.0], [-1.5, 0]]),
        ("grpo", [-1.7, 1.5], [[0, 0.5], [-1.5, 0]]),
        ("dr_grpo", [-0.85, 0.375], [[0, 0.25], [-0.375, 0]]),
    ],
)
def test_ratios_are_clipped_and_losses_are_means_of_their_kind(
    loss_type: str, loss: list[float], weights: list[list[float]]
) -> None:
    options = Policy(loss_type=loss_type, most_tokens=4)
    found = judge_labels(RATIOS.log(), COUNTING, EXTRAS, options)
    counted = found.loss.losses * found.loss.weights
    assert torch.allclose(counted, torch.tensor(loss), atol=1e-6)
    assert torch.allclose(found.weights, torch.tensor(weights), atol=1e-6)
    assert (found.clipped.losses * found.clipped.weights).tolist() == [[1, 0], [0, 0]]
    assert found.divergence is None


def test_one_ratio_of_a_row_is_the_mean_of_its_labels() -> None:
    """Row 0 has the ratio (1.5 x 0.5)^(1/2), which is clipped to 0.9; its advantage is 2, so that the lower value counts."""
    options = Policy(loss_type="grpo", of_completions=True, epsilon=0.1, epsilon_high=0.1)
    found = judge_labels(RATIOS.log(), COUNTING, EXTRAS, options)
    ratio = 0.75**0.5
    assert found.loss.losses.tolist() == pytest.approx([-2 * ratio, 1.5])
    assert found.weights[0].tolist() == pytest.approx([ratio, ratio])
    assert found.weights[1].tolist() == pytest.approx([-1.5, 0])
    assert found.clipped.losses.tolist() == [[0], [0]]
    assert found.clipped.weights.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("options", "loss", "weights", "clipped"),
    [
        # The weights of the cross entropy are limited ratios times advantages.
        (
            Policy("cispo", epsilon_high=1.2),
            [[-2.4 * 0.4054651, 1.0 * 0.6931472], [1.2 * 0.4054651, 0]],
            [[2.4, 1.0], [-1.2, 0]],
            [[1, 0], [0, 0]],
        ),
        # 4 s(0.5) x 2 and 4 s(-0.5) x 2; 4 / 2 s(2 x 0.5) x -1; s is the sigmoid
        (
            Policy("sapo", temperatures=(1.0, 2.0)),
            [-(8 * 0.6224593 + 8 * 0.3775407) / 2, 2 * 0.7310586],
            [[4 * 0.2350037 * 1.5, 4 * 0.2350037 * 0.5], [-4 * 0.1966119 * 1.5, 0]],
            [[0, 0], [0, 0]],
        ),
        # The ratio 1.5 of row 1, whose advantage is -1, has a limit too.
        (
            Policy("dapo", delta=1.4),
            [[-2.4, -1.0], [1.4, 0]],
            [[0, 1.0], [0, 0]],
            [[1, 0], [0, 0]],
        ),
    ],
    ids=["cispo", "sapo", "delta"],
)
def test_other_limits_of_ratios(
    options: Policy, loss: list[Any], weights: list[list[float]], clipped: list[list[float]]
) -> None:
    found = judge_labels(RATIOS.log(), COUNTING, EXTRAS, options)
    counted = found.loss.losses * found.loss.weights
    torch.testing.assert_close(counted, torch.tensor(loss))
    torch.testing.assert_close(found.weights, torch.tensor(weights))
    assert (found.clipped.losses * found.clipped.weights).tolist() == clipped


@pytest.mark.parametrize(
    ("corrects", "divergence"), [(False, 0.5 + 0.6931472 - 1), (True, 2 * (0.5 + 0.6931472 - 1))]
)
def test_the_divergence_is_that_of_the_reference_times_the_ratio(
    corrects: bool, divergence: float
) -> None:
    """The model's probability is twice the reference's, and twice that of sampling."""
    extras = {ADVANTAGES: torch.zeros(1), OLD: torch.zeros(1, 1), REFERENCE: torch.zeros(1, 1)}
    options = Policy(beta=0.5, corrects_divergence=corrects)
    found = judge_labels(torch.tensor([[2.0]]).log(), torch.ones(1, 1), extras, options)
    assert found.divergence is not None
    assert found.divergence.item() == pytest.approx(divergence)
    assert found.loss.losses.item() == pytest.approx(0.5 * divergence)


def test_the_first_update_has_ratios_of_one() -> None:
    extras = {ADVANTAGES: torch.tensor([2.0, -1.0])}
    found = judge_labels(RATIOS.log(), COUNTING, extras, Policy())
    assert found.loss.losses.tolist() == [[-2, -2], [1, 1]]
    assert found.weights.tolist() == [[2, 2], [-1, 0]]


class OneLayer:
    """A last stage that computes logits from its matrix, and counts how often."""

    def __init__(self) -> None:
        self.matrix = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
        self.computed = 0

    def label_losses(
        self, given: tuple[torch.Tensor], labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.computed += 1
        log_probs = (given[0] @ self.matrix.t()).log_softmax(-1)
        losses = -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (losses * weights).sum(), losses.detach()


@pytest.mark.parametrize(("beta", "computed"), [(0.0, 1), (0.5, 2)])
def test_the_head_is_computed_once_if_no_log_probability_has_an_effect(
    beta: float, computed: int
) -> None:
    """The gradient is the same as with ratios of 1 that are computed."""
    hidden = (torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(2)),)
    labels = torch.tensor([[1, 2], [3, 4]])
    loss = PolicyLoss(Policy(beta=beta))
    gradients = []
    for of_sampling in (True, False):
        stage: Any = OneLayer()
        extras = {ADVANTAGES: EXTRAS[ADVANTAGES], REFERENCE: torch.full((2, 2), -1.5)}
        if of_sampling:
            extras[OLD] = -stage.label_losses(hidden, labels, COUNTING)[1]
            stage.computed = 0
        run: Any = SimpleNamespace(
            labels=labels, extras=extras, share=0.25, label_weights=lambda: COUNTING
        )
        total, found = loss.loss(stage, hidden, run)
        total.backward()
        assert stage.computed == (2 if of_sampling else computed)
        assert found["loss"].losses.shape == (2, 2)
        gradients.append(stage.matrix.grad)
    assert gradients[0].abs().max() > 0.01
    torch.testing.assert_close(*gradients)


def test_the_loss_divides_logits_by_the_temperature_of_sampling() -> None:
    objective = Completed(Grpo(temperature=0.7))
    said: list[str] = []
    options = objective.options(ModelOptions("float32", hidden_dropout=0.1), said.append)
    assert (options.loss_temperature, options.hidden_dropout, len(said)) == (0.7, 0.0, 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no\\nanswer')", "raised ValueError at judged.py:2: no answer"),
        ("return None", "returned None; it has to return a list with a number for each completion"),
        ("return 0.5", "returned 0.5; it has to return a list"),
        ("return [1.0]", "returned 1 rewards for 2 completions"),
        ("return [1.0, float('nan')]", "returned nan for completion 1; a reward has to be a finite number"),
        ("return [1.0, None]", "returned None for completion 1"),
        ("return [1.0, 10**400]", "returned 1000000"),
        ("import torch; return torch.ones(2, 3)", "returned tensor([1., 1., 1.]) for completion 0; a reward has"),
        ("raise SystemExit(0)", "raised SystemExit at judged.py:2: 0"),
    ],
)  # fmt: skip
def test_a_reward_that_fails_is_named(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "judged.py").write_text(f"def good(completions, **columns):\n    {body}\n")
    (reward,) = load_rewards(Grpo(reward=(f"{tmp_path}/judged.py:good",)))
    with pytest.raises(CheckpointError) as caught:
        reward({"completions": ["a", "b"]}, 2)
    assert str(caught.value).startswith(f"--reward {tmp_path}/judged.py:good: {message}")
    assert "\n" not in str(caught.value)


def test_a_function_gets_the_arguments_that_it_takes() -> None:
    reward = Reward("f.py:f", "f", 1.0, lambda completions, answer: [len(completions), answer[0]])
    offered = {"completions": ["a", "b"], "answer": [5, 6], "prompts": ["c", "d"]}
    assert reward(offered, 2) == [2.0, 5.0]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("judged.py", "is no function of a file; give FILE.py:FUNCTION"),
        ("nothere.py:good", "there is no such file"),
        ("wrong.py:good", "can't be loaded: NameError at wrong.py:1"),
        ("ends.py:good", "can't be loaded: SystemExit at ends.py:1"),
        ("empty.py:good", "has no function good"),
    ],
)
def test_a_function_that_can_not_be_loaded_is_refused(
    word: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text("unknown\n")
    (tmp_path / "ends.py").write_text("raise SystemExit\n")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        load_rewards(Grpo(reward=(f"{tmp_path}/{word}",)))
