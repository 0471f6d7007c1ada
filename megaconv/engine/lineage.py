"""The provenance of an output: of which inputs it was made, by which version, and with which options.

    "provenance": {
      "megaconv": "0.1.0",
      "options": {"--saver": "core", "--tp": 2},
      "inputs": [{"as": "input", "name": "hf://org/model", "revision": COMMIT, "fingerprint": FINGERPRINT,
                  "seal": ROOT, "provenance": {...}}]}

An input's fingerprint and provenance are those in its own megaconv.json. The seal is the digest that its signature
states (megaconv/signatures/statement.py); a conversion doesn't verify the signature. Local paths appear by their last
part only, and URIs without credentials.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from formats.partial_files import displayed
from formats.rank_files import directory_with
from formats.regular_files import require_flat
from megaconv import registry
from megaconv._version import __version__
from megaconv.engine.fingerprints import combine
from megaconv.engine.provenance import earlier_adapters
from megaconv.engine.record import Record, canonical, find_record
from megaconv.errors import CheckpointError
from megaconv.hub import Place, resolve, scheme_of
from megaconv.input import Input
from megaconv.loader import Loader
from megaconv.model.ir import WEIGHT, Key
from megaconv.options import ConvertOptions, options_given
from megaconv.saver import Saver
from megaconv.signatures.bundle import SIGNATURE_NAME, read_bundle

_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/(?P<commit>[0-9a-f]{40})(/|$)")
"""A path in the Hub's cache."""
_MOST_BYTES = 64 << 10
"""Bytes of an input's own provenance in JSON; a longer one is left out."""
_MOST_GENERATIONS = 20
"""Generations of an input's own provenance; earlier ones are left out. Each takes three levels of JSON."""
_MOST_LEVELS = 70
"""Levels of an input's own provenance in JSON. The output's record adds four, and no JSON has more than JSON_DEPTH."""
_OMITTED = {"omitted": "too long"}
_MOST_TEXT = 1000
_BASE, _EARLIER = "base", "earlier"
"""Keys of --option that name further checkpoints: the base of a patch, and the patches before it."""
_NOT_OF_THE_RESULT = frozenset(
    (
        "--adapter",
        "--base",
        "--cache",
        "--check-source",
        "--config",
        "--max-memory",
        "--max-spool",
        "--overwrite",
        "--resume",
        "--spool",
        "--take-over",
        "--verify",
        "--workers",
        "--yes-replace-objects",
    )
)
"""Options that don't change the output, or that name inputs."""


@dataclass(frozen=True)
class Lineage:
    """The provenance of an output, and notices about what of it can't be trusted."""

    provenance: Mapping[str, Any]
    notices: tuple[str, ...] = ()
    adapters: tuple[Mapping[str, Any], ...] = ()
    """The adapters that are merged into the newer checkpoint's weights, for a patch."""


def lineage_of(
    found: Input,
    saver: Saver,
    options: ConvertOptions,
    revision: str | None,
    adapters: Sequence[Mapping[str, Any]],
) -> Lineage:
    """The provenance of a conversion's output.

    revision: what a URI's loader says about its state. adapters: those that this conversion merges.
    """
    notices: list[str] = []
    inputs = [described_input("input", found.given, found.place, notices, revision)]
    for adapter in adapters:
        name = public_name(str(adapter.get("path", "")))
        inputs.append({"as": "adapter", "name": name, "sha256": adapter.get("sha256")})
    extra = _own_extra(found.loader, saver, options)
    for role, place in _further(options, extra):
        inputs.append(described_input(role, displayed(place), _resolved(place), notices))
    given = {"--saver": saver.name} | _options(options, extra)
    return Lineage(_provenance(given, inputs), tuple(notices))


def lineage_of_patch(old: Input, new: Input) -> Lineage:
    """The provenance of a patch, which was made from two checkpoints."""
    notices: list[str] = []
    inputs = [
        described_input(role, found.given, found.place, notices)
        for role, found in (("base", old), ("input", new))
    ]
    record = None if isinstance(new.place, str) else _record_of(new.place)
    adapters = earlier_adapters(record)
    return Lineage(_provenance({}, inputs), tuple(notices), adapters)


def _provenance(options: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"megaconv": __version__, "options": dict(options), "inputs": list(inputs)}


def _own_extra(loader: Loader, saver: Saver, options: ConvertOptions) -> dict[str, str | None]:
    """All options of `--option`. The value is None if a plugin gets it: it may be a secret."""
    plugins: list[Loader | Saver] = []
    if loader.name not in registry.LOADERS:
        plugins.append(loader)
    if saver.name not in registry.SAVERS:
        plugins.append(saver)
    foreign = {key for plugin in plugins for key in plugin.options}
    return {
        key: None if key in foreign else value for key, value in sorted(options.all_extra().items())
    }


