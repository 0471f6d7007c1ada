"""`megaconv plan` with a GPU and a batch: the layouts with the shortest estimated step, and what each rank's memory is for."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from shlex import join
from typing import Any

from megaconv.commands.only_in_files import only_in_files
from megaconv.commands.text_table import Column, heading_line, table_line
from megaconv.commands.units import readable, readable_time
from megaconv.errors import UsageError
from megaconv.megatron.rank_files.output_layout import DEFAULT_DIVISOR
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header
from megaconv.planning.estimate import LORA_RANK, Estimate, Estimator
from megaconv.planning.flags import (
    megatron_lite_flags,
    megatron_lm_flags,
    why_not_megatron_lite,
)
from megaconv.planning.gpus import Gpu
from megaconv.planning.layer_costs import Machine
from megaconv.planning.model_size import parameter_count
from megaconv.planning.search import Wanted, best_of_each, candidates, search
from megaconv.planning.step_time import TERMS


@dataclass(frozen=True)
class Placed:
    """One layout of the list."""

    rank: int
    """Its place among the layouts of all sizes, from 1."""
    estimate: Estimate
    limit: str
    """The term in which it loses most to the first layout: a name of TERMS. `memory too small` if it doesn't fit."""

    def to_json(self) -> dict[str, Any]:
        run, time = self.estimate.run, self.estimate.time
        return {
            "rank": self.rank, **run.layout.sizes(), "cp": run.cp, "dp": run.dp, "gpus": run.world,
            "micro_batch": run.micro_batch, "recompute": run.recompute.granularity, "sharding": run.sharding,
            "stage_layers": list(run.layout.stage_layers), "step_seconds": time.total, "terms": time.terms(),
            "limit": self.limit, "tokens_per_second": self.estimate.tokens_per_second,
            "parameters": self.estimate.parameters,
            "memory": {**self.estimate.memory.parts(), "total": self.estimate.memory.total},
            "fits": self.limit != TOO_SMALL,
        }  # fmt: skip


TOO_SMALL = "memory too small"


@dataclass(frozen=True, repr=False)
class BestLayouts:
    """The layouts of a run, the shortest step first."""

    config: ModelConfig
    machine: Machine
    wanted: Wanted
    placed: tuple[Placed, ...]
    candidates: int
    """Number of runs that the search estimated."""
    fitting: int
    """Number of layouts that fit the memory."""

    def __repr__(self) -> str:
        return f"<BestLayouts: {self.fitting} layouts fit, {self.candidates} candidates>"

    def to_json(self) -> dict[str, Any]:
        return {
            "layouts": [one.to_json() for one in self.placed],
            "candidates": self.candidates, "fitting": self.fitting, "gpu": self.gpu.name, "gpu_memory": self.wanted.memory,
            "parameters": self.parameters, "parameters_with_mtp": self.parameters_with_mtp,
            "flags": self.flags(),
            "notices": list(only_in_files(self.config)),
        }  # fmt: skip

    def flags(self) -> dict[str, list[str]]:
        """Return the flags of the first layout by program; none for a program that can't train in it."""
        run, fp8 = self.placed[0].estimate.run, self.machine.fp8
        lora_rank = LORA_RANK if self.machine.frozen else 0
        return {
            "megatron_lm": megatron_lm_flags(run, fp8=fp8),
            "megatron_lite": megatron_lite_flags(run, fp8=fp8, lora_rank=lora_rank),
        }

    @property
    def gpu(self) -> Gpu:
        return self.machine.gpu

    @property
    def parameters_with_mtp(self) -> int:
        """Parameters of the model, with layers that predict further tokens."""
        return parameter_count(self.config)

    @property
    def parameters(self) -> int:
        """Parameters of the model without layers that predict further tokens."""
        return parameter_count(changed(self.config, {"mtp_layers": 0}))

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        yield from self.description()
        yield heading_line(COLUMNS)
        for one in self.placed:
            yield _row(one)
        yield ""
        yield from self._first()

    def description(self) -> Iterator[str]:
        """Yield what is searched, and how many layouts fit."""
        wanted = self.wanted
        with_mtp = ""
        if self.config.mtp_layers:
            with_mtp = f" ({self.parameters_with_mtp:,} with MTP layers)"
        yield f"{self.config.family}, {self.parameters:,} parameters{with_mtp}"
        yield (
            f"{wanted.gpus:,} {self.gpu.name} of {readable(wanted.memory)}; a step of {wanted.global_batch:,} sequences of "
            f"{wanted.seq:,} tokens"
        )
        yield f"{self.candidates:,} candidates; {self.fitting:,} layouts fit the memory; an estimate, not a measurement"
        yield from only_in_files(self.config)

    def _first(self) -> Iterator[str]:
        first = self.placed[0]
        time = first.estimate.time
        terms = ", ".join(
            f"{name} {value / time.total:.0%}" for name, value in time.terms().items()
        )
        yield f"time of the first one: {terms}"
        parts = first.estimate.memory.parts()
        sizes = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
        yield f"memory of its fullest rank: {sizes}"
        flags = self.flags()
        yield f"Megatron-LM:   {join(flags['megatron_lm'])}"
        machine = self.machine
        refused = why_not_megatron_lite(
            first.estimate.run, fp8=machine.fp8, adapters=machine.frozen
        )
        own = join(flags["megatron_lite"])
        yield f"megatron-lite: {own}" if refused is None else f"megatron-lite can't: {refused}"


