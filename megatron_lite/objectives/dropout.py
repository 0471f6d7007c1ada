"""A model without its dropout, for objectives that compare log-probabilities of two passes."""

from dataclasses import replace

from megatron_lite.objectives.training_data import Say
from megatron_lite.settings.options import ModelOptions


def without_dropout(options: ModelOptions, say: Say, reason: str) -> ModelOptions:
    """Return the options without the model's dropout. Adapters keep theirs. say: receives a line if that is a change."""
    hidden, attention = options.hidden_dropout, options.attention_dropout
    if hidden or attention:
        say(f"dropout {hidden:g} and {attention:g} of the model are left out: {reason}")
    return replace(options, hidden_dropout=0.0, attention_dropout=0.0)
