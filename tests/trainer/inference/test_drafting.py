"""Drafts: answers are the same as without them, and sampled ones have the model's probabilities. MTP layers draft what they learned."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megaconv.errors import UsageError
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.batching import RunningBatch, generate, steps
from megatron_lite.inference.beams import BeamSettings
from megatron_lite.inference.drafting_model import DraftingModel
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.slots import AllLogits, DraftCounts, Feed, Recomputed
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.inference.models import EOS, slots_of, tiny
from tests.trainer.parallel.small import MODELS, Case, make_engine
from tests.trainer.parallel.worlds import World

LENGTH = 32


class Guessing(Recomputed):
    """A model without a cache that guesses tokens: those of an oracle, some of them changed."""

    def __init__(self, logits: AllLogits, slots: int, length: int, drafts: int = 3) -> None:
        super().__init__(logits, slots, length)
        self.drafts, self.counts = drafts, DraftCounts()
        self.wrong = 0

    def verify(self, feeds: Sequence[Feed]) -> Tensor:
        found = []
        for feed in feeds:
            self._rows[feed.slot] = [*self._rows[feed.slot][: feed.start], *feed.tokens]
            (logits,) = self._logits([self._rows[feed.slot]])
            found.append(logits[-len(feed.tokens) :])
        return torch.cat(found)

    def draft(self, feeds: Sequence[Feed], count: int) -> list[tuple[int, ...]]:
        guesses = []
        for feed in feeds:
            row = [*self._rows[feed.slot][: feed.start + 1], *feed.tokens]
            guessed: list[int] = []
            for _ in range(count):
                (logits,) = self._logits([[*row, *guessed]])
                self.wrong += 1
                right = int(logits[-1].argmax())
                guessed.append(right if self.wrong % 5 else (right + 1) % len(logits[-1]))
            guesses.append(tuple(guessed))
        return guesses


PROMPTS = [(3, 17, 90, 6, 22), (3, 60), (3, *range(40, 60)), (8, 9, 8)]
SAMPLINGS = {
    "greedy": Sampling(0),
    "sampled": Sampling(0.9, seed=3),
    "top k and p": Sampling(1.2, top_k=9, top_p=0.8, seed=4),
    "penalties": Sampling(0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "bias": Sampling(0.7, seed=5, logit_bias=((7, 3.0), (9, -100.0))),
}


@pytest.mark.oracle
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_are_the_same_as_without_drafts(sampling: str) -> None:
    """Those of transformers' model, some of whose guesses are wrong: tokens, log-probabilities and ends."""
    model = tiny()
    plain = slots_of(model, 3)
    guessing = Guessing(plain._logits, 3, plain.length)
    requests = [
        Request(prompt, 5 + 3 * number, SAMPLINGS[sampling], frozenset([EOS, 20]), log_probs=2)
        for number, prompt in enumerate(PROMPTS)
    ]
    expected, found = generate(plain, requests), generate(guessing, requests)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.tokens, mine.end) == (theirs.tokens, theirs.end)
        ours = [each.log_prob for each in mine.likelihoods]
        assert ours == pytest.approx([each.log_prob for each in theirs.likelihoods], abs=1e-5)
    counts = guessing.counts
    assert 0 < counts.accepted < counts.drafted
    assert 1 < counts.tokens_a_step < 4


@pytest.mark.oracle
def test_beams_and_drafts_share_a_batch() -> None:
    model = tiny()
    plain = slots_of(model, 5)
    beams = Request(PROMPTS[0], 7, stop_ids=frozenset([EOS]), beams=BeamSettings(3, 0.8))
    requests = [Request(PROMPTS[1], 9, Sampling(0)), beams, Request(PROMPTS[2], 5, Sampling(0))]
    found = generate(Guessing(plain._logits, 5, plain.length), requests)
    assert [(each.tokens, each.beams) for each in found] == [
        (each.tokens, each.beams) for each in generate(plain, requests)
    ]


