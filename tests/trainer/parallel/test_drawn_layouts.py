"""Layouts, options and batches drawn by chance: whatever comes together computes what one process does."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from random import Random

import pytest
import torch

from megaconv.errors import LayoutError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.sharding import rank_sizes
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import Balancing, ModelOptions, OptimizerOptions, Recompute
from megatron_lite.settings.sizes import check_sizes
from tests.trainer.parallel.small import BLOCK, FULL, MODELS, NONE, SELECTIVE
from tests.trainer.parallel.worlds import World

SEEDS = range(40)
FEW = range(3)
"""The seeds that every test run takes."""
STEPS, LAYERS = 3, 4
LATER = ("beam", "dbrx", "gpt1")
"""Models that aren't drawn, because they would change the meaning of every seed."""
WITH_TWO_KV_HEADS = ("qwen3", "llama", "mixtral", "gpt_oss")


@dataclass(frozen=True)
class Drawn:
    """A run. The defaults are those of a single process."""

    model: str
    seed: int
    microbatches: int
    rows: int
    masked: bool
    packed: bool
    dropout: float
    balance: Balancing
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    stage_layers: tuple[int, ...] = (LAYERS,)
    sequence: bool = False
    context: str = "p2p"
    dispatcher: str = "alltoall"
    recompute: Recompute = NONE
    distributed: bool = False
    bucket_elements: int = 4000
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    loss_rows: int | None = None
    zero: int = 1
    """The sharding stage if `distributed`: 2 shards gradients too, 3 also parameters."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def alone(self) -> "Drawn":
        """The same model and batches in one process."""
        kept = ("model", "seed", "microbatches", "rows", "masked", "packed", "dropout", "balance")
        return Drawn(**{name: getattr(self, name) for name in kept})


def draw(seed: int) -> Drawn:
    """Draw a run on four ranks. Every layout of them divides its sequences of 16 tokens.

    The order of the choices belongs to the meaning of a seed.
    """
    chance = Random(seed)
    choice = chance.choice

    def coin() -> bool:
        return chance.random() < 0.5

    model = choice(sorted(MODELS.keys() - set(LATER)))
    config = MODELS[model]
    experts = config.experts.count
    largest_tp = 2 if model in WITH_TWO_KV_HEADS or not _is_sharded_by_four(config) else 4
    sizes = [each for each in product((1, 2, 4), repeat=4) if prod(each) == 4]
    tp, pp, cp, dp = choice([each for each in sizes if each[0] <= largest_tp])
    ep, etp = _draw_expert_sizes(chance, config, tp * cp * dp) if experts else (1, 1)
    vpp = choice((1, 2)) if pp == 2 else 1
    ends = sorted(chance.sample(range(1, LAYERS), pp * vpp - 1))
    stages = zip((0, *ends), (*ends, LAYERS), strict=True)
    # Interleaved schedules need a multiple of the stages.
    microbatches = pp * choice((1, 2)) if vpp > 1 else choice((1, 2, 3))
    losses = [kind for kind in ("aux_loss", "seq_aux_loss") if experts and coin()]
    can_share_heads = tp * cp <= largest_tp
    contexts = ("p2p", "all_gather", "a2a") if can_share_heads else ("p2p", "all_gather")
    return Drawn(
        model=model,
        seed=seed,
        microbatches=microbatches * dp,
        rows=choice((1, 2, 3)),
        masked=coin(),
        packed=coin(),
        dropout=choice((0.0, 0.2)),
        balance=Balancing(
            tuple((kind, 0.1) for kind in losses), choice((0.0, 0.01)), choice((0.0, 0.01))
        ),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=ep,
        etp=etp,
        stage_layers=tuple(end - start for start, end in stages),
        sequence=tp > 1 and (experts > 0 or coin()),
        context=choice(contexts),
        dispatcher=choice(("alltoall", "allgather")),
        recompute=choice((NONE, FULL, BLOCK, SELECTIVE)),
        distributed=coin(),
        bucket_elements=choice((300, 4000, 10**6)),
        overlap_grad_reduce=coin(),
        overlap_param_gather=coin(),
        loss_rows=choice((None, 3)),
        zero=choice((1, 2, 3) if pp == 1 else (1, 3)),
    )


def _is_sharded_by_four(config: ModelConfig) -> bool:
    """True if the model's sizes can be divided over four tensor-parallel ranks."""
    try:
        rank_sizes(config, Layout(4))
    except LayoutError:
        return False
    return True