COLUMNS = (
    Column("#", 4),
    Column("TP", 3),
    Column("PP", 3),
    Column("VPP", 3),
    Column("EP", 3),
    Column("ETP", 3),
    Column("CP", 3),
    Column("DP", 5),
    Column("batch", 5),
    Column("recompute", 9, is_left=True, gap=2),
    Column("sharding", 18, is_left=True, gap=2),
    Column("step", 8),
    Column("tokens/s", 9),
    Column("memory", 10, gap=2),
    Column("loses by", 0, is_left=True, gap=2),
)


def _row(one: Placed) -> str:
    run, estimate = one.estimate.run, one.estimate
    layout = run.layout
    sizes = (one.rank, layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, run.cp, run.dp)
    texts = [
        *map(str, sizes),
        str(run.micro_batch),
        run.recompute.granularity or "-",
        run.sharding,
        readable_time(estimate.time.total),
        f"{estimate.tokens_per_second:,.0f}",
        readable(estimate.memory.total),
        one.limit,
    ]
    return table_line(COLUMNS, texts)


def best_layouts(header: Header, wanted: Wanted, machine: Machine, top: int) -> BestLayouts:
    """Search the layouts of a model. Raises UsageError if no layout has these sizes."""
    config = header.config
    if config.encoder.layers:
        raise UsageError(
            f"{config.family}: plan estimates no times of models with an encoder and a decoder; with no options but "
            "--gpus and --gpu-memory, it lists their layouts"
        )
    wanted = replace(
        wanted, vocab_divisor=header.vocab_divisor or DEFAULT_DIVISOR, dtype=_trained(config)
    )
    config = changed(config, {"dtype": wanted.dtype})
    every, tried = search(config, replace(wanted, fixed={}), machine)
    chosen, more = search(config, wanted, machine) if wanted.fixed else (every, 0)
    layouts = best_of_each(every)
    if not chosen:
        chosen = [_smallest(config, wanted, machine)]
    first = (layouts or chosen)[0]
    times = [one.time.total for one in layouts]
    ranks = {id(one): rank for rank, one in enumerate(layouts, 1)}
    placed = [
        _placed(
            one, first, ranks.get(id(one)) or bisect_left(times, one.time.total) + 1, wanted.memory
        )
        for one in best_of_each(chosen)[:top]
    ]
    return BestLayouts(config, machine, wanted, tuple(placed), tried + more, len(layouts))


def _placed(one: Estimate, first: Estimate, rank: int, memory: int) -> Placed:
    if one.memory.total > memory:
        return Placed(rank, one, TOO_SMALL)
    own, best = one.time.terms(), first.time.terms()
    if one.time.total <= first.time.total:
        return Placed(rank, one, max(TERMS, key=lambda term: own[term]))
    return Placed(rank, one, max(TERMS, key=lambda term: own[term] - best[term]))


def _smallest(config: ModelConfig, wanted: Wanted, machine: Machine) -> Estimate:
    """Return the run that needs the least memory. Raises UsageError if no run has these sizes."""
    estimator = Estimator(config, machine)
    runs = (estimator.estimate(run) for run in candidates(config, wanted, machine.gpu))
    found = min(runs, key=lambda one: one.memory.total, default=None)
    if found is None:
        raise UsageError(_reason(config, wanted))
    return found


_FLAGS = {"micro_batch": "--micro-batch-size"}
"""Sizes whose flags have other names."""


def _reason(config: ModelConfig, wanted: Wanted) -> str:
    """Return why no run has these sizes, with the flags of plan."""
    sizes = {
        "gpus": wanted.gpus,
        "seq-length": wanted.seq,
        "global-batch-size": wanted.global_batch,
        **wanted.fixed,
    }
    flags = [f"{_FLAGS.get(name, f'--{name}')} {size}" for name, size in sizes.items()]
    given = " ".join(flags)
    product = prod(wanted.fixed.get(name, 1) for name in ("tp", "pp", "cp"))
    if wanted.gpus % product:
        return f"{given}: --tp x --pp x --cp = {product} has to divide --gpus {wanted.gpus}; choose other sizes"
    vpp = wanted.fixed.get("vpp", 1)
    if vpp > 1 and wanted.fixed.get("pp", 2) * vpp > config.layer_count:
        return f"{given}: {config.layer_count} layers are fewer than --pp x --vpp stages; choose a smaller size"
    if vpp > 1 and (wanted.fixed.get("pp") == 1 or wanted.gpus == 1):
        return f"--vpp {vpp} needs --pp 2 or more; leave it out"
    for flag, size, whole, what in _divisions(config, wanted.fixed):
        if whole % size:
            return f"{flag} {size} has to divide {what} = {whole}; choose another size"
    return (
        f"no layout of {config.family} has these sizes: {given}; --global-batch-size has to be a multiple of the "
        "data-parallel ranks x --micro-batch-size"
    )


def _divisions(
    config: ModelConfig, fixed: Mapping[str, int]
) -> Iterator[tuple[str, int, int, str]]:
    """Yield (flag, its size, the number that it has to divide, the name of that number)."""
    sizes = config.sizes()
    if "tp" in fixed:
        yield "--tp", fixed["tp"], sizes["heads"], "heads"
    if "ep" in fixed:
        yield "--ep", fixed["ep"], config.experts.count or 1, "experts"
    if "etp" in fixed and config.experts.count:
        yield "--etp", fixed["etp"], config.experts.ffn, "the experts' ffn"


def _trained(config: ModelConfig) -> str:
    """Return the dtype in which the model is trained: that of its weights if a training run can have it."""
    return config.dtype if config.dtype in ("bfloat16", "float16", "float32") else "bfloat16"
