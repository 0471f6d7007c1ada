"""Generation as Megatron's own text generation server has it: one random stream and one step for a whole batch of prompts.

What a prompt gets depends on the prompts beside it; everything else here generates otherwise (batching.py). Source of the meaning:
megatron/inference/text_generation (generation.py, sampling.py, beam_utils.py) of Megatron core 0.9.0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.inference.sampling import keep_top_k, keep_top_p
from megatron_lite.inference.slots import Feed, LanguageModel

NEVER = -1e10
"""The logit of a token that must not come."""


@dataclass(frozen=True)
class Words:
    """Ids of the tokens that Megatron's options speak of; it knows GPT-2's alone."""

    eod: int
    colon: int | None = None
    after_colon: int | None = None
    """The tokenizer's newline, which can be prevented behind a colon."""
    newline: int = 198
    double_newline: int = 628


@dataclass(frozen=True)
class MegatronSettings:
    """By the names of its requests."""

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
    tokens: Tensor
    """int64 [prompts, length]: prompts, and what came behind them until the last of them ended."""
    lengths: list[int]
    """Up to the token that ended a row, included."""
    log_probs: Tensor
    """float32 [prompts, length - 1], of the raw logits."""


def generate(
    model: LanguageModel, prompts: Sequence[Sequence[int]], settings: MegatronSettings, words: Words
) -> Generated:
    """Takes a slot for each prompt."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    first, last = int(lengths.min()), int(lengths.max()) + settings.tokens_to_generate
    tokens = torch.full((len(prompts), last), words.eod)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    known = [found.log_probs for found in model.score(tokens[:, :first].tolist())]
    log_probs = [torch.stack(known)]
    ends = torch.full((len(prompts),), last)
    done = torch.zeros(len(prompts), dtype=torch.bool)
    generator = torch.Generator()
    if settings.seed is not None:
        generator.manual_seed(settings.seed)
    else:
        generator.seed()
    top_p, place = settings.top_p, first
    for place in range(first, last):
        start = 0 if place == first else place - 1
        logits = model.extend(
            [Feed(row, start, tuple(tokens[row, start:place].tolist())) for row in range(len(tokens))]
        )
        if settings.prevent_newline_after_colon:
            logits[tokens[:, place - 1] == words.colon, words.after_colon] = NEVER
        chosen = _sample(logits, settings, top_p, generator)
        if top_p > 0 and settings.top_p_decay > 0:
            top_p = max(top_p * settings.top_p_decay, settings.top_p_bound)
        started = lengths <= place
        tokens[started, place] = chosen[started]
        log_probs.append(logits.log_softmax(-1).gather(1, tokens[:, place : place + 1]))
        stops = started & _stops(chosen, tokens[:, place - 1], settings, words)
        ends[stops & ~done] = place + 1
        done |= stops
        if settings.use_eod_token_for_early_termination and bool(done.all()):
            break
    length = place + 1 if last > first else first
    return Generated(tokens[:, :length], ends.clamp(max=length).tolist(), torch.cat(log_probs, 1))


def _sample(logits: Tensor, settings: MegatronSettings, top_p: float, generator: torch.Generator) -> Tensor:
    """int64 [rows]"""
    if settings.top_k == 1:
        return logits.argmax(-1)
    logits = logits / settings.temperature
    if settings.top_k > 1:
        logits = keep_top_k(logits, settings.top_k)
    elif top_p > 0:
        logits = keep_top_p(logits, top_p)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def _stops(chosen: Tensor, before: Tensor, settings: MegatronSettings, words: Words) -> Tensor:
    """bool [rows]. One way of ending replaces the others."""
    if settings.stop_on_double_eol:
        return (chosen == words.double_newline) | ((chosen == words.newline) & (before == words.newline))
    if settings.stop_on_eol:
        return (chosen == words.double_newline) | (chosen == words.newline)
    return chosen == words.eod


@dataclass(frozen=True)
class Hypothesis:
    tokens: list[int]
    """Prompt and all, filled up with the end of document, which stands for the stop token too."""
    score: float


def beam_search(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    width: int,
    tokens_to_generate: int,
    stop_token: int,
    length_penalty: float,
    eod: int,
) -> list[Hypothesis]:
    """Best first; takes the first `width` slots of model.copied. Megatron's rules, which differ from those of beams.py."""
    last, slots = len(prompt) + tokens_to_generate, model.copied[:width]
    rows, scores = [list(prompt)], torch.zeros(1)
    kept: list[Hypothesis] = []

    def close(row: list[int], total: float, count: int) -> None:
        score = total / count**length_penalty
        if len(kept) < width or score > min(found.score for found in kept):
            kept.append(Hypothesis([*row, *[eod] * (last - len(row))], score))
            if len(kept) > width:
                kept.remove(min(kept, key=lambda found: found.score))

    logits = model.extend([Feed(slots[0], 0, tuple(prompt))])
    for count in range(1, tokens_to_generate + 1):
        sums = (logits.log_softmax(-1) + scores.unsqueeze(1)).flatten()
        best = sums.sort(descending=True)
        vocab, going = logits.shape[-1], []
        for rank in range(min(2 * width, len(sums))):
            beam, token, score = int(best.indices[rank]) // vocab, int(best.indices[rank]) % vocab, best.values[rank]
            if token != stop_token:
                going.append((beam, token, score))
            elif rank < width:
                close(rows[beam], float(score), count)
            if len(going) == width:
                break
        if len(kept) == width and min(found.score for found in kept) >= float(best.values[0]) / count**length_penalty:
            break
        rows = [[*rows[beam], token] for beam, token, _ in going]
        scores = torch.stack([score for _, _, score in going])
        if count == tokens_to_generate:
            for row, score in zip(rows, scores.tolist(), strict=True):
                close(row, score, count)
            break
        model.copy([slots[beam] for beam, _, _ in going], slots[: len(going)])
        logits = model.extend(
            [Feed(slot, len(row) - 1, tuple(row[-1:])) for slot, row in zip(slots, rows, strict=False)]
        )
    return sorted(kept, key=lambda found: -found.score)