def _further(options: ConvertOptions, extra: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """(role, place) of the checkpoints that options name, beside the input and adapters."""
    if options.save.base is not None:
        yield "original", str(options.save.base)
    for each in options.averaged:
        yield "averaged", each.place
    for place in options.upcycling.experts_of:
        yield "experts", place
    base = extra.get(_BASE)
    if base:
        yield "base", base
    for place in places_in(extra.get(_EARLIER) or ""):
        yield "patch", place


def patched_places(extra: Mapping[str, str]) -> list[str]:
    """The base of a patch and the patches before it. extra: options of the loader's own."""
    return [*places_in(extra.get(_EARLIER, "")), *([extra[_BASE]] if extra.get(_BASE) else [])]


def places_in(text: str) -> list[str]:
    """The places in the value of the option `earlier`. A colon before `//` belongs to a URI."""
    return [place for place in re.split(f"{os.pathsep}(?!//)", text) if place]


def _resolved(place: str) -> Place:
    """A local path; only its name is known of anything else."""
    return resolve(Path(place)) if Path(place).exists() else place


def _options(options: ConvertOptions, extra: Mapping[str, str | None]) -> dict[str, Any]:
    """The options that the caller gave and that change the output, by their names on the command line.

    extra: those of `--option`, for which two fields have this name.
    """
    given = options_given(options)
    given["--option"] = {
        key: value for key, value in extra.items() if value is None or key not in (_BASE, _EARLIER)
    }
    return {
        name: _public(value)
        for name, value in sorted(given.items())
        if name not in _NOT_OF_THE_RESULT and value != {}
    }


def _public(value: Any) -> Any:
    """A value of an option without directories of this machine and without credentials."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _public(inner) for key, inner in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(str(_public(inner)) for inner in value)
    if isinstance(value, tuple | list):
        return [_public(inner) for inner in value]
    text = str(value)
    return public_name(text) if "/" in text else text[:_MOST_TEXT]


def described_input(
    role: str, given: str, place: Place, notices: list[str], revision: str | None = None
) -> dict[str, Any]:
    """One entry of `inputs`. notices: receives what of its record and its signature can't be trusted."""
    found: dict[str, Any] = {"as": role, "name": public_name(given)}
    commit = _SNAPSHOT.search(str(place))
    if commit is not None or revision is not None:
        found["revision"] = commit["commit"] if commit is not None else str(revision)
    if isinstance(place, str):
        return found
    record = _record_of(place)
    if record is not None:
        found |= _of_record(record, notices)
    seal = _seal_of(place, notices)
    return found | ({"seal": seal} if seal else {})


def _record_of(place: Path) -> Record | None:
    try:
        return find_record(place)
    except CheckpointError as error:
        _require_read(error)
        return None  # whoever reads the input reports a damaged record


def _of_record(record: Record, notices: list[str]) -> dict[str, Any]:
    """The fingerprint and the provenance in a record, if it doesn't contradict itself."""
    found: dict[str, Any] = {}
    weights = {
        Key(name, WEIGHT): hash_ for name, hash_ in record.tensors.items() if " (" not in name
    }
    if combine(weights).weights == record.fingerprint:
        found["fingerprint"] = record.fingerprint
    else:
        notices.append(f"{record.file}: contradicts itself; its fingerprint is not carried on")
    if not record.has_intact_provenance:
        notices.append(f"{record.file}: its provenance has changed, and is not carried on")
    elif record.provenance is not None:
        found["provenance"] = _shortened(record.provenance)
    return found


def _shortened(provenance: Any) -> Any:
    """A provenance of bounded size, so that the record of an output stays readable after any number of conversions."""
    found = _latest(provenance, _MOST_GENERATIONS)
    try:
        require_flat(found, _MOST_LEVELS)
    except ValueError:
        return _OMITTED
    return _OMITTED if len(canonical(found)) > _MOST_BYTES else found


def _latest(provenance: Any, generations: int) -> Any:
    """A provenance without generations before the latest ones."""
    if not generations:
        return _OMITTED
    inputs = provenance.get("inputs") if isinstance(provenance, dict) else None
    if not isinstance(inputs, list):
        return provenance
    kept = [
        each | {"provenance": _latest(each["provenance"], generations - 1)}
        if isinstance(each, dict) and "provenance" in each
        else each
        for each in inputs
    ]
    return provenance | {"inputs": kept}


def _seal_of(place: Path, notices: list[str]) -> str | None:
    """The digest that the signature of an input, or of the run around it, states; None if there is none."""
    path = directory_with(SIGNATURE_NAME, place) / SIGNATURE_NAME
    if not path.exists():
        return None
    try:
        return read_bundle(path).statement().root
    except CheckpointError as error:
        _require_read(error)
        notices.append(f"the seal is not carried on: {error}")
        return None


def _require_read(error: CheckpointError) -> None:
    """Raise the error again if the system could not read the file. The file may be whole, and another run would read it."""
    if isinstance(error.__cause__, OSError):
        raise error


def public_name(given: str) -> str:
    """An input's name without directories of this machine, and without a user, a password or a query."""
    if scheme_of(given):
        parts = urlsplit(given)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:_MOST_TEXT]
    path = Path(given)
    if given and not path.exists() and given.count("/") == 1 and not given.startswith(("/", ".")):
        return given[:_MOST_TEXT]  # a Hub id
    return path.resolve().name[:_MOST_TEXT] if given else ""


def source_name(given: str) -> str:
    """The source in a record: a path as the user gave it, a URI without credentials."""
    return public_name(given) if scheme_of(given) else given
