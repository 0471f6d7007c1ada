"""`megatron-lite rank-experts`: measures the experts of a mixture, and names those to keep."""

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from formats.whole_file import write_whole
from formats.wording import counted
from megaconv.engine.kept_experts import (
    layers_with_experts,
    require_routable,
    with_kept_experts,
)
from megaconv.errors import UnsupportedInput, UsageError
from megaconv.model.ir import OpenedSource
from megaconv.model.subjects import Experts
from megaconv.options.kept_experts import EVERYWHERE
from megaconv.options.kept_file import KEEP
from megaconv.terminal import show
from megatron_lite.forward.expert_scores import ExpertScores, measure
from megatron_lite.inference.measuring import measured, output_file, pruning, read_passes
from megatron_lite.inference.opening import OpenedEngine

_STATES = 4
"""Copies of hidden states in float32 that a measurement needs."""


@dataclass(frozen=True)
class ExpertRanking:
    """The result of the command."""

    scores: ExpertScores
    keep: dict[str, list[int]]
    """Layers -> the experts that stay, in rising order."""

    def to_json(self) -> dict[str, Any]:
        """Return the result for programs and for --keep-experts."""
        return {
            "tokens": self.scores.tokens,
            KEEP: self.keep,
            "chosen": {layer: found.tokens for layer, found in self.scores.layers.items()},
            "scores": {layer: found.scores for layer, found in self.scores.layers.items()},
        }

    def lines(self) -> Iterator[str]:
        """Yield the result as lines."""
        width = max(len("layer"), *map(len, self.keep))
        yield f"{'layer':{width}}  choices  output"
        for layer, kept in self.keep.items():
            found = self.scores.layers[layer]
            choices = _share(found.tokens, kept)
            output = _share(found.outputs, kept)
            yield f"{layer:{width}}  {choices:7.1%}  {output:6.1%}"
        tokens = counted(self.scores.tokens, "token")
        yield f"choices: the share of the tokens' choices that are experts left out, of {tokens}"
        yield "output: their share of the sum of the norms of all experts' outputs"
        yield from self._idle()

    def _idle(self) -> Iterator[str]:
        """Yield a line if no token chooses some experts."""
        numbers = [tokens for found in self.scores.layers.values() for tokens in found.tokens]
        idle = numbers.count(0)
        if idle:
            experts = counted(len(numbers), "expert")
            yield f"{idle} of {experts} are chosen by no token; more samples may choose some of them"


def _share(amounts: Sequence[float], kept: Sequence[int]) -> float:
    """Return the share of those that are not kept."""
    total = sum(amounts)
    return 1 - sum(amounts[expert] for expert in kept) / total if total else 0.0


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    output = output_file(given)

    def work(opened: OpenedEngine) -> None:
        ranking = _ranked(given, opened)
        write_whole(output, (json.dumps(ranking.to_json()) + "\n").encode())
        for line in ranking.lines():
            show(line)
        size = len(next(iter(ranking.keep.values())))
        show(
            f"{output}: {size} of the {counted(opened.config.experts.count, 'expert')} of each layer"
        )
        option = f"--keep-experts {shlex.quote(str(output))}"
        show(f"  {pruning(given.load, opened.start.inside_whole, option)}")

    measured("rank-experts", given, work)


def _ranked(given: argparse.Namespace, opened: OpenedEngine) -> ExpertRanking:
    """Measure the experts. Raises UsageError, UnsupportedInput, NotExpressible."""
    experts = opened.config.experts
    if not layers_with_experts(opened.start.header):
        raise UnsupportedInput(
            f"{given.load}: has no experts; `megatron-lite rank-layers` measures layers"
        )
    left_out = _left_out(given.leave_out, experts)
    _require_expressible(opened, given.load, left_out)
    scores = measure(opened.engine, read_passes(given, opened, _STATES))
    keep = {layer: kept(found.scores, experts, left_out) for layer, found in scores.layers.items()}
    return ExpertRanking(scores, keep)


def kept(scores: Sequence[float], experts: Experts, left_out: int) -> list[int]:
    """Return the experts of the highest scores, the same number of each of the router's groups."""
    groups = experts.groups or 1
    of_group = experts.count // groups
    stay = of_group - left_out // groups
    found: list[int] = []
    for first in range(0, experts.count, of_group):
        members = sorted(range(first, first + of_group), key=lambda expert: -scores[expert])
        found += members[:stay]
    return sorted(found)


def _left_out(asked: int | None, experts: Experts) -> int:
    """Return the number of experts to leave out of each layer. Raises UsageError."""
    groups = experts.groups or 1
    found, subject = asked, f"--leave-out {asked}"
    if found is None:
        found = groups * max(1, experts.count // groups // 4)
        subject = f"--leave-out {found} (the default)"
    if not 0 < found < experts.count:
        raise UsageError(
            f"{subject}: a layer has {experts.count} experts; give a number from 1 to {experts.count - 1}"
        )
    if found % groups:
        raise UsageError(
            f"{subject}: the router has {groups} groups of experts; give a multiple of {groups}"
        )
    stay = kept([0.0] * experts.count, experts, found)
    require_routable(experts, stay, subject)
    return found


def _require_expressible(opened: OpenedEngine, place: str, left_out: int) -> None:
    """Raise what `convert --keep-experts` raises for the model, before anything is measured."""
    experts = opened.config.experts
    stay = kept([0.0] * experts.count, experts, left_out)
    source = OpenedSource(opened.start.header, opened.start.tensors)
    with_kept_experts(source, {EVERYWHERE: stay}, place)
