"""Beam search as transformers has it: scores, what counts as ended, and when to stop are those of its `generate`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.inference.slots import Feed, LanguageModel

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beam:
    """A row, and the sum of the log-probabilities of its generated tokens, once ended divided by their number ** penalty."""

    tokens: tuple[int, ...]
    """Generated ones."""
    score: float


@dataclass(frozen=True)
class BeamSettings:
    width: int
    max_tokens: int
    stop_ids: Collection[int] = ()
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    """True: end with the first `width` rows that ended; False: when none can become better at its present length; `never`: at any."""


def beam_search(model: LanguageModel, prompt: Sequence[int], settings: BeamSettings) -> list[Beam]:
    """`width` ended rows, best first. Takes the first `width` slots of model.copied. Raises UsageError where there are fewer."""
    width, slots = settings.width, model.copied[: settings.width]
    if not 0 < width == len(slots):
        raise UsageError(f"{width} beams need as many slots, and the model has {len(model.copied)} for one prompt")
    rows: list[tuple[int, ...]] = [()]
    scores = torch.zeros(1)
    ended: list[Beam] = []
    logits = model.extend([Feed(slots[0], 0, tuple(prompt))])
    for count in range(1, settings.max_tokens + 1):
        best, beams, tokens = _candidates(logits, scores, settings)
        stops = [count == settings.max_tokens or token in settings.stop_ids for token in tokens]
        for score, beam, token, stop in list(zip(best.tolist(), beams, tokens, stops, strict=True))[:width]:
            if stop:
                ended.append(Beam((*rows[beam], token), score / count**settings.length_penalty))
        ended = sorted(ended, key=lambda beam: -beam.score)[:width]
        going = [number for number, stop in enumerate(stops) if not stop][:width]
        if not going or not _can_improve(float(best[going[0]]), count, ended, settings):
            break
        rows = [(*rows[beams[number]], tokens[number]) for number in going]
        scores = best[going]
        model.copy([slots[beams[number]] for number in going], slots[: len(going)])
        place = len(prompt) + count - 1
        logits = model.extend([Feed(slot, place, row[-1:]) for slot, row in zip(slots, rows, strict=False)])
    return ended


def _candidates(logits: Tensor, scores: Tensor, settings: BeamSettings) -> tuple[Tensor, list[int], list[int]]:
    """(scores, rows, tokens) of the best continuations: so many that `width` of them don't end."""
    sums = (logits.log_softmax(-1) + scores.unsqueeze(1)).flatten()
    wanted = max(2, 1 + len(settings.stop_ids)) * settings.width
    best = sums.topk(min(wanted, len(sums)))
    vocab = logits.shape[-1]
    return best.values, (best.indices // vocab).tolist(), (best.indices % vocab).tolist()


def _can_improve(best: float, count: int, ended: Sequence[Beam], settings: BeamSettings) -> bool:
    """Whether the best open row may still push one out. best: its score."""
    if len(ended) < settings.width:
        return True
    if settings.early_stopping is True:
        return False
    longest = settings.early_stopping == "never" and settings.length_penalty > 0
    length = settings.max_tokens if longest else count
    return bool(best / length**settings.length_penalty > ended[-1].score)
