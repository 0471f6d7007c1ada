"""The notice of `megaconv plan` for a model that Megatron's formats can't hold."""

from megaconv.families import family
from megaconv.megatron.arguments.beyond_core import is_of_the_trainer
from megaconv.model.config import ModelConfig
from megaconv.model.naming import CORE


def only_in_files(config: ModelConfig) -> tuple[str, ...]:
    """The notice for a model without names in Megatron core, or with names that only the trainer knows; empty for all
    others."""
    found = family(config.family)
    if is_of_the_trainer(config) and found.rows[0].spelling(CORE):
        return (
            f"{found.architectures[0]}: Megatron has no such model; the layouts are for megatron-lite, and an estimate for other software",
        )
    if found.rows[0].spelling(CORE):
        return ()
    return (
        f"{found.architectures[0]}: only Hugging Face's files hold this model; the layouts are an estimate for software that has it",
    )
