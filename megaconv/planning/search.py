"""Searches the layouts of a run for the shortest step: every combination of the sizes below, without shortcuts.

TP is a power of two within a node, CP a power of two, PP any size that divides the GPUs left, EP a power of two, ETP 1
or TP. Sharding of gradients and parameters is for PP 1 only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megaconv.errors import LayoutError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.sharding import rank_sizes
from megaconv.planning.estimate import Estimate, Estimator
from megaconv.planning.gpus import Gpu
from megaconv.planning.layer_costs import Machine
from megaconv.planning.recomputation import KEEP_ALL, Recompute
from megaconv.planning.run import Run
from megaconv.planning.splits import even_stages, head_layers

MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)
LARGEST_CP, LARGEST_PP = 16, 64
SHORTEST = 1024
"""Fewest tokens of a sequence on a context rank."""
RECOMPUTE = (KEEP_ALL, Recompute("selective"), Recompute("full"))
SHARDING = ("optim", "optim_grads", "optim_grads_params")
SIZES = ("tp", "pp", "vpp", "ep", "etp", "cp", "micro_batch")
"""Sizes that a user may fix."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A run whose layout is searched."""

    gpus: int
    seq: int
    global_batch: int
    memory: int
    """Bytes of one GPU."""
    dtype: str = "bfloat16"
    vocab_divisor: int = 128
    dispatcher: str = "alltoall"
    """`alltoall`, or `flex` for Megatron-LM with DeepEP."""
    overlaps_experts: bool = False
    """True if the exchange of experts' tokens is hidden where Megatron-LM can hide it: with virtual stages, or PP 1."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Sizes of SIZES that the user gives."""


def candidates(config: ModelConfig, wanted: Wanted, gpu: Gpu) -> Iterator[Run]:
    """Yield every run that the sizes allow, whether or not it fits the memory."""
    for layout, cp, dp in _layouts(config, wanted, gpu):
        for micro_batch in _micro_batches(wanted, layout, dp):
            for sharding in SHARDING if layout.pp == 1 else SHARDING[:1]:
                for recompute in RECOMPUTE:
                    yield Run(
                        config=config, layout=layout, dp=dp, cp=cp, seq=wanted.seq, micro_batch=micro_batch,
                        global_batch=wanted.global_batch, dtype=wanted.dtype, sequence_parallel=layout.tp > 1,
                        recompute=recompute, sharding=sharding, vocab_divisor=wanted.vocab_divisor,
                        dispatcher=wanted.dispatcher, overlaps_experts=_overlaps(wanted, layout, recompute),
                    )  # fmt: skip


def search(config: ModelConfig, wanted: Wanted, machine: Machine) -> tuple[list[Estimate], int]:
    """Return the runs that fit the memory, the shortest step first, and the number of candidates."""
    estimator, found, tried = Estimator(config, machine), list[Estimate](), 0
    for run in candidates(config, wanted, machine.gpu):
        tried += 1
        if not estimator.state_fits(run, wanted.memory):
            continue
        estimate = estimator.estimate(run)
        if estimate.memory.total <= wanted.memory:
            found.append(estimate)
    return sorted(found, key=_order), tried


def _order(estimate: Estimate) -> tuple[float, float]:
    """Return the sort key: time, and memory of equally fast runs."""
    return estimate.time.total, estimate.memory.total


def best_of_each(found: Sequence[Estimate]) -> list[Estimate]:
    """Return the best run of each combination of TP, PP, EP, ETP and CP.

    Those with other virtual stages, microbatch, recomputation or sharding are left out.
    """
    seen, kept = set[tuple[int, ...]](), list[Estimate]()
    for estimate in found:
        key = parallel_sizes(estimate.run)
        if key not in seen:
            seen.add(key)
            kept.append(estimate)
    return kept


def parallel_sizes(run: Run) -> tuple[int, ...]:
    """Return the sizes by which listed layouts differ: TP, PP, EP, ETP and CP."""
    layout = run.layout
    return layout.tp, layout.pp, layout.ep, layout.etp, run.cp


