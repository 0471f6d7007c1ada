"""Opens the source of an input, as every command reads it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from formats.file_limit import raise_file_limit
from formats.rank_files import run_of
from formats.tensor import LazyTensor
from megaconv import registry
from megaconv.engine.sidecars import SIDECAR_DIRECTORY
from megaconv.engine.stream import as_lazy
from megaconv.engine.without_retrieval import without_retrieval
from megaconv.errors import UsageError
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.hub import nothing_at
from megaconv.input import Input
from megaconv.model.ir import Header, Key, Source
from megaconv.options import LoadOptions


def open_source(found: Input, options: LoadOptions | None = None) -> Source:
    """The source of an input. Raises CheckpointError."""
    raise_file_limit()
    loader, options = found.loader, options or LoadOptions()
    options = replace(options, config=description_of(options.config))
    if options.text_only and not loader.has_text_only:
        raise UsageError(
            f"--text-only: {found.place}: --loader {loader.name} reads language models alone; leave it out"
        )
    registry.share_options(options.extra, {f"loader {loader.name}": loader})
    source = loader.open(found.place, options)
    _require_heads(source.header, found, options.num_attention_heads)
    opened = LazySource(source)
    return without_retrieval(opened) if options.drop_retrieval else opened


def _require_heads(header: Header, found: Input, heads: int | None) -> None:
    """Raises UsageError if --num-attention-heads contradicts the model."""
    actual = header.config.attention.heads
    if heads not in (None, actual):
        raise UsageError(
            f"--num-attention-heads {heads}: {found.given} has {actual} attention heads; leave it out"
        )


def description_of(config: Path | None) -> Path | None:
    """The directory of the config.json that --config means. For a Megatron run or an iteration it is the run's `hf/`.

    Raises UsageError if there is none.
    """
    if config is None:
        return None
    if not config.exists():
        raise UsageError(f"--config {nothing_at(config)}", code="no-such-input")
    of_run = run_of(config)
    for directory in (config, of_run / SIDECAR_DIRECTORY):
        if (directory / CONFIG_NAME).is_file():
            return directory
    raise UsageError(
        f"--config {config}: has no {CONFIG_NAME}, nor a {SIDECAR_DIRECTORY}/ with one; expected a model's Hugging Face directory "
        "or a Megatron run"
    )


@dataclass(frozen=True)
class LazySource:
    """A source whose tensors are all lazy. A plugin may supply plain arrays; this wraps them."""

    source: Source

    @property
    def header(self) -> Header:
        return self.source.header

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        for key, tensor in self.source.tensors():
            yield key, as_lazy(tensor)
