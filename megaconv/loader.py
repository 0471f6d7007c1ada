"""The record of a loader: the functions that read one kind of checkpoint, and what they can read.

Each module of `loaders` has one, `LOADER`. Loaders of other packages have the same; see docs/plugins.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaconv.model.ir import Source
    from megaconv.options import LoadOptions


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Reads one kind of checkpoint."""

    name: str
    """The name for `--loader`. The entry point of a plugin has the same name."""
    description: str
    """One line for `megaconv formats`."""
    detect: Callable[[Any], bool]
    """`detect(path)`: True if path (a Path; a str for a URI) looks like this kind of checkpoint.

    It looks at names. If they don't decide, it reads the metadata of one file.
    """
    open: Callable[[Any, "LoadOptions"], "Source"]
    """`open(path, options)`: reads and checks all metadata, but no tensor. Raises CheckpointError."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Keys of `--option key=value` with their descriptions. The loader gets the values in LoadOptions.extra."""
    schemes: tuple[str, ...] = ()
    """Schemes such as `store`: `detect` and `open` also get URIs such as store://bucket/model, as a str."""
    reads_files: bool = True
    """False if every checkpoint is a directory. A file is then refused, with advice, before `open`."""
    keeps_names: bool = False
    """True if the loader also reads models that no family describes (`LoadOptions.own_names`)."""
    has_text_only: bool = False
    """True if the loader reads the language model of a multimodal model alone (`--text-only`)."""