def _layouts(config: ModelConfig, wanted: Wanted, gpu: Gpu) -> Iterator[tuple[Layout, int, int]]:
    """Yield (layout, cp, dp)."""
    head = head_layers(config)
    for tp, cp, pp in _dense_sizes(config, wanted, gpu):
        dp = wanted.gpus // (tp * cp * pp)
        splits = [
            (vpp, even_stages(config.layer_count, pp * vpp, head))
            for vpp in _virtual(config, wanted, pp)
        ]
        for ep, etp in _expert_sizes(config, wanted, tp, tp * cp * dp):
            if not _shards(config, tp, ep, etp):
                continue
            for vpp, stages in splits:
                yield Layout(tp, pp, vpp, ep, etp, stage_layers=stages), cp, dp


def _overlaps(wanted: Wanted, layout: Layout, recompute: Recompute) -> bool:
    """Return whether Megatron-LM can hide the exchange of experts' tokens. It can't if whole layers are recomputed."""
    if not wanted.overlaps_experts or recompute.granularity == "full":
        return False
    has_passes_to_overlap = layout.vpp > 1 or layout.pp == 1
    return layout.ep > 1 and has_passes_to_overlap


def _dense_sizes(config: ModelConfig, wanted: Wanted, gpu: Gpu) -> Iterator[tuple[int, int, int]]:
    """Yield (tp, cp, pp) whose product divides the GPUs."""
    most_pp = min(LARGEST_PP, config.layer_count)
    for tp in _sizes(wanted, "tp", _powers(gpu.node)):
        for cp in _sizes(wanted, "cp", _powers(LARGEST_CP)):
            if not _divides_sequence(wanted.seq, tp, cp):
                continue
            for pp in _sizes(wanted, "pp", range(1, most_pp + 1)):
                if wanted.gpus % (tp * cp * pp) == 0:
                    yield tp, cp, pp


def _divides_sequence(seq: int, tp: int, cp: int) -> bool:
    if cp > 1 and (seq % (2 * cp) or seq // cp < SHORTEST):
        return False
    return seq // cp % tp == 0


def _virtual(config: ModelConfig, wanted: Wanted, pp: int) -> Iterator[int]:
    most = config.layer_count // pp if pp > 1 else 1
    for vpp in _sizes(wanted, "vpp", VIRTUAL):
        if vpp <= most:
            yield vpp


def _expert_sizes(
    config: ModelConfig, wanted: Wanted, tp: int, ranks: int
) -> Iterator[tuple[int, int]]:
    """Yield (ep, etp). ranks: of a pipeline stage."""
    count = config.experts.count
    if not count:
        yield 1, 1
        return
    for ep in _sizes(wanted, "ep", _powers(count)):
        for etp in _sizes(wanted, "etp", sorted({1, tp})):
            if count % ep == 0 and ranks % (ep * etp) == 0:
                yield ep, etp


def _micro_batches(wanted: Wanted, layout: Layout, dp: int) -> Iterator[int]:
    for micro_batch in _sizes(wanted, "micro_batch", MICRO_BATCHES):
        microbatches, rest = divmod(wanted.global_batch, micro_batch * dp)
        interleaves = layout.vpp == 1 or microbatches % layout.pp == 0
        if microbatches and not rest and interleaves:
            yield micro_batch


def _sizes(wanted: Wanted, name: str, usual: Sequence[int]) -> Sequence[int]:
    """Return the size that the user fixed, or the usual ones."""
    return (wanted.fixed[name],) if name in wanted.fixed else usual


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]


def _shards(config: ModelConfig, tp: int, ep: int, etp: int) -> bool:
    """Return whether these sizes divide the model."""
    layout = Layout(tp=tp, ep=ep, etp=etp, stage_layers=(config.layer_count,))
    try:
        rank_sizes(config, layout, shares_heads=True)
    except LayoutError:
        return False
    return True
