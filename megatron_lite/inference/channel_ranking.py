"""`megatron-lite rank-channels`: measures the channels of hidden states and of MLPs and the heads of mixers, and names those to keep."""

import argparse
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from formats.whole_file import write_whole
from formats.wording import counted
from megaconv.engine.kept_channels import NarrowedModel, with_kept_channels
from megaconv.engine.kept_places import HEADS, PARTS, places_of
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
from megatron_lite.inference.kept_choice import ChannelChoice, Choice, head_choice
from megatron_lite.inference.measuring import measured, output_file, pruning, read_passes
from megatron_lite.inference.opening import OpenedEngine

SIZES = {
    "hidden_size": HIDDEN,
    "ffn_hidden_size": "mlp.ffn",
    "moe_ffn_hidden_size": "experts.ffn",
    "moe_shared_expert_intermediate_size": "experts.shared_ffn",
    "num_attention_heads": "attention.heads",
    "num_query_groups": "attention.kv_heads",
    "mamba_num_heads": "mamba.heads",
    "mamba_num_groups": "mamba.groups",
    "linear_num_value_heads": "linear.value_heads",
    "linear_num_key_heads": "linear.key_heads",
}
"""Flags -> the fields that they give."""
_FLAGS = {field: f"--{name.replace('_', '-')}" for name, field in SIZES.items()}
_STATES = 4
"""Copies of hidden states in float32 that a measurement needs."""


@dataclass(frozen=True)
class ChannelRanking:
    """The result of the command."""

    keep: Mapping[str, Sequence[int]]
    """`hidden`, or the names of MLPs and mixers -> the channels or heads that stay, in rising order."""
    left_out: Mapping[str, float]
    """The same names -> the share of those that are left out in the sum of all scores."""
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the result for programs and for --keep-channels."""
        return {"tokens": self.tokens, KEEP: self.keep, "left_out": self.left_out}

    def write(self, output: Path) -> None:
        """Write the file for --keep-channels."""
        write_whole(output, (json.dumps(self.to_json()) + "\n").encode())

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
        yield f"left out: the share of the channels or heads left out in the sum of all scores, of {counted(self.tokens, 'token')}"


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    output = output_file(given)

    def work(opened: OpenedEngine) -> None:
        chosen, fields = _chosen(given, opened)
        # What `convert --keep-channels` refuses is refused before anything is measured.
        narrowed = _narrowed(opened, given.load, chosen)
        passes = read_passes(given, opened, _STATES)
        scores = measure(opened.engine, passes, fields)
        ranking = _ranking(scores, chosen)
        ranking.write(output)
        _show(ranking, narrowed, output)
        option = f"--keep-channels {shlex.quote(str(output))}"
        show(f"  {pruning(given.load, opened.start.inside_whole, option)}")

    measured("rank-channels", given, work)


def _show(ranking: ChannelRanking, narrowed: NarrowedModel, output: Path) -> None:
    for line in ranking.lines():
        show(line)
    for notice in narrowed.notices:
        show(f"{output}: {notice}")


def _chosen(
    given: argparse.Namespace, opened: OpenedEngine
) -> tuple[dict[str, Choice], Collection[str]]:
    """Return (places -> how much of them stays, the fields that hold their numbers). Raises UsageError, UnsupportedInput."""
    config = opened.config
    places = places_of(canonical_axes(family(config.family).rows, config))
    choices = _choices(_asked(given, config, set(places.values())), config)
    chosen = {name: choices[field] for name, field in places.items() if field in choices}
    return chosen, choices.keys()


def _asked(
    given: argparse.Namespace, config: ModelConfig, known: Collection[str]
) -> dict[str, int]:
    """Return the numbers that were asked for, by field. known: fields of the model. Raises UsageError, UnsupportedInput."""
    asked = {
        field: value for name, field in SIZES.items() if (value := getattr(given, name)) is not None
    }
    if not asked:
        raise UsageError(
            f"rank-channels: give a size that the model gets: {', '.join(_FLAGS.values())}"
        )
    groups = {kind.group_field for field, kind in HEADS.items() if field in known}
    for field, value in asked.items():
        if field not in {*known, *groups}:
            raise UnsupportedInput(
                f"{_FLAGS[field]}: {given.load} has no {PARTS[field]}; leave the flag out"
            )
        before = value_of(config, field)
        if not 0 < value < before:
            raise UsageError(
                f"{_FLAGS[field]} {value}: {given.load} has {before} {PARTS[field]}; give a number from 1 to {before - 1}"
            )
    return asked


def _choices(asked: Mapping[str, int], config: ModelConfig) -> dict[str, Choice]:
    """Return the choices by the fields of places. Raises UsageError."""
    found: dict[str, Choice] = {}
    for field, kind in HEADS.items():
        if field in asked or kind.group_field in asked:
            found[field] = head_choice(kind, asked, config, _FLAGS)
    of_heads = {field for kind in HEADS.values() for field in (kind.field, kind.group_field)}
    channels = asked.keys() - of_heads
    return found | {field: ChannelChoice(asked[field]) for field in channels}


def _narrowed(opened: OpenedEngine, place: str, chosen: Mapping[str, Choice]) -> NarrowedModel:
    """Return a model of the chosen sizes, as `convert --keep-channels` makes one. Raises what it raises."""
    source = OpenedSource(opened.start.header, opened.start.tensors)
    first = {name: choice.first() for name, choice in chosen.items()}
    return with_kept_channels(source, KeptChannels(first), place)


def _ranking(measured: ChannelScores, chosen: Mapping[str, Choice]) -> ChannelRanking:
    """Choose what has the highest scores."""
    keep = {name: chosen[name].best(scores) for name, scores in measured.scores.items()}
    left_out = {
        name: _share_left_out(scores, keep[name]) for name, scores in measured.scores.items()
    }
    return ChannelRanking(keep, left_out, measured.tokens)


def _share_left_out(scores: Tensor, keep: Sequence[int]) -> float:
    rest = scores.clone()
    rest[keep] = 0
    total = float(scores.sum())
    return float(rest.sum()) / total if total else 0.0