def _draw_expert_sizes(chance: Random, config: ModelConfig, ranks: int) -> tuple[int, int]:
    """Draw (ep, etp) for the ranks of a stage. Experts with biases aren't sharded."""
    possible_etp = (1,) if config.mlp.bias else (1, 2, 4)
    sizes = product((1, 2, 4), possible_etp)
    return chance.choice([(ep, etp) for ep, etp in sizes if ranks % (ep * etp) == 0])


def make_engine(drawn: Drawn) -> Engine:
    config, vpp = MODELS[drawn.model], len(drawn.stage_layers) // drawn.pp
    layout = Layout(drawn.tp, drawn.pp, vpp, drawn.ep, drawn.etp, stage_layers=drawn.stage_layers)
    # Some of these models make a rounding of float32 a hundred times larger, which hides what a layout does.
    options = ModelOptions(
        "float64", sequence_parallel=drawn.sequence, hidden_dropout=drawn.dropout, recompute=drawn.recompute,
        context=drawn.context, dispatcher=drawn.dispatcher, balance=drawn.balance, loss_rows=drawn.loss_rows, vocab_divisor=4,
    )  # fmt: skip
    # With a smaller eps, Adam makes whole steps of gradients that are only rounding.
    optimizer = OptimizerOptions(
        betas=(0.9, 0.95), eps=1e-4, distributed=drawn.distributed, shards_gradients=drawn.distributed and drawn.zero > 1,
        shards_parameters=drawn.distributed and drawn.zero > 2, bucket_elements=drawn.bucket_elements,
        overlap_grad_reduce=drawn.overlap_grad_reduce, overlap_param_gather=drawn.overlap_param_gather,
    )  # fmt: skip
    microbatches = drawn.microbatches // drawn.dp
    dp = check_sizes(
        config,
        layout,
        world=drawn.world,
        options=options,
        sequence=16,
        microbatches=microbatches,
        cp=drawn.cp,
    )
    grid = make_grid(layout, dp, torch.device("cpu"), cp=drawn.cp, experts=config.experts.count > 0)
    engine = Engine(config, grid, options, optimizer)
    init_weights(engine, std=0.1, seed=5)
    return engine


def batches(drawn: Drawn, step: int) -> Iterator[Microbatch]:
    """The microbatches of all data-parallel ranks. In some of them no label counts, or rows consist of documents."""
    generator, chance = (
        torch.Generator().manual_seed(100 * drawn.seed + step),
        Random(100 * drawn.seed + step),
    )
    for index in range(drawn.microbatches):
        tokens = torch.randint(MODELS[drawn.model].vocab, (drawn.rows, 17), generator=generator)
        mask = torch.rand(drawn.rows, 16, generator=generator) < chance.choice((0.0, 0.7, 0.7, 0.7))
        documents = tuple(lengths(chance) for _ in range(drawn.rows))
        yield Microbatch(
            tokens[:, :-1], tokens[:, 1:], mask if drawn.masked else None,
            documents=documents if drawn.packed else None, index=index,
        )  # fmt: skip


def lengths(chance: Random) -> tuple[int, ...]:
    """The lengths of a row's documents."""
    ends = sorted(chance.sample(range(1, 16), chance.randrange(4)))
    return tuple(b - a for a, b in zip((0, *ends), (*ends, 16), strict=True))


def train(_rank: int, drawn: Drawn) -> list[list[float]]:
    """Loss, norm, counting labels and losses of further tokens for each step; then those of an evaluation."""
    engine, found = make_engine(drawn), []
    for step in range(STEPS):
        own = list(batches(drawn, step))[engine.grid.dp_rank :: drawn.dp]
        report = engine.train_step(own, lr=1e-3 * (1 - step / 10), weight_decay=0.1)
        found.append([report.loss, report.grad_norm, report.tokens, *report.others.values()])
    evaluated = engine.evaluate(list(batches(drawn, STEPS))[engine.grid.dp_rank :: drawn.dp])
    engine.finish()
    engine.grid.close()
    return [*found, [number for pair in evaluated.values() for number in pair]]


@pytest.mark.parametrize(
    "seed", [seed if seed in FEW else pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS]
)
def test_a_layout_drawn_by_chance_computes_what_one_process_does(seed: int, world: World) -> None:
    drawn = draw(seed)
    (expected,) = world.run(1, train, drawn.alone())
    for found in world.run(drawn.world, train, drawn):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-8), drawn


def test_drawn_cases_differ_in_every_option() -> None:
    """If the draws were alike, most options would not be tested."""
    every = [draw(seed) for seed in SEEDS]
    for name, value in vars(replace(every[0], seed=-1)).items():
        assert name == "seed" or len({str(vars(drawn)[name]) for drawn in every}) > 1, (name, value)
