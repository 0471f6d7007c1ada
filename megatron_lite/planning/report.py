"""Formats a plan as text or JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from formats.wording import counted
from megaconv.commands.units import readable
from megaconv.errors import LayoutError, NotExpressible
from megaconv.planning.activations import offloaded_bytes
from megaconv.planning.bubble import bubble
from megaconv.planning.collectives import Traffic
from megaconv.planning.estimate import Estimator
from megaconv.planning.forward_time import forward_time
from megaconv.planning.gpus import DEFAULT_GPU, GB, GPUS, Gpu
from megaconv.planning.layer_costs import Machine
from megaconv.planning.model_size import parameter_count
from megaconv.planning.run import Run
from megaconv.planning.step_time import StepTime, step_time
from megatron_lite.models.trainable import check_trained
from megatron_lite.planning.generation import generation_seconds, rows_at_once
from megatron_lite.planning.gradients import stage_traffic
from megatron_lite.planning.memory import Memory, stage_memory
from megatron_lite.planning.stages import Described

_WIDTHS = (5, 18, 14, 11, 10)
"""The widths of the columns in the table of memory."""
_INDENT = " " * 7
_MESSAGES = {
    "pp": "messages between stages",
    "cp": "keys, values in a ring",
    "cp_far": "keys, values in a ring",
}


@dataclass(frozen=True)
class Planned:
    """The results for a described run. Its properties raise LayoutError for a model that can't be sharded in this layout."""

    described: Described
    gpu: Gpu = GPUS[DEFAULT_GPU]
    """The GPU for which the time of a step is estimated."""

    @property
    def run(self) -> Run:
        return self.described.run

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model, without padding."""
        return parameter_count(self.run.config)

    @cached_property
    def memory(self) -> list[Memory]:
        return stage_memory(self.described)

    @cached_property
    def offloaded(self) -> int:
        """Bytes of activations that each rank keeps in main memory."""
        return offloaded_bytes(self.run)

    @cached_property
    def traffic(self) -> list[list[Traffic]]:
        """The traffic by pipeline rank."""
        return [stage_traffic(self.described, pp_rank) for pp_rank in range(self.run.layout.pp)]

    @cached_property
    def bubble(self) -> float:
        layout = self.run.layout
        layers = [
            sum(len(part.layers) for part in self.run.stacks(chunk)) for chunk in layout.chunks()
        ]
        return bubble(layout.pp, layout.vpp, self.run.microbatches, layers)

    @cached_property
    def time(self) -> StepTime | None:
        """The estimated time of all updates of a step; None for a model with an encoder and a decoder."""
        if self.run.config.encoder.layers:
            return None
        machine = self._machine
        estimator = Estimator(self.run.config, machine)
        update = step_time(self.run, estimator.stages(self.run), machine)
        return update.times(self.described.work.updates)

    @property
    def _machine(self) -> Machine:
        is_fp8 = self.described.options.fp8 is not None
        return Machine(self.gpu, fp8=is_fp8, frozen=self.run.frozen)

    @cached_property
    def generation(self) -> float:
        """Seconds in which the completions of a step are generated."""
        has_any = self.described.work.completion > 0
        return generation_seconds(self.described, self._machine) if has_any else 0.0

    @cached_property
    def measuring(self) -> float:
        """Seconds of one pass without gradients of all sequences of a step."""
        work = self.described.work
        has_any = work.measured or work.measured_once
        return forward_time(self.run, self._machine) if has_any else 0.0

    @cached_property
    def teaching(self) -> float:
        """Seconds of a teacher's passes in a step; 0 without one."""
        teacher = self.described.teacher
        return 0.0 if teacher is None else forward_time(teacher.run, self._machine)

    @property
    def reference_seconds(self) -> float:
        """Seconds for the answers of a step, of the passes that the reference makes before the first step."""
        return self.described.work.measured_once * self.measuring

    @property
    def terms(self) -> dict[str, float]:
        """The terms of a step's time, in seconds. Empty for a model with an encoder and a decoder."""
        if self.time is None:
            return {}
        before = {
            "generation": self.generation,
            self._measured: self.described.work.measured * self.measuring,
            "teacher": self.teaching,
        }
        return {**{name: each for name, each in before.items() if each}, **self.time.terms()}

    @property
    def _measured(self) -> str:
        """The name of what the passes without gradients compute."""
        return "vectors" if self.described.work.rests_head else "log-probabilities"

    @cached_property
    def untrained(self) -> str | None:
        """The reason why this trainer can't train the model in this layout, or None."""
        run = self.run
        try:
            check_trained(run.config, run.layout, self.described.options, sequence=run.sequence)
        except (NotExpressible, LayoutError) as error:
            return str(error)
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as an object for JSON."""
        run = self.run
        return {
            "family": run.config.family, "parameters": self.parameters, "world_size": run.world,
            "layout": {
                **run.layout.sizes(), "vpp": run.layout.vpp, "cp": run.cp, "dp": run.dp,
                "expert_dp": run.expert_dp,
            },
            "batch": {
                "global": run.global_batch, "micro": run.micro_batch, "sequence": run.seq,
                **({"decoder_sequence": run.decoder_seq} if run.decoder_seq else {}),
                "microbatches": run.microbatches,
            },
            "gpu": self.gpu.name, "gpu_memory": self.gpu.memory,
            "step_seconds": sum(self.terms.values()) if self.time else None,
            "terms": self.terms or None,
            **({"reference_seconds": self.reference_seconds} if self.described.work.measured_once else {}),
            "bubble": self.bubble, "not_trained_yet": self.untrained, "offloaded_bytes": self.offloaded,
            "offload_seconds": self.time.copies if self.time else None,
            "stages": [self._stage_json(pp_rank) for pp_rank in range(len(self.memory))],
        }  # fmt: skip

    def _stage_json(self, pp_rank: int) -> dict[str, Any]:
        memory, traffic = self.memory[pp_rank], self.traffic[pp_rank]
        return {
            "pp_rank": pp_rank, "parameters": memory.parameters, "adapter_parameters": memory.adapters,
            "whole_parameters": memory.whole,
            "state_bytes": memory.kept, "widened_bytes": memory.widened,
            "activation_bytes": memory.activations, "passing_bytes": memory.passing,
            "reference_bytes": memory.reference, "teacher_bytes": memory.teacher,
            "encoder_bytes": memory.encoders, "generation_bytes": memory.generation,
            "bytes": memory.total,
            "communication": [
                {"group": item.group, "kind": item.kind, "ranks": item.ranks, "bytes": item.bytes, "sent_bytes": item.sent}
                for item in traffic
            ],
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text report."""
        yield from self._description()
        yield from self._time_lines()
        yield from self._memory_lines()
        yield from self._traffic_lines()
        if self.untrained is not None:
            yield f"this trainer can't train it so yet: {self.untrained}"

    def _description(self) -> Iterator[str]:
        run = self.run
        model = f"{run.config.family}, {self.parameters:,} parameters, {run.dtype}"
        ranks = counted(run.world, "rank")
        context = f", CP {run.cp}" if run.cp > 1 else ""
        yield f"{model}; {ranks}: {run.layout}{context}, DP {run.dp}"
        sequences = counted(run.global_batch, "sequence")
        microbatches = counted(run.microbatches, "microbatch", "microbatches")
        lengths = f"{run.seq} and {run.decoder_seq}" if run.decoder_seq else str(run.seq)
        yield (
            f"a step: {sequences} of {lengths} tokens, {microbatches} of {run.micro_batch} on each rank; "
            f"{self.bubble:.1%} of it is the pipeline's bubble"
        )

    def _time_lines(self) -> Iterator[str]:
        if self.time is None:
            return
        total = sum(self.terms.values())
        shares = {name: seconds / total for name, seconds in self.terms.items()}
        largest = max(shares, key=lambda name: shares[name])
        terms = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        yield f"estimated on {self.gpu.name}: {total:.2f} s a step: {terms}; {largest} dominates"
        if self.described.work.measured_once:
            yield (
                "before the first step, the reference's log-probabilities take "
                f"{self.reference_seconds:.2f} s for each step's {'rated answers' if self.described.work.rows == 1 else 'pairs'}"
            )

    def _memory_lines(self) -> Iterator[str]:
        yield _row("stage", "parameters a rank", "with gradients", "activations", "together")
        yield _row("", "", "and optimizer", "", "").rstrip()
        for pp_rank, one in enumerate(self.memory):
            kept = readable(one.kept)
            activations = readable(one.activations)
            total = readable(one.total)
            yield _row(str(pp_rank), f"{one.parameters:,}", kept, activations, total)
        most, gpu = max(one.total for one in self.memory), self.gpu
        fits = "" if most <= gpu.memory else ", so it does not fit"
        share = f"{most / gpu.memory:.0%} of the {readable(gpu.memory)} of {gpu.name}"
        yield f"{_INDENT}the fullest rank takes {share}{fits}"
        yield from self._objective_lines()
        widened = max(one.widened for one in self.memory)
        if widened:
            what = "float32 copies for the update of state in bf16"
            yield f"{_INDENT}the last column includes up to {readable(widened)} of {what}"
        passing = max(one.passing for one in self.memory)
        if passing:
            what = "gathered parameters and unreduced gradients"
            yield f"{_INDENT}the last column includes up to {readable(passing)} of {what}"
        if self.offloaded:
            held = readable(self.offloaded)
            yield f"{_INDENT}activations of {held} wait in each rank's main memory{self._copies()}"

    def _objective_lines(self) -> Iterator[str]:
        """Yield the memory that belongs to adapters, to a reference model, to a teacher and to completions."""
        adapters = max(one.adapters for one in self.memory)
        if self.run.frozen:
            whole = max(one.whole for one in self.memory)
            modules = f" and {whole:,} of modules that are trained whole" if whole else ""
            yield (
                f"{_INDENT}gradients and optimizer state belong to {adapters:,} parameters of adapters{modules}; all others are frozen"
            )
        reference = max(one.reference for one in self.memory)
        if reference:
            yield f"{_INDENT}the last column includes {readable(reference)} of the reference model"
        teacher = max(one.teacher for one in self.memory)
        if teacher:
            yield f"{_INDENT}the last column includes up to {readable(teacher)} of the teacher"
        yield from self._encoder_lines()
        generation = max(one.generation for one in self.memory)
        if generation:
            rows = counted(rows_at_once(self.described), "completion")
            yield (
                f"{_INDENT}generation takes {readable(generation)} for {rows} at a time, "
                "and frees them before the activations come"
            )

    def _encoder_lines(self) -> Iterator[str]:
        """Yield the memory of encoders of images. A plan doesn't read the data, which may be texts alone."""
        encoders = max(one.encoders for one in self.memory)
        if encoders:
            yield (
                f"{_INDENT}the last column includes up to {readable(encoders)} for the encoder of images, "
                "which a run on texts alone doesn't load"
            )
        for each in (self.described, self.described.teacher):
            encoder = None if each is None else each.encoder
            if encoder is not None and encoder.parameters is None:
                yield (
                    f"{_INDENT}the encoder of images is left out: {encoder.directory} has no files of weights, "
                    "whose headers tell its size"
                )

    def _copies(self) -> str:
        """Return the time that copies of offloaded activations add to a step."""
        if self.time is None:
            return ""
        speed = self.gpu.host / GB
        return f"; their copies at {speed:.0f} GB/s add {self.time.copies:.2f} s to a step"

    def _traffic_lines(self) -> Iterator[str]:
        """Yield the traffic of the stage that sends most."""
        sent = [sum(item.sent for item in traffic) for traffic in self.traffic]
        busiest = sent.index(max(sent))
        if self.traffic[busiest]:
            yield f"what a rank of stage {busiest}, the busiest, hands over in a step:"
        yield from map(_traffic_line, self.traffic[busiest])


def _traffic_line(item: Traffic) -> str:
    what = f"{item.kind} of {item.ranks} ranks"
    if item.kind == "send":
        what = _MESSAGES[item.group]
    handed_over = readable(round(item.bytes))
    own = readable(round(item.sent))
    return f"{item.group:>8}  {what:<28} {handed_over:>11}, of which it sends {own}"


def _row(*cells: str) -> str:
    """Return a row of the table of memory."""
    padded = [cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)]
    return "  ".join(padded)
