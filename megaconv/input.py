"""An input, found once at the door of a command or a function of the Python interface.

All code behind the door takes the Input. It neither resolves the place again (which would ask the Hub again) nor looks
for the loader again.
"""

from dataclasses import dataclass
from pathlib import Path

from megaconv import registry
from megaconv.hub import Place, resolve
from megaconv.loader import Loader
from megaconv.options import LoadOptions


@dataclass(frozen=True)
class Input:
    """A checkpoint to read: its place, and the loader that reads it."""

    given: str
    """The input as the user gave it: a path, a Hub id or a URI."""
    place: Place
    """The resolved place: a local path, or a URI."""
    loader: Loader


def find_input(
    given: str | Path, loader: str | None = None, options: LoadOptions | None = None
) -> Input:
    """Find an input. A model on the Hub is read by ranges, or downloaded with `options.cache`.

    loader: a loader's name; None: the loader that recognises the input. Raises CheckpointError.
    """
    options = options or LoadOptions()
    return input_at(given, resolve(given, cache=options.cache), loader, options)


def input_at(given: str | Path, place: Place, loader: str | None, options: LoadOptions) -> Input:
    """The input at a resolved place. Raises CheckpointError."""
    return Input(str(given), place, registry.choose(place, loader, options.config))
