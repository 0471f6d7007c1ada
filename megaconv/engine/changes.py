"""The changes of a model while it is converted, as values for programs. The notices of a report say the same to people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megaconv.engine.averaging import averaged_models
from megaconv.engine.derived import chain_of, first_of
from megaconv.engine.kept_channels import NarrowedModel
from megaconv.engine.kept_experts import KeptExperts
from megaconv.engine.new_vocabulary import NewVocabulary
from megaconv.engine.special_tokens import SPECIAL_IDS, listed
from megaconv.model.ir import Source
from megaconv.options import ConvertOptions
from megaconv.options.vocabulary import MEAN


@dataclass(frozen=True)
class AveragedModel:
    """A model of an average."""

    model: str
    share: float | None
    """The weight of its difference, for methods of differences; None for the model that these are added to."""


@dataclass(frozen=True)
class AverageChange:
    """The models that the weights are an average of."""

    method: str
    models: Sequence[AveragedModel]


@dataclass(frozen=True)
class LayerChange:
    """The layers of the output."""

    before: int
    after: int
    chosen: Sequence[int]
    """The numbers of the input's layers, in the order of the output."""


@dataclass(frozen=True)
class ExpertChange:
    """The experts of a layer."""

    before: int
    after: int
    per_token: int
    granularity: int
    """Parts that each MLP of a dense model is cut into."""
    experts_of: Sequence[str]
    """The models whose MLPs the experts are; empty: the input's own."""
    kept: Mapping[str, Sequence[int]] | None
    """The numbers of the input's experts, in the order of the output, by layer; None if the experts are new."""


@dataclass(frozen=True)
class ChannelChange:
    """The channels of hidden states and MLPs."""

    before: Mapping[str, int]
    """Sizes by field, such as `hidden` and `mlp.ffn`."""
    after: Mapping[str, int]
    kept: str
    """The number of places whose channels were chosen, and a digest of the choice."""


@dataclass(frozen=True)
class VocabularyChange:
    """The rows of the embedding and the head."""

    before: int
    after: int
    copied: int
    """Rows that have the values of the input."""
    filled: int
    """Rows with new values: added ones, and those of the input that belong to new tokens (`--new-rows`)."""
    new_rows: str | None
    """The way to compute the filled rows; None if there are none."""
    tokenizer: str | None
    """The new tokenizer; None if the input's stays."""
    special_tokens: Mapping[str, Mapping[str, Sequence[int]]]
    """Special tokens of config.json that change, such as `eos_token_id`: the numbers `before` and `after`."""


@dataclass(frozen=True)
class Changes:
    """The parts of a model that a conversion changes. None: a part that stays."""

    average: AverageChange | None = None
    layers: LayerChange | None = None
    experts: ExpertChange | None = None
    channels: ChannelChange | None = None
    vocab: VocabularyChange | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def changes_of(given: str, opened: Source, options: ConvertOptions) -> Changes:
    """The changes that a conversion makes. given: the input, as the user names it. opened: the model that is converted."""
    vocabularies = [each for each in chain_of(opened) if isinstance(each, NewVocabulary)]
    return Changes(
        average=_average(given, options) if options.averaged else None,
        layers=None if options.layers is None else _layers(opened, options.layers),
        experts=_experts(opened, options),
        channels=_channels(opened),
        vocab=_vocabulary(vocabularies[0], options) if vocabularies else None,
    )


def _average(given: str, options: ConvertOptions) -> AverageChange:
    models = [AveragedModel(each.place, each.share) for each in averaged_models(given, options)]
    return AverageChange(options.average_method.method, models)


def _layers(opened: Source, chosen: Sequence[int]) -> LayerChange:
    before = first_of(opened).header.config.layer_count
    return LayerChange(before, len(chosen), list(chosen))


def _experts(opened: Source, options: ConvertOptions) -> ExpertChange | None:
    chosen = options.upcycling
    kept = [each.kept for each in chain_of(opened) if isinstance(each, KeptExperts)]
    if chosen.experts is None and not kept:
        return None
    before, after = first_of(opened).header.config.experts, opened.header.config.experts
    return ExpertChange(
        before=before.count,
        after=after.count,
        per_token=after.per_token,
        granularity=chosen.granularity,
        experts_of=list(chosen.experts_of),
        kept={layer: list(kept[0][layer]) for layer in kept[0]} if kept else None,
    )


def _channels(opened: Source) -> ChannelChange | None:
    narrowed = [each for each in chain_of(opened) if isinstance(each, NarrowedModel)]
    if not narrowed:
        return None
    [made] = narrowed
    return ChannelChange(dict(made.sizes_before), dict(made.sizes), str(made.chosen))


def _vocabulary(made: NewVocabulary, options: ConvertOptions) -> VocabularyChange:
    chosen = options.vocabulary
    before, after = made.whole.header.config, made.header.config
    of_input = len(made.new.filled)
    filled = of_input + max(0, after.vocab - before.vocab)
    special = {
        name: {
            "before": list(listed(getattr(before, name))),
            "after": list(listed(getattr(after, name))),
        }
        for name in SPECIAL_IDS
        if getattr(before, name) != getattr(after, name)
    }
    return VocabularyChange(
        before=before.vocab,
        after=after.vocab,
        copied=min(before.vocab, after.vocab) - of_input,
        filled=filled,
        new_rows=(chosen.new_rows or MEAN) if filled else None,
        tokenizer=chosen.tokenizer,
        special_tokens=special,
    )
