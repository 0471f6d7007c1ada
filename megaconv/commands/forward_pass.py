"""`megaconv verify A [B] --forward`: the request, the result, and the search for the package that computes models.

The trainer computes them. It offers the computation by an entry point, because megaconv doesn't import the trainer:

    [project.entry-points."megaconv_commands"]
    verify_forward = "megatron_lite.commands.verify_forward:verify_forward"
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from megaconv.errors import PluginError, UsageError
from megaconv.extras import install
from megaconv.options import LoadOptions

GROUP, NAME = "megaconv_commands", "verify_forward"
"""The group has no name below `megaconv.`, in which commands look for plugins at every start."""
TOLERANCE = 1e-4
MAX_MEMORY = 4 << 30


@dataclass(frozen=True)
class ForwardRequest:
    """The models to compute, and how."""

    places: Sequence[str]
    """One checkpoint, or two to compare."""
    loaders: Sequence[str | None]
    """The loader of each; None: the loader that recognises it."""
    load: LoadOptions
    text: Path | None = None
    """A file with a text; None: built-in tokens."""
    window: int | None = None
    """Tokens of a row; None: the default for a text or for built-in tokens."""
    dtype: str = "fp32"
    """The dtype to compute in: fp32, bf16 or fp16."""
    max_memory: int = MAX_MEMORY
    """Bytes for weights and activations."""
    tolerance: float = TOLERANCE
    common_tokens: bool = False
    """True to accept models of different vocabularies, and to compare the logits of the tokens that both have."""


@dataclass
class StateDifference:
    """The difference between A and B in one state: the hidden states after a layer, or the logits."""

    name: str
    absolute: float = 0.0
    """The largest difference of two elements; infinite if an element is not finite."""
    largest: float = 0.0
    """The largest element of A, without its sign."""

    @property
    def relative(self) -> float:
        """The largest difference, divided by the largest element of A."""
        if not self.absolute:
            return 0.0
        return self.absolute / self.largest if self.largest else inf

    def to_json(self) -> dict[str, Any]:
        numbers = {"relative": self.relative, "absolute": self.absolute, "largest": self.largest}
        return {"name": self.name} | numbers


Report = Callable[[StateDifference], None]
"""Called with each state as soon as it is final."""
Forward = Callable[[ForwardRequest, Report], "ForwardPass"]


@dataclass(frozen=True)
class ForwardPass:
    """The result of a computation."""

    request: ForwardRequest
    families: Sequence[str]
    tokens: int
    """Number of tokens that were computed."""
    predicted: int
    """Number of tokens whose probabilities count in the perplexity."""
    perplexities: Sequence[float | None]
    """The perplexity of each model; None for a model that predicts no next token."""
    differences: Sequence[StateDifference] = ()
    """In the order of their computation; empty for one model."""
    vocabularies: Sequence[int] = ()
    """The number of tokens of each model."""

    @property
    def has_common_tokens(self) -> bool:
        """True if only some tokens of a model have compared logits, since the other model has fewer."""
        return len(set(self.vocabularies)) > 1

    @property
    def first(self) -> StateDifference | None:
        """The first state that differs by more than the tolerance."""
        return next(
            (each for each in self.differences if not each.relative <= self.request.tolerance), None
        )

    @property
    def same(self) -> bool:
        """True if no state differs by more than the tolerance."""
        return self.first is None

    def to_json(self) -> dict[str, Any]:
        request = self.request
        found: dict[str, Any] = {
            "paths": list(request.places),
            "families": list(self.families),
            "dtype": request.dtype,
            "tokens": self.tokens,
            "predicted": self.predicted,
            "perplexities": list(self.perplexities),
        }
        if len(request.places) == 1:
            return found
        return found | {
            "vocabularies": list(self.vocabularies),
            "compared_tokens": min(self.vocabularies),
            "same": self.same,
            "tolerance": request.tolerance,
            "first_difference": None if self.first is None else self.first.name,
            "differences": [each.to_json() for each in self.differences],
        }


def forward_pass(request: ForwardRequest, report: Report) -> ForwardPass:
    """Compute the models. Raises UsageError without the trainer or torch, and CheckpointError as opening does."""
    return _computation()(request, report)


def _computation() -> Forward:
    from importlib import metadata

    for entry in metadata.entry_points(group=GROUP, name=NAME):
        try:
            found: Forward = entry.load()
        except ImportError as error:
            raise PluginError(f"{entry.value}: can't be loaded ({error})") from error
        return found
    raise UsageError(
        f"verify --forward needs the trainer and torch, and no installed package offers them; {install('train,data')}"
    )
