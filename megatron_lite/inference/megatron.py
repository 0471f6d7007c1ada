"""Generation with the rules of Megatron's text generation server: one random stream and one step for a whole batch of prompts.

The result for a prompt depends on the other prompts of the batch, unlike in batching.py. Source of the rules:
megatron/inference/text_generation (generation.py, sampling.py, beam_utils.py) of Megatron core 0.9.0.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.inference.beams import Beam, Search
from megatron_lite.inference.sampling import keep_top_k, keep_top_p
from megatron_lite.inference.slots import Feed, LanguageModel, NotFinite, require_finite, sound

NEVER = -1e10
"""The logit of a forbidden token."""


@dataclass(frozen=True)
class Words:
    """Ids of the tokens that Megatron's options name. Megatron has only GPT-2's ids."""

    eod: int
    colon: int | None = None
    after_colon: int | None = None
    """The tokenizer's newline, which an option forbids after a colon."""
    newline: int = 198
    double_newline: int = 628


@dataclass(frozen=True)
class MegatronSettings:
    """Options by the names of Megatron's requests."""

    tokens_to_generate: int = 64
    top_k: int = 0
    top_p: float = 0.0
    """0: all tokens."""
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    temperature: float = 1.0
    stop_on_eol: bool = False
    stop_on_double_eol: bool = False
    prevent_newline_after_colon: bool = False
    use_eod_token_for_early_termination: bool = True
    seed: int | None = None


@dataclass(frozen=True)
class Generated:
    """The continued prompts."""

    tokens: Tensor
    """int64 [prompts, length]: prompts and generated tokens, until the last row ended."""
    lengths: list[int]
    """Length of each row, up to and including the token that ended it."""
    log_probs: Tensor
    """float32 [prompts, length - 1], from the raw logits."""


def generate(
    model: LanguageModel, prompts: Sequence[Sequence[int]], settings: MegatronSettings, words: Words
) -> Generated:
    """Generate. Each prompt takes a slot. Raises NotFinite."""
    rows = len(prompts)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    first = int(lengths.min())
    last = int(lengths.max()) + settings.tokens_to_generate
    tokens = torch.full((rows, last), words.eod)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    scores = model.score(tokens[:, :first].tolist())
    known = [require_finite(scored).log_probs for scored in scores]
    log_probs = [torch.stack(known)]
    ends = torch.full((rows,), last)
    done = torch.zeros(rows, dtype=torch.bool)
    generator = torch.Generator()
    if settings.seed is not None:
        generator.manual_seed(settings.seed)
    else:
        generator.seed()
    top_p = settings.top_p
    place = first
    for place in range(first, last):
        start = 0 if place == first else place - 1
        logits = _extended(model, tokens, start, place)
        previous = tokens[:, place - 1]
        if settings.prevent_newline_after_colon:
            logits[previous == words.colon, words.after_colon] = NEVER
        chosen = _sample(logits, settings, top_p, generator)
        if top_p > 0 and settings.top_p_decay > 0:
            top_p = max(top_p * settings.top_p_decay, settings.top_p_bound)
        started = lengths <= place
        tokens[started, place] = chosen[started]
        taken = tokens[:, place : place + 1]
        log_probs.append(logits.log_softmax(-1).gather(1, taken))
        stops = started & _stops(chosen, previous, settings, words)
        ends[stops & ~done] = place + 1
        done |= stops
        if settings.use_eod_token_for_early_termination and bool(done.all()):
            break
    length = place + 1 if last > first else first
    kept_ends = ends.clamp(max=length).tolist()
    return Generated(tokens[:, :length], kept_ends, torch.cat(log_probs, 1))


def _extended(model: LanguageModel, tokens: Tensor, start: int, end: int) -> Tensor:
    """Feed tokens [start, end) of all rows, and return the logits after the last one. Raises NotFinite."""
    feeds = []
    for row, given in enumerate(tokens[:, start:end].tolist()):
        feeds.append(Feed(row, start, tuple(given)))
    logits = model.extend(feeds)
    if not all(sound(logits)):
        raise NotFinite
    return logits


def _sample(
    logits: Tensor, settings: MegatronSettings, top_p: float, generator: torch.Generator
) -> Tensor:
    """Return the chosen tokens, int64 [rows]."""
    if settings.top_k == 1:
        return logits.argmax(-1)
    logits = logits / settings.temperature
    if settings.top_k > 1:
        logits = keep_top_k(logits, settings.top_k)
    elif top_p > 0:
        logits = keep_top_p(logits, top_p)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def _stops(chosen: Tensor, before: Tensor, settings: MegatronSettings, words: Words) -> Tensor:
    """Return bool [rows]: True where a row ends. One end condition replaces the others."""
    if settings.stop_on_double_eol:
        return (chosen == words.double_newline) | (
            (chosen == words.newline) & (before == words.newline)
        )
    if settings.stop_on_eol:
        return (chosen == words.double_newline) | (chosen == words.newline)
    return chosen == words.eod


@dataclass(frozen=True)
class MegatronBeams:
    """Megatron's rules of beam search, for a running batch. transformers' rules in beams.py differ."""

    width: int
    stop_token: int
    length_penalty: float
    eod: int
    """Pads ended rows, and replaces the stop token."""

    def search(self, max_tokens: int, stop_ids: Collection[int]) -> Search:
        return _Search(self, max_tokens)


class _Search:
    def __init__(self, rules: MegatronBeams, max_tokens: int) -> None:
        self._rules, self._max_tokens = rules, max_tokens
        self.rows: list[tuple[int, ...]] = [()]
        self._scores = torch.zeros(1)
        self._kept: list[Beam] = []

    def take(self, logits: Tensor) -> list[int]:
        rules, count = self._rules, len(self.rows[0]) + 1
        sums = (logits.log_softmax(-1) + self._scores.unsqueeze(1)).flatten()
        best = sums.sort(descending=True)
        vocab, going = logits.shape[-1], []
        for rank in range(min(2 * rules.width, len(sums))):
            beam = int(best.indices[rank]) // vocab
            token = int(best.indices[rank]) % vocab
            score = best.values[rank]
            if token != rules.stop_token:
                going.append((beam, token, score))
            elif rank < rules.width:
                self._close(self.rows[beam], float(score), count)
            if len(going) == rules.width:
                break
        if (
            len(self._kept) == rules.width
            and self._worst() >= float(best.values[0]) / count**rules.length_penalty
        ):
            return []
        self.rows = [(*self.rows[beam], token) for beam, token, _ in going]
        self._scores = torch.stack([score for _, _, score in going])
        if count == self._max_tokens:
            for row, score in zip(self.rows, self._scores.tolist(), strict=True):
                self._close(row, score, count)
            return []
        return [beam for beam, _, _ in going]

    def found(self) -> list[Beam]:
        return sorted(self._kept, key=lambda found: -found.score)

    def _worst(self) -> float:
        return min(found.score for found in self._kept)

    def _close(self, row: tuple[int, ...], total: float, count: int) -> None:
        score = total / count**self._rules.length_penalty
        if len(self._kept) < self._rules.width or score > self._worst():
            self._kept.append(
                Beam((*row, *[self._rules.eod] * (self._max_tokens - len(row))), score)
            )
            if len(self._kept) > self._rules.width:
                self._kept.remove(min(self._kept, key=lambda found: found.score))
