"""The results of one training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepReport:
    """The results of one step; the same on every rank."""

    loss: float
    """Mean over all tokens of the step that count, or over all pairs or examples."""
    tokens: float
    """The number of those tokens (the sum of the loss mask), pairs or examples."""
    grad_norm: float
    """Before clipping. Not finite if any gradient is not finite."""
    skipped: bool
    """True if gradients were not finite or no label counted. Parameters are then unchanged."""
    loss_scale: float
    """The loss scale that this step used."""
    signals: tuple[float, ...]
    """The sums over all ranks of the `signals` passed to train_step."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Means of the other losses and figures, by name. A loss that counts nothing in this step is missing."""
    largest_score: float | None = None
    """The largest attention score, before any clip; None if no option requests it."""

    @property
    def empty(self) -> bool:
        """True if no label of the step counts."""
        return not self.tokens
