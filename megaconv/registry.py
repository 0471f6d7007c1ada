"""Finds the records of loaders and savers by name, and the loader of an input.

megaconv's own records are in the modules of `loaders` and `savers`; other packages add theirs by entry points. A module
is imported only when it is needed.
"""

import logging
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from megaconv import plugins
from megaconv.errors import CheckpointError, UnknownFormat, UsageError
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.hub import Place, nothing_at, scheme_of
from megaconv.loader import Loader
from megaconv.next_steps import explain, has_bare_weights, refuse_mistaken
from megaconv.saver import Saver

LOADERS = (
    "delta",
    "core",
    "legacy",
    "nemo",
    "dcp",
    "deepspeed",
    "fsdp",
    "orbax",
    "gguf",
    "trtllm",
    "mlx",
    "hf",
    "llama_mistral",
    "mixtral_hf",
    "peft",
    "config",
)
"""Loaders in the order in which `detect` asks them about an input.

Loaders of other packages come before `hf`. `config` is asked last, if nothing else recognises the input.
"""
_RUNS = ("core", "legacy")
"""Loaders of Megatron's runs."""
SAVERS = (
    "core",
    "legacy",
    "dcp",
    "deepspeed",
    "hf",
    "llama_mistral",
    "gguf",
    "mlx",
    "trtllm",
    "peft",
)
_log = logging.getLogger("megaconv")
ALIASES = {"mcore": "core", "megatron": "legacy"}
"""Names that Megatron-LM's converter uses for the same formats."""


def loader(name: str) -> Loader:
    """The loader of this name. Raises UsageError for an unknown name, PluginError for a broken plugin."""
    name = ALIASES.get(name, name)
    if name in LOADERS:
        record: Loader = import_module(f"loaders.{name}").LOADER
        return record
    offered = plugins.offered("loaders")
    if name not in offered:
        raise _unknown("loader", name, [*LOADERS, *offered])
    plugin: Loader = plugins.load("loaders", offered[name])
    return plugin


def saver(name: str) -> Saver:
    """The saver of this name. Raises UsageError for an unknown name, PluginError for a broken plugin."""
    name = ALIASES.get(name, name)
    if name in SAVERS:
        record: Saver = import_module(f"savers.{name}").SAVER
        return record
    offered = plugins.offered("savers")
    if name not in offered:
        raise _unknown("saver", name, [*SAVERS, *offered])
    plugin: Saver = plugins.load("savers", offered[name])
    return plugin


def _unknown(word: str, name: str, known: list[str]) -> UsageError:
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}? Known" if near else "; known"
    return UsageError(
        f"no {word} is called {name!r}{hint}: {', '.join(known)} (`megaconv formats` describes them)",
        code="unknown-loader" if word == "loader" else "unknown-saver",
    )


def all_loaders() -> dict[str, Loader]:
    """All usable loaders by name, megaconv's own first."""
    return {name: loader(name) for name in LOADERS} | dict(plugins.usable("loaders", LOADERS))


def all_savers() -> dict[str, Saver]:
    """All usable savers by name, megaconv's own first."""
    return {name: saver(name) for name in SAVERS} | dict(plugins.usable("savers", SAVERS))


def choose(place: Place, name: str | None, config: Path | None = None) -> Loader:
    """The loader of an input: the named loader, or the loader that recognises the input.

    config: the directory that describes the model instead of the input. Raises UsageError, and the errors of `detect`.
    """
    if isinstance(place, Path) and not place.exists():
        raise nothing_at(place)
    if isinstance(place, Path) and place.is_file():
        refuse_mistaken(place)
    if name is None:
        bare = config is not None and isinstance(place, Path) and has_bare_weights(place)
        return loader("hf") if bare else detect(place)
    found = loader(name)
    if isinstance(place, str) and scheme_of(place) not in found.schemes:
        raise UsageError(f"{place}: the loader {name} takes {_places(found)}")
    if isinstance(place, Path) and place.is_file() and not found.reads_files:
        raise explain(place, is_checkpoint) or UnknownFormat(
            f"{place}: is a file, where a directory should be"
        )
    return found


def detect(place: Place) -> Loader:
    """The first loader that recognises an input.

    Raises UnknownFormat, or an error of `next_steps`, with what the input is and what to do.
    """
    for found in _in_order():
        takes_place = isinstance(place, Path) or scheme_of(place) in found.schemes
        if takes_place and _recognises(found, place):
            _warn_of_second_model(found, place)
            return found
    if isinstance(place, str):
        raise _unknown_scheme(place)
    description = loader("config")
    is_description = description.detect(place)
    error = None if place.is_file() and is_description else explain(place, is_checkpoint)
    if error is not None:
        raise error
    if is_description:
        return description
    if (place / CONFIG_NAME).is_file():
        # The loader's error names the missing files.
        return loader("hf")
    raise UnknownFormat(
        f"{place}: is not a checkpoint of a known format; one has a config.json with weights (Hugging Face), mp_rank_* directories or "
        "metadata.json (Megatron), .metadata (PyTorch) or params.json (Meta, Mistral)"
    )


def _warn_of_second_model(found: Loader, place: Place) -> None:
    """Warn if a Hugging Face model lies in the directory of a Megatron run, which is read."""
    if found.name not in _RUNS or not isinstance(place, Path):
        return
    # The import of the loader takes longer than the look for its file.
    if (place / CONFIG_NAME).is_file() and loader("hf").detect(place):
        _log.warning(
            "%s: holds a Megatron run and a Hugging Face model, two models; the run is read. --loader hf reads the other one",
            place,
        )


def _unknown_scheme(uri: str) -> UnknownFormat:
    schemes = {"hf", "s3", "gs", "az", "abfs"}
    for found in all_loaders().values():
        schemes.update(found.schemes)
    known = ", ".join(f"{scheme}://" for scheme in sorted(schemes))
    return UnknownFormat(
        f"{uri}: no loader takes it; known: {known}, and those of packages that aren't installed"
    )


def is_checkpoint(place: Path) -> bool:
    """True if some loader recognises a directory, even if its files are damaged."""
    try:
        return any(_recognises(found, place) for found in _in_order())
    except CheckpointError:
        return True
    except OSError:
        return False


def _in_order() -> Iterator[Loader]:
    """Loaders in the order of detection, without `config`, which accepts inputs that are no checkpoint.

    Loaders of other packages come before `hf`, because their formats may have a config.json too.
    """
    for name in LOADERS[:-1]:
        if name == "hf":
            yield from plugins.usable("loaders", LOADERS).values()
        yield loader(name)


def _recognises(found: Loader, place: Place) -> bool:
    if found.name in LOADERS:
        return found.detect(place)
    try:
        return found.detect(place)
    except Exception as error:
        # An error in another package must not prevent the other loaders.
        plugins.leave_out("loaders", found.name, error)
        return False


def _places(found: Loader) -> str:
    return ", ".join(["paths", *(f"{scheme}:// URIs" for scheme in found.schemes)])


def share_options(
    given: Mapping[str, str], takers: Mapping[str, Loader | Saver]
) -> list[dict[str, str]]:
    """The options of each loader or saver: those whose key is in its `options`.

    takers: loaders and savers, by the name that messages use. Raises UsageError for a key that none of them has.
    """
    for key in given:
        if not any(key in found.options for found in takers.values()):
            known = "; ".join(
                f"{who} takes {', '.join(found.options) or 'none'}" for who, found in takers.items()
            )
            raise UsageError(f"--option {key}: is not known; {known}", code="unknown-option")
    return [
        {key: value for key, value in given.items() if key in found.options}
        for found in takers.values()
    ]
