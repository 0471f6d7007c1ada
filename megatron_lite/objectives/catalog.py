"""All training objectives, and the choice between them."""

from collections.abc import Iterator

from megaconv import plugins
from megaconv.errors import PluginError, UsageError
from megatron_lite.objectives.answers import Answers
from megatron_lite.objectives.blocks import Blocks
from megatron_lite.objectives.embedded_texts import EmbeddedTexts
from megatron_lite.objectives.image_chats import ImageChats
from megatron_lite.objectives.masked import MaskedSpans, MaskedWords
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.own_completions import TaughtCompletions
from megatron_lite.objectives.pairs import Pairs
from megatron_lite.objectives.passages import Passages
from megatron_lite.objectives.policy import Completed
from megatron_lite.objectives.rated_answers import RatedAnswers
from megatron_lite.objectives.retro import RetroText
from megatron_lite.objectives.scored_pairs import ScoredPairs
from megatron_lite.objectives.taught import Taught
from megatron_lite.settings.config import Settings

OBJECTIVES: tuple[type[Objective], ...] = (
    Pairs,
    RatedAnswers,
    ScoredPairs,
    EmbeddedTexts,
    Completed,
    TaughtCompletions,
    Taught,
    Answers,
    Passages,
    RetroText,
    Blocks,
    MaskedWords,
    MaskedSpans,
    ImageChats,
    Objective,
)
"""The first one that the flags select is used. The last one, the next token, is for all other runs."""


def objective_of(settings: Settings, model_type: str) -> Objective:
    """Return the objective of a run. model_type: `gpt`, `bert`, `t5` or `biencoder`.

    Raises UsageError or PluginError for an --objective that can't be used.
    """
    name = settings.objective.objective
    if name is not None:
        return _of_package(name)
    return next(_selected(settings, model_type))


def _selected(settings: Settings, model_type: str) -> Iterator[Objective]:
    for kind in OBJECTIVES:
        found = kind.of(settings, model_type)
        if found is not None:
            yield found


def _of_package(name: str) -> Objective:
    """Return an objective of another package, by the name of its entry point."""
    offered = plugins.offered("objectives")
    if name not in offered:
        known = (
            f"installed: {', '.join(sorted(offered))}"
            if offered
            else "no installed package has one"
        )
        raise UsageError(f"--objective {name} is not known; {known}")
    objective = plugins.load("objectives", offered[name])
    if not isinstance(objective, Objective):
        raise PluginError(
            f"objective {name!r}: its OBJECTIVE is not a megatron_lite.objectives.objective.Objective"
        )
    return objective
