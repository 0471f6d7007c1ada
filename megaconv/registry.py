"""Finds loaders and savers by name. Ours are modules of `loaders` and `savers`; other packages add theirs by entry points.

    [project.entry-points."megaconv.loaders"]
    mine = "my_package.my_loader"          # a module with DESCRIPTION, detect() and open()

Nothing is imported before it is asked for.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from megaconv.errors import UnknownFormat
from megaconv.model.ir import Header, Source
from megaconv.options import LoadOptions, SaveOptions

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from megaconv.engine.plan import OutputPlan

LOADERS = ("core", "legacy", "dcp", "hf", "llama_mistral", "mixtral_hf")
SAVERS = ("core", "legacy", "dcp", "hf", "llama_mistral")
ALIASES = {"mcore": "core", "megatron": "legacy"}
"""Names that Megatron-LM's converter uses for the same thing."""


class Loader(Protocol):
    """A module (or object) that reads one kind of checkpoint."""

    DESCRIPTION: str
    """One line for `megaconv formats`."""

    def detect(self, path: Path) -> bool:
        """Whether path looks like this kind; looks at names, and at one file's metadata where they don't tell."""
        ...

    def open(self, path: Path, options: LoadOptions) -> Source:
        """Read and check all metadata, no tensor. Raises CheckpointError."""
        ...


class Saver(Protocol):
    """A module (or object) that writes one kind of checkpoint.

    One with HOLDS_OPTIMIZER = True is given the optimizer's tensors too.
    """

    DESCRIPTION: str

    def plan(self, header: Header, options: SaveOptions) -> "OutputPlan":
        """Lay out the complete output. Raises LayoutError or NotExpressible for what can't be written."""
        ...


def loader(name: str) -> Loader:
    return cast(Loader, _find("loaders", LOADERS, ALIASES.get(name, name)))


def saver(name: str) -> Saver:
    return cast(Saver, _find("savers", SAVERS, ALIASES.get(name, name)))


def names(kind: str) -> list[str]:
    """All names of `loaders` or `savers`, ours first."""
    return [
        *(LOADERS if kind == "loaders" else SAVERS),
        *(entry.name for entry in entry_points(group=f"megaconv.{kind}")),
    ]


def entry_points(group: str) -> "EntryPoints":
    """What other packages offer."""
    from importlib import metadata  # whose import takes longer than all of ours together

    return metadata.entry_points(group=group)


def _find(kind: str, ours: tuple[str, ...], name: str) -> object:
    if name in ours:
        return import_module(f"{kind}.{name}")
    for entry in entry_points(group=f"megaconv.{kind}"):
        if entry.name == name:
            return entry.load()
    raise UnknownFormat(f"no {kind[:-1]} is called {name!r}; known are {', '.join(names(kind))}")


def _all_loaders() -> Iterator[tuple[str, Loader]]:
    """Ours first: looking for those of other packages takes longer than most of ours take to look."""
    for name in LOADERS:
        yield name, loader(name)
    for entry in entry_points(group="megaconv.loaders"):
        yield entry.name, entry.load()


def detect(path: Path) -> tuple[str, Loader]:
    """The loader for an input. Raises UnknownFormat saying what was looked for."""
    if not path.exists():
        raise UnknownFormat(f"{path}: no such file or directory")
    for name, found in _all_loaders():
        if found.detect(path):
            return name, found
    raise UnknownFormat(
        f"{path}: is no checkpoint that we know; a Hugging Face directory has config.json and *.safetensors or *.bin files, "
        "a Megatron directory latest_checkpointed_iteration.txt, mp_rank_* directories or metadata.json, "
        "a distributed checkpoint of PyTorch .metadata, "
        "a directory of Meta's or Mistral's own files params.json and consolidated.*"
    )
