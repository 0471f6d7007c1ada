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

from megaconv._version import __version__
from megaconv.engine.fingerprints import combine
from megaconv.engine.record import Record, canonical, find_record
from megaconv.errors import CheckpointError
from megaconv.hub import Place, resolve, scheme_of
from megaconv.input import Input
from megaconv.model.ir import WEIGHT, Key
from megaconv.options import ConvertOptions, options_given
from megaconv.signatures.bundle import SIGNATURE_NAME, read_bundle

_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/(?P<commit>[0-9a-f]{40})(/|$)")
"""A path in the Hub's cache."""
_MOST_BYTES = 64 << 10
"""Bytes of an input's own provenance in JSON; a longer one is left out."""
_MOST_TEXT = 1000
_FURTHER = {"base": "base", "earlier": "patch"}
"""Keys of --option that name further checkpoints (those of a patch), and their roles."""
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


def lineage_of(
    found: Input,
    saver: str,
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
    for role, place in _further(options):
        inputs.append(described_input(role, place, _resolved(place), notices))
    return Lineage(_provenance({"--saver": saver} | _options(options), inputs), tuple(notices))


def lineage_of_patch(old: Input, new: Input) -> Lineage:
    """The provenance of a patch, which was made from two checkpoints."""
    notices: list[str] = []
    inputs = [
        described_input(role, found.given, found.place, notices)
        for role, found in (("base", old), ("input", new))
    ]
    return Lineage(_provenance({}, inputs), tuple(notices))


def _provenance(options: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"megaconv": __version__, "options": dict(options), "inputs": list(inputs)}


def _further(options: ConvertOptions) -> Iterator[tuple[str, str]]:
    """(role, place) of the checkpoints that options name, beside the input and adapters."""
    if options.save.base is not None:
        yield "original", str(options.save.base)
    extra = options.all_extra()
    for key in _FURTHER:
        for place in extra.get(key, "").split(os.pathsep):
            if place:
                yield _FURTHER[key], place


def _resolved(place: str) -> Place:
    """A local path; only its name is known of anything else."""
    return resolve(Path(place)) if Path(place).exists() else place


def _options(options: ConvertOptions) -> dict[str, Any]:
    """The options that the caller gave and that change the output, by their names on the command line."""
    return {
        name: _public(value)
        for name, value in sorted(options_given(options).items())
        if name not in _NOT_OF_THE_RESULT
    }


def _public(value: Any) -> Any:
    """A value of an option without directories of this machine and without credentials."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _public(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list | frozenset | set):
        return sorted(str(_public(inner)) for inner in value)
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
    except CheckpointError:
        return None  # whoever reads the input reports it


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
        is_long = len(canonical(record.provenance)) > _MOST_BYTES
        found["provenance"] = {"omitted": "too long"} if is_long else record.provenance
    return found


def _seal_of(place: Path, notices: list[str]) -> str | None:
    """The digest that a signature beside an input states; None if there is none."""
    path = (place if place.is_dir() else place.parent) / SIGNATURE_NAME
    if not path.exists():
        return None
    try:
        return read_bundle(path).statement().root
    except CheckpointError as error:
        notices.append(f"the seal is not carried on: {error}")
        return None


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
