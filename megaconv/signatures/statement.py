"""The statement that a signature is about: the files of a model and their hashes, in JSON.

The format is an in-toto statement, with the predicate of OpenSSF's model signing 1.0 (docs/seals.md):

    {"_type": "https://in-toto.io/Statement/v1",
     "subject": [{"name": "my-model", "digest": {"sha256": ROOT}}],
     "predicateType": "https://model_signing/signature/v1.0",
     "predicate": {
       "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": false, "ignore_paths": [".git"]},
       "resources": [{"name": "config.json", "algorithm": "sha256", "digest": HASH}, ...]}}

ROOT is SHA-256 over the bytes of all digests, in the order of the resources. With the method `shards`, the name of a
resource is `PATH:START:END`.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from formats.errors import CorruptCheckpoint
from formats.regular_files import parse_json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
FILES, SHARDS = "files", "shards"
HASH_TYPES = ("sha256", "blake2b", "blake2", "blake3")
SINGLE_FILE = "."
"""The name of the resource if the model is a file, not a directory."""
_VALUES = 1000
_LARGEST = 1 << 50
_BYTES_A_VALUE = 10
"""Bytes of a statement for each of its JSON values. A resource has twenty bytes a value."""


def corrupt(path: Path, what: str) -> CorruptCheckpoint:
    """The error for a signature that isn't one of the known form."""
    return CorruptCheckpoint(
        f"{path}: {what}; get the signature again from the model's publisher",
        code="corrupt-signature",
    )


@dataclass(frozen=True)
class Method:
    """The way from a directory to its resources."""

    name: str = FILES
    hash_type: str = "sha256"
    allow_symlinks: bool = False
    ignore_paths: tuple[str, ...] = ()
    """Files and directories that the signature doesn't cover, below the model's directory."""
    shard_size: int | None = None
    """Bytes of a shard, for the method `shards`."""

    def to_json(self) -> dict[str, Any]:
        """The `serialization` of a statement."""
        found: dict[str, Any] = {
            "method": self.name,
            "hash_type": self.hash_type,
            "allow_symlinks": self.allow_symlinks,
        }
        if self.shard_size is not None:
            found["shard_size"] = self.shard_size
        return found | {"ignore_paths": list(self.ignore_paths)}


@dataclass(frozen=True)
class Statement:
    """A model's name and the digests of its resources, in hexadecimal, by name."""

    model: str
    method: Method
    digests: dict[str, str]

    @property
    def root(self) -> str:
        """SHA-256 over all digests."""
        whole = hashlib.sha256()
        for digest in self.digests.values():
            whole.update(bytes.fromhex(digest))
        return whole.hexdigest()

    def to_bytes(self) -> bytes:
        """The statement as JSON, for signing."""
        algorithm = self.method.hash_type
        resources = [
            {"name": name, "algorithm": algorithm, "digest": digest}
            for name, digest in self.digests.items()
        ]
        value = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": self.model, "digest": {"sha256": self.root}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"serialization": self.method.to_json(), "resources": resources},
        }
        return json.dumps(value).encode()


def parse_statement(content: bytes, path: Path) -> Statement:
    """The statement in a signature. path: the signature's file, for messages.

    Raises CorruptCheckpoint (`corrupt-signature`) for anything but a consistent statement of this kind.
    """
    try:
        value = parse_json(content, most_values=_VALUES + len(content) // _BYTES_A_VALUE)
        statement, root = _statement(value)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise corrupt(path, f"its statement is not readable ({error})") from error
    if statement.root != root:
        raise corrupt(
            path, "its subject is not the digest of its resources, so it is of another model"
        )
    return statement


def _statement(value: Any) -> tuple[Statement, str]:
    """(the statement, the root digest that it states). Raises ValueError, KeyError, TypeError or AttributeError."""
    _require("_type", value["_type"], (STATEMENT_TYPE,))
    _require("predicateType", value["predicateType"], (PREDICATE_TYPE,))
    (subject,) = value["subject"]
    root = _text(subject["digest"]["sha256"])
    method = _method(value["predicate"]["serialization"])
    digests: dict[str, str] = {}
    for resource in value["predicate"]["resources"]:
        name, digest = _text(resource["name"]), _text(resource["digest"])
        if name in digests:
            raise ValueError(f"it names {name!r:.100} twice")
        require_below(name)
        bytes.fromhex(digest)
        digests[name] = digest.lower()
    return Statement(_text(subject.get("name", "")), method, digests), root


def _method(value: Any) -> Method:
    _require("method", value["method"], (FILES, SHARDS))
    _require("hash_type", value["hash_type"], HASH_TYPES)
    shard_size = _size(value["shard_size"]) if value["method"] == SHARDS else None
    if type(value["allow_symlinks"]) is not bool:
        raise ValueError("its allow_symlinks is neither true nor false")
    ignored = tuple(_text(each) for each in value.get("ignore_paths", ()))
    return Method(value["method"], value["hash_type"], value["allow_symlinks"], ignored, shard_size)


def _size(value: Any) -> int:
    """The size of shards. model-signing writes it as a float, as in-toto's library does with all numbers."""
    if type(value) not in (int, float) or not 1 <= value <= _LARGEST or value != int(value):
        raise ValueError("its shard_size is no natural number")
    return int(value)


def _require(what: str, found: Any, known: Sequence[str]) -> None:
    if found not in known:
        raise ValueError(f"its {what} is {found!r:.100}, expected {' or '.join(known)}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a text")
    return value


def require_below(name: str) -> None:
    """Raises ValueError for a name that leads out of the model's directory."""
    path = PurePosixPath(name)
    is_file = bool(path.parts) or name == SINGLE_FILE
    if path.is_absolute() or ".." in path.parts or not is_file or "\0" in name:
        raise ValueError(f"it names {name!r:.100}, which is not below the model's directory")