def test_a_request_that_is_cancelled_within_a_turn_has_no_further_steps() -> None:
    def logits(rows: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.eye(8)[[(token + 1) % 8 for token in row]] for row in rows]

    batch = RunningBatch(Guessing(logits, 1, LENGTH, drafts=3))
    batch.add(Request((1,), 20, Sampling(0)))
    tokens = []
    for step in steps(batch):
        tokens.append(step.token)
        if step.token == 4:
            batch.cancel(step.number)
    assert tokens == [2, 3, 4]


def test_sampled_tokens_have_the_probabilities_of_the_model() -> None:
    """Chi-square over pairs of tokens, of which drafts give the second one: 4000 answers of four tokens in a row of five."""
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(2))

    def logits(rows: Sequence[Sequence[int]]) -> list[Tensor]:
        return [table[list(row)] for row in rows]

    model = Guessing(logits, 8, 8, drafts=2)
    requests = [Request((1,), 3, Sampling(1.0, seed=seed)) for seed in range(4000)]
    answers = [tuple(answer.tokens) for answer in generate(model, requests)]
    counts = model.counts
    assert counts.accepted > 500
    chances = table.softmax(-1)
    seen = Counter(answers)
    square, cells = 0.0, 0
    for first in range(5):
        for second in range(5):
            for third in range(5):
                chance = chances[1, first] * chances[first, second] * chances[second, third]
                expected = float(chance) * len(answers)
                square += (seen[first, second, third] - expected) ** 2 / expected
                cells += 1
    assert cells == 125
    assert square < 173.6  # 124 degrees of freedom, probability 0.002
    assert square > 82.8  # and 0.998: the answers vary as much as they should


def learned(name: str, count: int = 40) -> Engine:
    """A model that has learned that each token has one follower."""
    engine = make_engine(Case(name))
    follower = torch.randperm(61, generator=torch.Generator().manual_seed(1))
    for number in range(count):
        first = torch.randint(61, (16, 1), generator=torch.Generator().manual_seed(number))
        row = [first]
        for _ in range(16):
            row.append(follower[row[-1]])
        tokens = torch.cat(row, 1)
        engine.train_step([Microbatch(tokens[:, :-1], tokens[:, 1:])], lr=1e-2)
    return engine


REQUESTS = [
    Request((3, 9, 4), 12, Sampling(0)), Request((7,), 9, Sampling(0.8, seed=1)), Request((1, 2, 3, 4, 5, 6), 14, Sampling(0)),
    Request((8, 8), 1, Sampling(0)), Request(tuple(range(20)), 12, Sampling(0), frozenset([5])),
]  # fmt: skip


WITH_STATES = ("delta nets, experts", "hybrid, further tokens")


@pytest.mark.parametrize("name", ["further tokens", "further tokens, tied", "mimo", *WITH_STATES])
def test_mtp_layers_draft_and_change_no_answer(name: str) -> None:
    engine = learned(name)
    expected = generate(EngineModel(engine, 2, LENGTH), REQUESTS)
    for drafts in (1, 3):
        model = DraftingModel(engine, 2, LENGTH, drafts)
        found = generate(model, REQUESTS)
        assert [(each.tokens, each.end) for each in found] == [
            (each.tokens, each.end) for each in expected
        ]
        assert model.counts.accepted > model.counts.drafted / 4, model.counts


