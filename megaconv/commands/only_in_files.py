"""The notice of `megaconv plan` for a model that Megatron's formats can't hold."""

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.naming import CORE


def only_in_files(config: ModelConfig) -> tuple[str, ...]:
    """The notice for a model of a family without names in Megatron core; empty for all others."""
    found = family(config.family)
    if found.rows[0].spelling(CORE):
        return ()
    return (
        f"{found.architectures[0]}: only Hugging Face's files hold this model; the layouts are an estimate for software that has it",
    )
