"""`megatron-lite rank-layers`: measures the layers of a model, and names those that can be left out with the least change."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from formats.wording import counted
from megaconv.engine.chosen_layers import require_choosable, with_layers
from megaconv.errors import CheckpointError, NotExpressible, UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.ir import OpenedSource
from megaconv.terminal import show
from megatron_lite.forward.influence import Influence, measure
from megatron_lite.inference.measuring import measured, pruning, read_passes
from megatron_lite.inference.opening import OpenedEngine


@dataclass(frozen=True)
class Ranking:
    """The result of the command."""

    place: str
    """The model, for commands."""
    inside_whole: bool
    """True if the layers are those of the language model of a multimodal model."""
    influence: Influence
    block: range
    """The consecutive layers of the least change that can be left out."""
    single: Sequence[int]
    """The layers of the least change, each by itself; empty if no model remains without them."""

    def to_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        return {
            "tokens": self.influence.tokens,
            "layers": [
                {"layer": number, "change": change}
                for number, change in enumerate(self.influence.layers)
            ],
            "leave_out": len(self.block),
            "block": {
                "first": self.block[0],
                "last": self.block[-1],
                "degrees": self._degrees,
                "layers": self._kept(self.block),
            },
            "single": {"left_out": list(self.single), "layers": self._kept(self.single)}
            if self.single
            else None,
        }

    @property
    def _degrees(self) -> float:
        """The angle between the input and the output of the block."""
        return 180 * self.influence.blocks[self.block[0]]

    def lines(self) -> Iterator[str]:
        """Yield the result as lines."""
        yield "layer  change"
        for number, change in enumerate(self.influence.layers):
            yield f"{number:5}  {change:.4f}"
        tokens = counted(self.influence.tokens, "token")
        yield f"change: 1 - the cosine between input and output, the mean of {tokens}"
        yield f"the {self._named_block()} (an angle of {self._degrees:.1f} degrees)"
        yield f"  {self._command(self.block)}"
        if self.single and list(self.block) != list(self.single):
            listed = ", ".join(map(str, self.single))
            yield f"the {len(self.single)} single layers of the least change: {listed}"
            yield f"  {self._command(self.single)}"

    def _named_block(self) -> str:
        if len(self.block) == 1:
            return f"layer of the least change: {self.block[0]}"
        numbers = f"layers {self.block[0]} to {self.block[-1]}"
        return f"{len(self.block)} consecutive layers of the least change: {numbers}"

    def _command(self, left_out: Sequence[int]) -> str:
        return pruning(self.place, self.inside_whole, f"--layers {self._kept(left_out)}")

    def _kept(self, left_out: Sequence[int]) -> str:
        """Return the layers that stay, as --layers takes them."""
        return ranges(kept_layers(len(self.influence.layers), left_out))


def kept_layers(count: int, left_out: Sequence[int]) -> list[int]:
    """Return the numbers of the layers that stay. count: of all layers."""
    return [number for number in range(count) if number not in left_out]


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as --layers takes them: 0-20,29-31."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    measured("rank-layers", given, lambda opened: _show(_ranked(given, opened), as_json=given.json))


def _show(ranking: Ranking, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(ranking.to_json(), indent=2))
        return
    for line in ranking.lines():
        show(line)


def _ranked(given: argparse.Namespace, opened: OpenedEngine) -> Ranking:
    """Measure the layers. Raises UsageError, NotExpressible."""
    config = opened.config
    require_choosable(
        opened.start.header, given.load, "rank-layers", "no layer of it can be left out"
    )
    left_out = _left_out(given.leave_out, config)
    # The inputs of a block, and copies of two states in float32.
    passes = read_passes(given, opened, left_out + 4)
    influence = measure(opened.engine, passes, left_out)
    return _proposed(given.load, opened, influence, left_out)


def _proposed(place: str, opened: OpenedEngine, influence: Influence, left_out: int) -> Ranking:
    """Choose layers without which a model remains. Raises NotExpressible if there are none."""
    source = OpenedSource(opened.start.header, opened.start.tensors)

    def refusal(layers: Sequence[int]) -> CheckpointError | None:
        """Return the reason why these layers can't be left out."""
        kept = kept_layers(opened.config.layer_count, layers)
        try:
            config = with_layers(source, kept, place).header.config
            family(config.family).write_hf(config)
        except CheckpointError as error:
            return error
        return None

    blocks = [range(first, first + left_out) for first in influence.by_block]
    reasons: list[CheckpointError] = []
    for block in blocks:
        reason = refusal(block)
        if reason is None:
            single = influence.least_layers(left_out)
            others = [] if refusal(single) else single
            return Ranking(place, opened.start.inside_whole, influence, block, others)
        reasons.append(reason)
    raise NotExpressible(
        f"no {counted(left_out, 'consecutive layer')} can be left out: {reasons[0]}"
    )


def _left_out(asked: int | None, config: ModelConfig) -> int:
    """Return the number of layers to leave out. Raises UsageError, NotExpressible."""
    count = config.layer_count
    if count < 2:
        raise NotExpressible(f"a {config.family} with one layer has none to leave out")
    found = max(1, count // 4) if asked is None else asked
    if not 0 < found < count:
        raise UsageError(
            f"--leave-out {found}: the model has {count} layers; give a number from 1 to {count - 1}"
        )
    return found
