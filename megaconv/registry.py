"""Finds loaders and savers by name. Ours are modules of `loaders` and `savers`; other packages add theirs by entry points.

Nothing is imported before it is asked for.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from megaconv import plugins
from megaconv.errors import CheckpointError, UnknownFormat, UsageError
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.hub import Place, nothing_at, scheme_of
from megaconv.model.ir import Header, Source
from megaconv.next_steps import explain, has_bare_weights, refuse_mistaken
from megaconv.options import LoadOptions, SaveOptions

if TYPE_CHECKING:
    from megaconv.engine.plan import OutputPlan

LOADERS = (
    "core",
    "legacy",
    "nemo",
    "dcp",
    "deepspeed",
    "fsdp",
    "orbax",
    "gguf",
    "hf",
    "llama_mistral",
    "mixtral_hf",
    "peft",
    "config",
)
"""In the order in which they are asked about an input; those of other packages come before `hf`, and `config` is asked where
nothing else is known of it."""
SAVERS = ("core", "legacy", "dcp", "hf", "llama_mistral", "gguf", "peft")
ALIASES = {"mcore": "core", "megatron": "legacy"}
"""Names that Megatron-LM's converter uses for the same thing."""


class Loader(Protocol):
    """A module (or object) that reads one kind of checkpoint.

    One with SCHEMES = ("store",) is asked about URIs such as store://bucket/model too, and gets them as a str. One with
    OPTIONS = {"key": "what it does"} gets what was given by `--option key=value` in LoadOptions.extra.
    """

    DESCRIPTION: str
    """One line for `megaconv formats`."""

    def detect(self, path: Any) -> bool:
        """Whether path (a Path; a str for a URI) looks like this kind; looks at names, and at one file's metadata where
        they don't say."""
        ...

    def open(self, path: Any, options: LoadOptions) -> Source:
        """Read and check all metadata, no tensor. Raises CheckpointError."""
        ...


class Saver(Protocol):
    """A module (or object) that writes one kind of checkpoint.

    One with HOLDS_OPTIMIZER = True is given the optimizer's tensors too; one with HOLDS_ADAPTER = True adapters (`Header.adapter`),
    others whole models alone; one with HOLDS_WHOLE = True all of a model that sees or hears; one with HOLDS_SHIFTED = True gets
    tensors as their source stores them (`engine/shifted.py`), others always canonical values; one with `forms(header, options)`
    gets each tensor in the form that this says (`engine/stored_forms.py`), other values than the canonical ones; one with OPTIONS
    gets what was given by `--option` in SaveOptions.extra, as loaders do. One with `refuse(config, options, has_layout=...)` may
    raise LayoutError there, before the input's tensors are looked up, where a config.json describes the model
    (`engine/early_check.py`).
    One with `read_back(directory)` gives the native tensors of a finished output, by record and as they are stored, to `--verify`
    one that no loader gives like that (`engine/reading_back.py`).
    One with `uses(options)` names the fields of SaveOptions that it reads; others are refused where they are given.
    """

    DESCRIPTION: str

    def plan(self, header: Header, options: SaveOptions) -> "OutputPlan":
        """Lay out the complete output. Raises LayoutError or NotExpressible for what can't be written."""
        ...


def loader(name: str) -> Loader:
    """Raises UsageError for a name that nobody has, PluginError for another package's that is broken."""
    return cast(Loader, _find("loaders", LOADERS, ALIASES.get(name, name)))


def saver(name: str) -> Saver:
    """Raises as `loader` does."""
    return cast(Saver, _find("savers", SAVERS, ALIASES.get(name, name)))


def all_loaders() -> dict[str, Loader]:
    """By name, ours first."""
    return {name: loader(name) for name in LOADERS} | dict(plugins.usable("loaders", LOADERS))


def all_savers() -> dict[str, Saver]:
    """By name, ours first."""
    return {name: saver(name) for name in SAVERS} | dict(plugins.usable("savers", SAVERS))


def _find(kind: str, ours: tuple[str, ...], name: str) -> object:
    if name in ours:
        return import_module(f"{kind}.{name}")
    offered = plugins.offered(kind)
    if name in offered:
        return plugins.load(kind, offered[name])
    raise UsageError(
        f"no {kind[:-1]} is called {name!r}; known: {', '.join([*ours, *offered])} (`megaconv formats` describes them)",
        code="unknown-loader" if kind == "loaders" else "unknown-saver",
    )


