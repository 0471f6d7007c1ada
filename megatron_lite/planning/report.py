"""A plan, for people and for programs."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from megaconv.commands.units import readable
from megaconv.errors import LayoutError, NotExpressible
from megaconv.families import family
from megaconv.model.table import canonical_shapes
from megatron_lite.models.plan import make_plan
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.planning.bubble import bubble
from megatron_lite.planning.memory import Memory, stage_memory
from megatron_lite.planning.stages import Described
from megatron_lite.planning.traffic import Traffic, stage_traffic
from megatron_lite.settings.wording import counted

_MESSAGES = {"pp": "messages between stages", "cp": "keys, values in a ring", "cp_far": "keys, values in a ring"}


@dataclass(frozen=True)
class Planned:
    """Raises LayoutError where it is read, for a model that can't be sharded so."""

    run: Described

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, without padding."""
        shapes = canonical_shapes(family(self.run.config.family).rows, self.run.config)
        return sum(prod(shape) for shape in shapes.values())

    @cached_property
    def memory(self) -> list[Memory]:
        return stage_memory(self.run)

    @cached_property
    def traffic(self) -> list[list[Traffic]]:
        """By pipeline rank."""
        return [stage_traffic(self.run, pp_rank) for pp_rank in range(self.run.sizes.layout.pp)]

    @cached_property
    def bubble(self) -> float:
        layout = self.run.sizes.layout
        return bubble(layout.pp, layout.vpp, self.run.microbatches, layout.stage_layers)

    @cached_property
    def untrained(self) -> str | None:
        """Why this trainer can't train it yet; None where it can."""
        run = self.run
        ranks = TensorGroup(None, 0, run.sizes.layout.tp, run.sequence)
        try:
            make_plan(run.config, run.sizes.layout, run.options, ranks)
        except (NotExpressible, LayoutError) as error:
            return str(error)
        return None

    def to_json(self) -> dict[str, Any]:
        run = self.run
        return {
            "family": run.config.family, "parameters": self.parameters, "world_size": run.world,
            "layout": {
                **run.sizes.layout.sizes(), "vpp": run.sizes.layout.vpp, "cp": run.sizes.cp, "dp": run.sizes.dp,
                "expert_dp": run.expert_dp,
            },
            "batch": {
                "global": run.sizes.batch.full, "micro": run.sizes.micro_batch, "sequence": run.sizes.seq,
                "microbatches": run.microbatches,
            },
            "bubble": self.bubble, "not_trained_yet": self.untrained,
            "stages": [
                {
                    "pp_rank": pp_rank, "parameters": memory.parameters, "state_bytes": memory.kept,
                    "activation_bytes": memory.activations, "bytes": memory.total,
                    "communication": [
                        {"group": item.group, "kind": item.kind, "ranks": item.ranks, "bytes": item.bytes, "sent_bytes": item.sent}
                        for item in traffic
                    ],
                }
                for pp_rank, (memory, traffic) in enumerate(zip(self.memory, self.traffic, strict=True))
            ],
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For people."""
        run = self.run
        model = f"{run.config.family}, {self.parameters:,} parameters, {run.options.dtype}"
        context = f", CP {run.sizes.cp}" if run.sizes.cp > 1 else ""
        yield f"{model}; {counted(run.world, 'rank')}: {run.sizes.layout}{context}, DP {run.sizes.dp}"
        yield (
            f"a step: {counted(run.sizes.batch.full, 'sequence')} of {run.sizes.seq} tokens, "
            f"{counted(run.microbatches, 'microbatch', 'microbatches')} of "
            f"{run.sizes.micro_batch} on each rank; {self.bubble:.1%} of it is the pipeline's bubble"
        )
        yield f"{'stage':>5}  {'parameters a rank':>18}  {'with gradients':>14}  {'activations':>11}  {'together':>10}"
        yield f"{'':>5}  {'':>18}  {'and optimizer':>14}"
        for pp_rank, one in enumerate(self.memory):
            sizes = f"{readable(one.kept):>14}  {readable(one.activations):>11}  {readable(one.total):>10}"
            yield f"{pp_rank:>5}  {one.parameters:>18,}  {sizes}"
        busiest = max(range(len(self.traffic)), key=lambda rank: sum(item.sent for item in self.traffic[rank]))
        if self.traffic[busiest]:
            yield f"what a rank of stage {busiest}, the busiest, hands over in a step:"
        for item in self.traffic[busiest]:
            what = f"{item.kind} of {item.ranks} ranks" if item.kind != "send" else _MESSAGES[item.group]
            yield f"{item.group:>8}  {what:<28} {readable(round(item.bytes)):>11}, of which it sends {readable(round(item.sent))}"
        if self.untrained is not None:
            yield f"this trainer can't train it so yet: {self.untrained}"
