"""Computes one model, or two side by side: the differences of their hidden states and logits, and their perplexities."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import exp, inf, isfinite, isnan

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.commands.forward_pass import Report, StateDifference
from megaconv.errors import ModelsDiffer
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megatron_lite.engine import Engine
from megatron_lite.forward.walk import State, walk
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.bert import Bert
from megatron_lite.models.biencoder import Biencoder

LOGITS = "logits"
_VOCAB = "vocab"
_COMPARED = ("layer_count", "hidden", _VOCAB, "encoder.layers", "norm.final")
"""Fields without which states have no counterparts."""


@dataclass
class Losses:
    """The losses of a model's next tokens."""

    total: float = 0.0
    count: int = 0

    def add(self, logits: Tensor, labels: Tensor, counts: Tensor) -> None:
        """Add the losses of labels [batch, tokens]. logits [batch, tokens, vocabulary]; counts: bool, the labels that count."""
        if not counts.any():
            return
        losses = F.cross_entropy(logits[counts].double(), labels[counts], reduction="sum")
        self.total += float(losses)
        self.count += int(counts.sum())

    @property
    def perplexity(self) -> float | None:
        """The exponential of the mean loss; None for a model that predicts no next token."""
        if not self.count:
            return None
        mean = self.total / self.count
        if isnan(mean):
            return mean
        # A float can't hold exp(710).
        return exp(mean) if mean < 700 else inf


@dataclass
class Computed:
    """The result of a computation."""

    differences: dict[str, StateDifference] = field(default_factory=dict)
    """By the names of states, in the order of their computation; empty for one model."""
    losses: list[Losses] = field(default_factory=list)
    """The losses of each model."""


def require_comparable(
    a: tuple[str, ModelConfig], b: tuple[str, ModelConfig], *, common_tokens: bool
) -> None:
    """Raise ModelsDiffer if the hidden states of two models can't be compared.

    a, b: (place, description). common_tokens: True if one of them may have more tokens.
    """
    for name in _COMPARED:
        ours, theirs = value_of(a[1], name), value_of(b[1], name)
        if ours == theirs or (name == _VOCAB and common_tokens):
            continue
        remedy = "; --common-tokens compares the tokens that both have" if name == _VOCAB else ""
        raise ModelsDiffer(
            f"{a[0]} has {name} {ours}, {b[0]} has {theirs}; expected one model{remedy}"
        )
    kinds = [_kind(config) for _, config in (a, b)]
    if kinds[0] != kinds[1]:
        raise ModelsDiffer(f"{a[0]} is {kinds[0]}, {b[0]} is {kinds[1]}; expected one model")


def _kind(config: ModelConfig) -> str:
    """Return the kind of network, which determines its inputs and its states."""
    if config.family == "biencoder":
        separate = config.has("separate_towers")
        return "a biencoder with two towers" if separate else "a biencoder with one tower"
    if config.encoder.layers:
        return "an encoder with a decoder"
    return "an encoder" if config.has("both_ways") else "a decoder"


def compute(
    engines: Sequence[Engine],
    passes: Sequence[Microbatch],
    logits_at_once: int,
    report: Report = lambda difference: None,
    compared_tokens: int | None = None,
) -> Computed:
    """Compute one or two models.

    logits_at_once: number of tokens whose logits exist at a time. compared_tokens: the first tokens of the vocabulary, whose
    logits are compared; None: all.
    report: called with the difference of each state as soon as the last pass has computed it.
    """
    computed = Computed(losses=[Losses() for _ in engines])
    with torch.inference_mode():
        for number, batch in enumerate(passes):
            is_last = number == len(passes) - 1
            done = report if is_last else _ignore
            hidden = _walk_together(engines, batch, computed, done)
            if _has_logits(engines[0]):
                _compare_logits(engines, batch, hidden, logits_at_once, computed, compared_tokens)
                if len(engines) > 1:
                    done(computed.differences[LOGITS])
    return computed


def _ignore(_difference: StateDifference) -> None:
    """Report nothing: further passes follow."""


def _walk_together(
    engines: Sequence[Engine],
    batch: Microbatch,
    computed: Computed,
    done: Report,
) -> list[Tensor]:
    """Compute all layers of all models side by side, and return the last hidden states of each."""
    walks = [walk(engine.chunks[0], engine.make_pass(batch)) for engine in engines]
    hidden: list[Tensor] = []
    for states in zip_longest(*walks):
        step = _one_step(states)
        hidden = [state.hidden for state in step]
        if len(step) > 1:
            _compare(step[0].name, hidden, computed, done)
    return hidden


def _one_step(states: Iterable[State | None]) -> list[State]:
    """Return the states of one step, one of each model. Raises ModelsDiffer unless they have one name and one shape."""
    found: list[State] = []
    shown: list[str] = []
    for state in states:
        if state is None:
            shown.append("nothing")
        else:
            found.append(state)
            shown.append(f"{state.name} of shape {list(state.hidden.shape)}")
    if len(set(shown)) > 1:
        raise ModelsDiffer(
            f"the models' states don't correspond: {' and '.join(shown)}; expected one model"
        )
    return found


def _compare(name: str, pair: Sequence[Tensor], computed: Computed, done: Report) -> None:
    difference = computed.differences.setdefault(name, StateDifference(name))
    _take(difference, *pair)
    done(difference)


def _take(difference: StateDifference, a: Tensor, b: Tensor) -> None:
    """Take further elements into account. a, b: of one shape."""
    far = float((a.float() - b.float()).abs().max())
    difference.absolute = max(difference.absolute, far if isfinite(far) else inf)
    difference.largest = max(difference.largest, float(a.float().abs().max()))


def _has_logits(engine: Engine) -> bool:
    network = engine.chunks[0]
    if isinstance(network, Bert):
        return network.output_layer is not None
    return not isinstance(network, Biencoder)


def _compare_logits(
    engines: Sequence[Engine],
    batch: Microbatch,
    hidden: Sequence[Tensor],
    logits_at_once: int,
    computed: Computed,
    compared_tokens: int | None,
) -> None:
    assert batch.loss_mask is not None
    predicts = batch.visible is None  # a model that sees later tokens doesn't predict them
    for part in _parts(batch.tokens.shape, logits_at_once):
        made = [
            engine.chunks[0].logits((states[part],))
            for engine, states in zip(engines, hidden, strict=True)
        ]
        if len(made) > 1:
            compared = [logits[..., :compared_tokens] for logits in made]
            _compare(LOGITS, compared, computed, _ignore)
        for losses, logits in zip(computed.losses, made, strict=True):
            if predicts:
                losses.add(logits, batch.labels[:, part], batch.loss_mask[:, part])


def _parts(shape: Iterable[int], most: int) -> Iterator[slice]:
    """Yield parts of the sequence with at most `most` tokens of all rows, and at least one of each. shape: [rows, tokens]."""
    rows, tokens = shape
    step = max(1, most // rows)
    for first in range(0, tokens, step):
        yield slice(first, first + step)
