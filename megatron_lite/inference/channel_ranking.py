"""`megatron-lite rank-channels`: measures the channels of hidden states and of MLPs, and names those to keep."""

import argparse
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from formats.whole_file import write_whole
from formats.wording import counted
from megaconv.engine.kept_channels import NAMES, places_of, with_kept_channels
from megaconv.errors import UnsupportedInput, UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.ir import OpenedSource
from megaconv.model.table import canonical_axes
from megaconv.options.kept_channels import HIDDEN, KeptChannels
from megaconv.options.kept_file import KEEP
from megaconv.terminal import show
from megatron_lite.forward.channel_scores import ChannelScores, measure
from megatron_lite.inference.measuring import measured, output_file, pruning, read_passes
from megatron_lite.inference.opening import OpenedEngine

SIZES = {
    "hidden_size": HIDDEN,
    "ffn_hidden_size": "mlp.ffn",
    "moe_ffn_hidden_size": "experts.ffn",
    "moe_shared_expert_intermediate_size": "experts.shared_ffn",
}
"""Flags -> the fields that they give."""
_STATES = 4
"""Copies of hidden states in float32 that a measurement needs."""


@dataclass(frozen=True)
class ChannelRanking:
    """The result of the command."""

    keep: Mapping[str, Sequence[int]]
    """`hidden`, or the names of MLPs -> the channels that stay, in rising order."""
    left_out: Mapping[str, float]
    """The same names -> the share of the channels that are left out in the sum of all scores."""
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the result for programs and for --keep-channels."""
        return {"tokens": self.tokens, KEEP: self.keep, "left_out": self.left_out}

    def lines(self) -> Iterator[str]:
        """Yield the result as lines. All experts of a layer have one line."""
        shares: dict[str, list[float]] = {}
        for name, share in self.left_out.items():
            mixture, experts, _ = name.partition(".experts.")
            shares.setdefault(mixture + experts.rstrip("."), []).append(share)
        width = max(map(len, ("channels", *shares)))
        yield f"{'channels':{width}}  left out"
        for name, each in shares.items():
            yield f"{name:{width}}  {sum(each) / len(each):8.1%}"
        yield f"left out: the share of the channels left out in the sum of all scores, of {counted(self.tokens, 'token')}"


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    output = output_file(given)

    def work(opened: OpenedEngine) -> None:
        config = opened.config
        places = places_of(canonical_axes(family(config.family).rows, config))
        sizes = _sizes(given, config, set(places.values()))
        fields = {name: field for name, field in places.items() if field in sizes}
        _require_expressible(opened, given.load, {name: sizes[fields[name]] for name in fields})
        passes = read_passes(given, opened, _STATES)
        ranking = _ranking(measure(opened.engine, passes, sizes), fields, sizes)
        write_whole(output, (json.dumps(ranking.to_json()) + "\n").encode())
        for line in ranking.lines():
            show(line)
        for field, count in sizes.items():
            show(f"{output}: {count} of {value_of(config, field)} channels of {NAMES[field]}")
        option = f"--keep-channels {shlex.quote(str(output))}"
        show(f"  {pruning(given.load, opened.start.inside_whole, option)}")

    measured("rank-channels", given, work)


def _sizes(
    given: argparse.Namespace, config: ModelConfig, known: Collection[str]
) -> dict[str, int]:
    """Return the sizes that were asked for, by field. known: fields of the model. Raises UsageError, UnsupportedInput."""
    flags = {name: f"--{name.replace('_', '-')}" for name in SIZES}
    asked = {name: value for name in SIZES if (value := getattr(given, name)) is not None}
    if not asked:
        raise UsageError(
            f"rank-channels: give a size that the model gets: {', '.join(flags.values())}"
        )
    for name, value in asked.items():
        if SIZES[name] not in known:
            raise UnsupportedInput(
                f"{flags[name]}: {given.load} has no such channels; leave the flag out"
            )
        before = value_of(config, SIZES[name])
        if not 0 < value < before:
            raise UsageError(
                f"{flags[name]} {value}: {given.load} has {before} channels there; give a number from 1 to {before - 1}"
            )
    return {SIZES[name]: value for name, value in asked.items()}


def _require_expressible(opened: OpenedEngine, place: str, counts: Mapping[str, int]) -> None:
    """Raise what `convert --keep-channels` raises for the model, before anything is measured. counts: of channels by name."""
    source = OpenedSource(opened.start.header, opened.start.tensors)
    first = {name: range(count) for name, count in counts.items()}
    with_kept_channels(source, KeptChannels(first), place)


def _ranking(
    measured: ChannelScores, fields: Mapping[str, str], sizes: Mapping[str, int]
) -> ChannelRanking:
    """Choose the channels of the highest scores. fields: of the sizes of the measured places."""
    keep = {name: kept(scores, sizes[fields[name]]) for name, scores in measured.scores.items()}
    left_out = {
        name: _share_left_out(scores, keep[name]) for name, scores in measured.scores.items()
    }
    return ChannelRanking(keep, left_out, measured.tokens)


def kept(scores: Tensor, count: int) -> list[int]:
    """Return the channels of the highest scores in rising order; of equal ones, the first."""
    order = scores.sort(descending=True, stable=True).indices
    return sorted(order[:count].tolist())


def _share_left_out(scores: Tensor, keep: Sequence[int]) -> float:
    rest = scores.clone()
    rest[keep] = 0
    total = float(scores.sum())
    return float(rest.sum()) / total if total else 0.0