@pytest.mark.parametrize("name", ["further tokens", "mimo", *WITH_STATES])
def test_a_draft_is_the_token_that_the_layer_predicts_in_training(name: str) -> None:
    """Through the cache, for rows that were read in parts: the logits of the training pass over the whole row."""
    engine = make_engine(Case(name))
    model = DraftingModel(engine, 3, LENGTH, 1)
    rows = [
        torch.randint(61, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in range(3)
    ]
    parts = [(0, 5), (5, 6), (6, 10)]
    for start, end in parts:
        model.extend([Feed(slot, start, tuple(row[start:end])) for slot, row in enumerate(rows)])
        feeds = [
            Feed(slot, start, tuple(row[start + 1 : end + 1])) for slot, row in enumerate(rows)
        ]
        drafted = model.draft(feeds, 1)
        for row, (guess,) in zip(rows, drafted, strict=True):
            assert guess == int(_trained_logits(engine, row[: end + 1]).argmax())


@pytest.mark.parametrize("name", ["further tokens", *WITH_STATES])
def test_the_next_turn_of_a_conversation_continues_the_row(name: str) -> None:
    """Rows with wrong guesses in their slots, too."""
    engine = make_engine(Case(name))
    answers = []
    for model in (EngineModel(engine, 2, 64), DraftingModel(engine, 2, 64, 2)):
        batch = RunningBatch(model, reuse_rows=True)
        row = list(range(17))
        for _ in range(3):
            batch.add(Request(tuple(row), 9, Sampling(0)))
            row += [step.token for step in steps(batch)] + [1, 2]
        answers.append(row)
    assert answers[0] == answers[1]


def _trained_logits(engine: Engine, row: list[int]) -> Tensor:
    """The logits of the first MTP layer for the token behind the row, as a training pass computes them."""
    tokens = torch.tensor([row])
    (chunk,) = engine.chunks
    run = engine.make_pass(
        Microbatch(tokens, tokens)
    )  # with gradients, so that it has the tokens ahead
    (hidden,) = chunk((), run)
    assert isinstance(chunk.mtp, torch.nn.Module)
    made, _ = next(iter(chunk.mtp(hidden, run, chunk._embed(run))))
    # The last position has no token ahead.
    logits = chunk.logits((made.detach()[-2:-1],))
    return logits[0, 0]


def _on_ranks(rank: int, name: str, tp: int, pp: int, dp: int, ep: int, drafts: int) -> Any:
    """(answers, counts, guesses behind two rows) on rank 0."""
    config = MODELS[name]
    layout = Layout(
        tp, pp, 1, ep, stage_layers=split_layers(config.layer_count, pp, 1, LayerSplit())
    )
    grid = make_grid(layout, dp, torch.device("cpu"), experts=config.experts.count > 0)
    engine = Engine(config, grid, ModelOptions(dtype="float32", trains=False), None)
    init_weights(engine, std=0.1, seed=5)
    model = DraftingModel(engine, 2, LENGTH, drafts) if drafts else EngineModel(engine, 2, LENGTH)
    if rank:
        model.follow()
        engine.grid.close()
        return None
    found = [answer.tokens for answer in generate(model, REQUESTS)]
    guesses: Any = None
    if isinstance(model, DraftingModel):
        model.extend([Feed(0, 0, (5, 9, 11)), Feed(1, 0, (7, 2))])
        guesses = model.draft([Feed(0, 0, (9, 11, 30)), Feed(1, 0, (2, 40))], 4)
    model.close()
    engine.grid.close()
    return found, guesses


LAYOUTS = {"tp2": (2, 1, 1, 1), "pp2": (1, 2, 1, 1), "ep2": (1, 1, 2, 2), "tp2 pp2": (2, 2, 1, 1)}


@pytest.mark.parametrize(("name", "layout"), [
    *[("further tokens", layout) for layout in LAYOUTS], ("delta nets, experts", "ep2"), ("hybrid, further tokens", "tp2"),
])  # fmt: skip
def test_drafts_at_every_layout_are_those_of_one_process(
    name: str, layout: str, world: World
) -> None:
    sizes = LAYOUTS[layout]
    expected, guesses = _on_ranks(0, name, 1, 1, 1, 1, 2)
    assert expected == _on_ranks(0, name, 1, 1, 1, 1, 0)[0]
    ranks = sizes[0] * sizes[1] * sizes[2]
    assert world.run(ranks, _on_ranks, name, *sizes, 2)[0] == (expected, guesses)


def test_a_model_without_mtp_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="no MTP layers"):
        DraftingModel(make_engine(Case("qwen3")), 2, LENGTH, 1)