def choose(place: Place, name: str | None, config: Path | None = None) -> tuple[str, Loader]:
    """(name, loader) for an input: the one of this name, or else the one that recognises it. config: what describes the
    model in the input's stead. Raises UsageError, and what `detect` raises."""
    if isinstance(place, Path) and not place.exists():
        raise nothing_at(place)
    if isinstance(place, Path) and place.is_file():
        refuse_mistaken(place)
    if name is None:
        bare = config is not None and isinstance(place, Path) and has_bare_weights(place)
        return ("hf", loader("hf")) if bare else detect(place)
    found = loader(name)
    if isinstance(place, str) and scheme_of(place) not in schemes(found):
        raise UsageError(f"{place}: the loader {name} takes {_places(found)}")
    if name in LOADERS and isinstance(place, Path) and place.is_file() and not getattr(found, "READS_FILES", False):
        raise explain(place, is_checkpoint) or UnknownFormat(f"{place}: is a file, where a directory should be")
    return ALIASES.get(name, name), found


def detect(place: Place) -> tuple[str, Loader]:
    """The loader that recognises an input. Raises UnknownFormat, or what `next_steps` knows,
    saying what it is and what to do."""
    for name, found in _in_order():
        if (isinstance(place, Path) or scheme_of(place) in schemes(found)) and _recognises(name, found, place):
            return name, found
    if isinstance(place, str):
        known = sorted({"hf", *(scheme for found in all_loaders().values() for scheme in schemes(found))})
        raise UnknownFormat(
            f"{place}: no loader takes it; known: {', '.join(f'{scheme}://' for scheme in known)}, "
            "and those of packages that aren't installed"
        )
    description = loader("config")
    error = None if place.is_file() and description.detect(place) else explain(place, is_checkpoint)
    if error is not None:
        raise error
    if description.detect(place):
        return "config", description
    if (place / CONFIG_NAME).is_file():
        return "hf", loader("hf")  # which says best what should lie beside it
    raise UnknownFormat(
        f"{place}: is not a checkpoint of a known format; one has a config.json with weights (Hugging Face), mp_rank_* directories or "
        "metadata.json (Megatron), .metadata (PyTorch) or params.json (Meta, Mistral)"
    )


def is_checkpoint(place: Path) -> bool:
    """Whether some loader recognises a directory, however damaged what lies there is."""
    try:
        return any(_recognises(name, found, place) for name, found in _in_order())
    except CheckpointError:
        return True
    except OSError:
        return False


def _in_order() -> Iterator[tuple[str, Loader]]:
    """Those of other packages before `hf`: a format of their own may well have a config.json. Without `config`, which takes what
    is no checkpoint."""
    for name in LOADERS[:-1]:
        if name == "hf":
            yield from plugins.usable("loaders", LOADERS).items()
        yield name, loader(name)


def _recognises(name: str, found: Loader, place: Place) -> bool:
    if name in LOADERS:
        return found.detect(place)
    try:
        return found.detect(place)
    except Exception as error:  # a stranger's mistake, which is no reason not to ask the others
        plugins.leave_out("loaders", name, error)
        return False


def schemes(found: Loader) -> tuple[str, ...]:
    """Of the URIs that a loader reads."""
    return tuple(getattr(found, "SCHEMES", ()))


def _places(found: Loader) -> str:
    return ", ".join(["paths", *(f"{scheme}:// URIs" for scheme in schemes(found))])


def options_of(found: object) -> Mapping[str, str]:
    """Keys that a loader or saver takes by `--option`, with what they do."""
    return dict(getattr(found, "OPTIONS", {}))


def share_options(given: Mapping[str, str], takers: Mapping[str, object]) -> list[dict[str, str]]:
    """What each loader or saver gets of the options: those that it has in OPTIONS. takers: by what messages call them.

    Raises UsageError for a key that none of them has.
    """
    for key in given:
        if not any(key in options_of(found) for found in takers.values()):
            known = "; ".join(f"{who} takes {', '.join(options_of(found)) or 'none'}" for who, found in takers.items())
            raise UsageError(f"--option {key}: is not known; {known}", code="unknown-option")
    return [{key: value for key, value in given.items() if key in options_of(found)} for found in takers.values()]
