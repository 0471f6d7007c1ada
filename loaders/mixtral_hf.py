"""Mixtral directories of Hugging Face, under the name that Megatron-LM's converter has for them: `hf`, and a check."""

from pathlib import Path

from megaconv import registry
from megaconv.errors import UsageError
from megaconv.model.ir import Source
from megaconv.options import LoadOptions

DESCRIPTION = "Hugging Face transformers, Mixtral only (Megatron-LM's name; hf reads it as well)"


def detect(path: Path) -> bool:
    """Never: hf takes these directories."""
    return False


def open(path: Path, options: LoadOptions) -> Source:  # noqa: A001
    """Raises UsageError for any other model, and what hf raises."""
    source = registry.loader("hf").open(path, options)
    if source.header.config.family != "mixtral":
        raise UsageError(f"{path}: is a {source.header.config.family}, not a Mixtral; use --loader hf")
    return source
