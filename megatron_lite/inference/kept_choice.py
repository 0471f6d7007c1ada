"""Chooses the channels and the heads of the highest scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from formats.wording import counted
from megaconv.engine.kept_places import HeadKind
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of


class Choice(Protocol):
    """The number of parts of a place that stay."""

    def first(self) -> list[int]:
        """Return parts that may stay, whatever their scores, in rising order."""
        ...

    def best(self, scores: Tensor) -> list[int]:
        """Return the parts of the highest scores in rising order; of equal ones, the first. scores: float64 [parts]."""
        ...


@dataclass(frozen=True)
class ChannelChoice:
    """The number of channels that stay."""

    count: int

    def first(self) -> list[int]:
        """See Choice."""
        return list(range(self.count))

    def best(self, scores: Tensor) -> list[int]:
        """See Choice."""
        order = scores.sort(descending=True, stable=True).indices
        return sorted(order[: self.count].tolist())


@dataclass(frozen=True)
class HeadChoice:
    """The numbers of heads and groups of a mixer that stay. All these groups keep the same number of heads."""

    of_group: int
    """Heads of a group before."""
    heads: int
    groups: int

    def first(self) -> list[int]:
        """See Choice."""
        groups = range(self.groups)
        of_each = range(self.heads // self.groups)
        return [group * self.of_group + head for group in groups for head in of_each]

    def best(self, scores: Tensor) -> list[int]:
        """See Choice. The score of a group is the sum of those of its heads that may stay."""
        by_group = scores.reshape(-1, self.of_group)
        ranked = by_group.sort(dim=1, descending=True, stable=True)
        of_each = self.heads // self.groups
        groups = ChannelChoice(self.groups).best(ranked.values[:, :of_each].sum(1))
        heads = ranked.indices[:, :of_each].tolist()
        return sorted(group * self.of_group + head for group in groups for head in heads[group])


def head_choice(
    kind: HeadKind, asked: Mapping[str, int], config: ModelConfig, flags: Mapping[str, str]
) -> HeadChoice:
    """Return the numbers that stay.

    asked: fields -> the numbers that were asked for, of heads, groups or both. flags: fields -> their flags, for messages. Raises
    UsageError for numbers that don't fit together.
    """
    heads, groups = value_of(config, kind.field), value_of(config, kind.group_field)
    of_group = heads // groups
    if kind.field not in asked:
        stay = asked[kind.group_field]
        return HeadChoice(of_group, stay * of_group, stay)
    wanted = asked[kind.field]
    stay = asked.get(kind.group_field, wanted if of_group == 1 else groups)
    if wanted % stay or wanted > stay * of_group:
        raise UsageError(
            f"{flags[kind.field]} {wanted}: the model has {counted(of_group, 'head')} in each group, and {_staying(stay)}; give a multiple "
            f"of {stay} up to {stay * of_group}, or another {flags[kind.group_field]}"
        )
    return HeadChoice(of_group, wanted, stay)


def _staying(groups: int) -> str:
    return f"{counted(groups, 'group')} stay{'s' if groups == 1 else ''}"
