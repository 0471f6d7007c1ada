"""Work that every rank does once for each of many others: making groups, reading files."""

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from formats.tensor import Box, Bytes, Shape
from megaconv.families import family
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.initial_weights import RandomTensor, normal
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.parallel import comm
from tests.trainer.parallel.small import MODELS, Case, make_engine, weights_of
from tests.trainer.parallel.worlds import World

COUNT_GROUPS = """
import sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megaconv.model.layout import Layout
from megatron_lite.parallel.grid import make_grid
rank = int(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=512)
grid = make_grid(Layout(8, 4, 2, 8, stage_layers=(1,) * 8), 8, torch.device("cpu"), cp=2, experts=True)
made = {id(group): sorted(dist.get_process_group_ranks(group)) for group in [*grid.groups.values(), *grid.channels.values()] if group}
assert all(rank in ranks for ranks in made.values())
print(len(made), sum(len(ranks) - 1 for ranks in made.values() if len(ranks) < 512))
"""
"""A program that counts the groups requested from backends in a world of 512. This process is one rank of it."""


@pytest.mark.parametrize(
    ("rank", "groups", "peers"), [(0, 6, 27), (130, 5, 26)], ids=["an end", "the middle"]
)
def test_each_of_512_ranks_has_groups_with_only_a_few_others(
    rank: int, groups: int, peers: int
) -> None:
    """The world; 8 tensor ranks, which share experts, too; 16 replicas; 2 of a sequence; 4 stages, and at these ends 2 of them."""
    found = subprocess.run(
        [sys.executable, "-c", COUNT_GROUPS, str(rank)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert tuple(map(int, found.stdout.split())) == (groups, peers)


@dataclass
class Counting:
    """A lazy tensor that knows how often it was read."""

    inner: RandomTensor
    reads: list[Box] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        return self.inner.shape

    @property
    def dtype(self) -> str:
        return self.inner.dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        self.reads.append(box)
        self.inner.read_into(box, out)


def _load(_rank: int, case: Case) -> tuple[dict[str, torch.Tensor], list[tuple[str, Box]]]:
    config = MODELS[case.model]
    shapes = canonical_shapes(family(config.family).rows, config)
    tensors = {
        name: Counting(RandomTensor(shape, seed, normal(1.0)))
        for seed, (name, shape) in enumerate(shapes.items())
    }
    engine = make_engine(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "PIECE", 100)  # so that a matrix goes in several
        load_weights(engine, tensors)
    engine.grid.close()
    return weights_of(engine), [
        (name, box) for name, tensor in tensors.items() for box in tensor.reads
    ]


@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
def test_one_of_the_ranks_that_hold_a_weight_reads_it_and_passes_it_on(
    world: World, model: str
) -> None:
    expected, once = _load(0, Case(model))
    loaded = world.run(2, _load, Case(model, dp=2, distributed=True))
    assert Counter(once) == Counter(read for _, reads in loaded for read in reads)
    assert all(reads for _, reads in loaded)
    for weights, _ in loaded:
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
