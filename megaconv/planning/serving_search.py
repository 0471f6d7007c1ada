"""Searches the layouts of an inference server for the most tokens per second.

TP is a power of two within a node, PP divides the GPUs left, and the rest are replicas. Experts are sharded by the
tensor ranks of a replica, shared among them, or shared among the ranks of all replicas.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megaconv.errors import LayoutError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.planning.gpus import Gpu
from megaconv.planning.layer_costs import Machine
from megaconv.planning.served import Served, Server
from megaconv.planning.serving import Serving
from megaconv.planning.splits import even_stages, head_layers

LARGEST_PP, LARGEST_SERVER, LARGEST_BATCH = 64, 1024, 1024
SIZES = ("tp", "pp", "ep")
"""Sizes that a user may fix."""


@dataclass(frozen=True, kw_only=True)
class WantedServer:
    """A server whose layout is searched."""

    gpus: int | None
    """None: as few as hold the model, a power of two."""
    seq: int
    sequences: int | None
    """Sequences at a time on all replicas together; None: as many as fit, at most LARGEST_BATCH on a replica."""
    memory: int
    """Bytes of one GPU."""
    fp8: bool = False
    cached: int = 2
    """Bytes of an element of the cache."""
    vocab_divisor: int = 128
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Sizes of SIZES that the user gives."""


@dataclass(frozen=True)
class FoundServers:
    """The result of a search."""

    gpus: int
    fitting: tuple[Served, ...]
    """The layouts that fit, the most tokens per second first."""
    others: tuple[Served, ...]
    """The layouts that are too large, with one sequence or with the sequences that the user gives."""


def search_servers(config: ModelConfig, wanted: WantedServer, machine: Machine) -> FoundServers:
    """Return the layouts of a server. If none fits, the result is that of the largest number of GPUs."""
    found = FoundServers(0, (), ())
    for gpus in _gpu_counts(wanted):
        found = _search(config, wanted, machine, gpus)
        if found.fitting:
            break
    return found


def _gpu_counts(wanted: WantedServer) -> Sequence[int]:
    if wanted.gpus is not None:
        return (wanted.gpus,)
    return [1 << exponent for exponent in range(LARGEST_SERVER.bit_length())]


def _search(config: ModelConfig, wanted: WantedServer, machine: Machine, gpus: int) -> FoundServers:
    server = Server(config, machine)
    fitting, others = list[Served](), list[Served]()
    for serving in _candidates(config, wanted, machine.gpu, gpus):
        try:
            batch = wanted_batch(server, serving, wanted)
            estimate = server.estimate(replace(serving, batch=max(batch, 1)))
        except LayoutError:
            continue
        fits = batch >= 1 and estimate.memory.total <= wanted.memory
        (fitting if fits else others).append(estimate)
    fitting.sort(key=lambda one: (-one.tokens_per_second, one.memory.total))
    others.sort(key=lambda one: one.memory.total)
    return FoundServers(gpus, tuple(fitting), tuple(others))


def wanted_batch(server: Server, serving: Serving, wanted: WantedServer) -> int:
    """Return the sequences of a replica: those that the user gives, or the most that fit; 0 if none fits."""
    if wanted.sequences is not None:
        return -(-wanted.sequences // serving.dp)
    return min(LARGEST_BATCH, server.most_sequences(serving, wanted.memory))


def _candidates(
    config: ModelConfig, wanted: WantedServer, gpu: Gpu, gpus: int
) -> Iterator[Serving]:
    for tp, pp in _model_sizes(config, wanted, gpu, gpus):
        dp = gpus // (tp * pp)
        if wanted.sequences is not None and dp > wanted.sequences:
            continue
        stages = even_stages(config.layer_count, pp, head_layers(config))
        for ep, etp in _expert_sizes(config, wanted, tp, dp):
            layout = Layout(tp, pp, 1, ep, etp, stage_layers=stages)
            yield Serving(
                config=config,
                layout=layout,
                dp=dp,
                seq=wanted.seq,
                fp8=wanted.fp8,
                cached=wanted.cached,
                vocab_divisor=wanted.vocab_divisor,
            )


def _model_sizes(
    config: ModelConfig, wanted: WantedServer, gpu: Gpu, gpus: int
) -> Iterator[tuple[int, int]]:
    """Yield (tp, pp) whose product divides the GPUs."""
    powers = [1 << exponent for exponent in range(gpu.node.bit_length())]
    most = min(LARGEST_PP, config.layer_count)
    for tp in _sizes(wanted, "tp", [power for power in powers if power <= gpu.node]):
        for pp in _sizes(wanted, "pp", range(1, most + 1)):
            if gpus % (tp * pp) == 0 and pp <= most:
                yield tp, pp


def _expert_sizes(
    config: ModelConfig, wanted: WantedServer, tp: int, dp: int
) -> Iterator[tuple[int, int]]:
    """Yield (ep, etp)."""
    count = config.experts.count
    if not count:
        if wanted.fixed.get("ep", 1) == 1:
            yield 1, 1
        return
    for ep in sorted({1, tp, tp * dp}):
        if count % ep == 0 and wanted.fixed.get("ep", ep) == ep:
            yield ep, tp if ep == 1 else 1


def _sizes(wanted: WantedServer, name: str, usual: Sequence[int]) -> Sequence[int]:
    return (wanted.fixed[name],) if name in wanted.fixed else usual
