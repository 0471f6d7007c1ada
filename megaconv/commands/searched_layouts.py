"""Searches for layouts by the values that a user gives: for a training run, or for a server."""

from collections.abc import Mapping

from formats.tensor import ITEMSIZE
from megaconv.commands.best_layouts import BestLayouts, best_layouts
from megaconv.commands.served_layouts import ServedLayouts, served_layouts
from megaconv.errors import UsageError
from megaconv.model.ir import Header
from megaconv.planning.gpus import Gpu, gpu_named
from megaconv.planning.layer_costs import Machine
from megaconv.planning.search import Wanted
from megaconv.planning.serving_search import WantedServer

CACHE_DTYPES = ("auto", "fp8")
DISPATCHERS = ("alltoall", "flex")
_DEFAULT_SEQ_LENGTH = 4096


def layouts_for_training(
    header: Header,
    *,
    gpus: int,
    gpu: str,
    gpu_memory: int | None,
    seq_length: int | None,
    global_batch_size: int | None,
    fixed: Mapping[str, int],
    top: int,
    fp8: bool,
    adapters: bool,
    overlap_experts: bool,
    dispatcher: str,
) -> BestLayouts:
    """The layouts of a run with the shortest estimated step.

    gpu_memory: bytes; None: the memory that a GPU of this kind has.
    fixed: sizes that every layout must have, by name (tp, pp, vpp, ep, etp, cp, micro_batch).
    adapters: only adapters are trained. Raises UsageError for impossible values.
    """
    machine = _machine(gpu, fp8=fp8, adapters=adapters)
    _require(dispatcher, DISPATCHERS, "moe_token_dispatcher_type")
    wanted = Wanted(
        gpus=gpus,
        seq=_seq_length(header, seq_length),
        global_batch=global_batch_size or gpus,
        memory=_memory(machine.gpu, gpu_memory),
        dispatcher=dispatcher,
        overlaps_experts=overlap_experts,
        fixed=dict(fixed),
    )
    return best_layouts(header, wanted, machine, top)


def layouts_for_serving(
    header: Header,
    *,
    gpus: int | None,
    gpu: str,
    gpu_memory: int | None,
    seq_length: int | None,
    sequences: int | None,
    fixed: Mapping[str, int],
    top: int,
    fp8: bool,
    cache: str,
) -> ServedLayouts:
    """The layouts of a server that generate the most tokens in a second.

    gpus: None: as few as hold the model. sequences: how many are served at the same time; None: as many as fit.
    cache: dtype of cached keys and values, one of CACHE_DTYPES. Raises UsageError for impossible values.
    """
    machine = _machine(gpu, fp8=fp8, adapters=False)
    _require(cache, CACHE_DTYPES, "kv_cache_dtype")
    wanted = WantedServer(
        gpus=gpus,
        seq=_seq_length(header, seq_length),
        sequences=sequences,
        memory=_memory(machine.gpu, gpu_memory),
        fp8=fp8,
        cached=1 if cache == "fp8" else max(2, ITEMSIZE[header.config.dtype]),
        fixed=dict(fixed),
    )
    return served_layouts(header, wanted, machine, top)


def _machine(gpu: str, *, fp8: bool, adapters: bool) -> Machine:
    machine = Machine(gpu_named(gpu), fp8=fp8, frozen=adapters)
    machine.products  # noqa: B018  (refuses FP8 on a GPU without it, before the search)
    return machine


def _require(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r}: expected {' or '.join(known)}")


def _seq_length(header: Header, given: int | None) -> int:
    return given or min(header.config.max_positions, _DEFAULT_SEQ_LENGTH)


def _memory(gpu: Gpu, given: int | None) -> int:
    return gpu.memory if given is None else given
