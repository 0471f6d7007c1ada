"""Mixtral directories of Hugging Face, under the name of Megatron-LM's converter: the `hf` loader, plus a check of the
family."""

from pathlib import Path

from megaconv import registry
from megaconv.errors import UsageError
from megaconv.loader import Loader
from megaconv.model.ir import Source
from megaconv.options import LoadOptions


def detect(path: Path) -> bool:
    """Always False: the `hf` loader detects these directories."""
    return False


def open(path: Path, options: LoadOptions) -> Source:  # noqa: A001
    """Open a Mixtral. Raises UsageError for any other model, and the errors of the `hf` loader."""
    source = registry.loader("hf").open(path, options)
    if source.header.config.family != "mixtral":
        raise UsageError(
            f"{path}: is a {source.header.config.family}, not a Mixtral; use --loader hf"
        )
    return source


LOADER = Loader(
    name="mixtral_hf",
    description="Hugging Face transformers, Mixtral only (Megatron-LM's name; hf reads it as well)",
    detect=detect,
    open=open,
    reads_files=False,
)
