"""Damage to a sealed checkpoint, and hostile signatures; then it is verified with the key.

The rule. verify with --public-key ends with exit 0 only if

* every file but the signature has the bytes that were sealed, and none was added or is missing, and
* the signature's statement is the one that was signed; or, for a statement that the case signed itself with the same
  key, it is true: its resources are the files of the directory, with their hashes.

It never ends in a traceback, and never takes more than its time and memory.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from megaconv.signatures.bundle import SIGNATURE_NAME
from tests.signatures.made import Keys, sign_again, statement_in, write_keys
from tests.trust import server
from tests.trust.bench import Bench
from tests.trust.judging import Failure, check_conduct
from tests.trust.mutations import damage_a_file
from tests.trust.strange_values import mutate_json


class Sealed(NamedTuple):
    """The sealed checkpoint that every case copies."""

    keys: Keys
    files: Mapping[str, bytes]
    payload: str
    """The signed statement in base64."""


def attack(bench: Bench, number: int) -> None:
    """Half of the cases damage a file, the others the signature."""
    random = bench.random("seals", number)
    sealed = _sealed(bench)
    source = bench.fresh_folder() / "source"
    for name, content in sealed.files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    if number % 2:
        what = str(damage_a_file(source, random))
    else:
        make = random.choice(_HOSTILE)
        what = f"{make.__name__} {make(source / SIGNATURE_NAME, sealed.keys, random)}"
    outcome = server.run("verify", source, "--public-key", sealed.keys.public, folder=bench.folder)
    check_conduct(outcome, f"sealed: {what}", answers=(0, 4))
    if outcome.status == 0 and not _is_true(source, sealed):
        raise Failure("wrong", f"sealed: {what}: verify says that all is as it was signed")


@cache
def _sealed(bench: Bench) -> Sealed:
    keys = write_keys(bench.root / f"keys-{bench.worker}")
    source = bench.fresh_folder() / "source"
    bench.copy("hf")
    outcome = server.run("seal", source, "--key", keys.private, "--overwrite", folder=bench.folder)
    assert outcome.status == 0, outcome.err
    files = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file()
    }
    return Sealed(keys, files, _payload(files[SIGNATURE_NAME]))


def _payload(signature: bytes) -> str:
    return str(json.loads(signature)["dsseEnvelope"]["payload"])


def _is_true(source: Path, sealed: Sealed) -> bool:
    """True if the directory is as the signature says. The check doesn't use the attacked code."""
    now = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and path.name != SIGNATURE_NAME
    }
    before = {name: content for name, content in sealed.files.items() if name != SIGNATURE_NAME}
    signature = (source / SIGNATURE_NAME).read_bytes()
    if _payload(signature) == sealed.payload:
        return now == before
    predicate = statement_in(source / SIGNATURE_NAME)["predicate"]
    stated = {each["name"]: each["digest"].lower() for each in predicate["resources"]}
    ignored = predicate["serialization"].get("ignore_paths", ())
    hashes = {
        name: hashlib.sha256(content).hexdigest()
        for name, content in now.items()
        if not any(name == each or name.startswith(f"{each}/") for each in ignored)
    }
    return stated == hashes


# What is done to a signature.


def another_bundle(signature: Path, keys: Keys, random: Random) -> str:
    content, text = mutate_json(signature.read_bytes(), random)
    signature.write_bytes(content)
    return text


def another_statement(signature: Path, keys: Keys, random: Random) -> str:
    """Not signed again."""
    bundle = json.loads(signature.read_bytes())
    content, text = mutate_json(base64.b64decode(bundle["dsseEnvelope"]["payload"]), random)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(content).decode()
    signature.write_bytes(json.dumps(bundle).encode())
    return text


def another_signed_statement(signature: Path, keys: Keys, random: Random) -> str:
    """Sign another statement with the same key, as a hostile signer can."""
    said: list[str] = []

    def change(statement: Any) -> Any:
        content, text = mutate_json(json.dumps(statement).encode(), random)
        said.append(text)
        return json.loads(content)

    sign_again(signature, keys, change)
    return said[0]


def huge_bundle(signature: Path, keys: Keys, random: Random) -> str:
    size = random.choice([1 << 20, 40 << 20])
    filler = random.choice([b"[", b'{"a":', b" ", b"1,", b'"'])
    signature.write_bytes(filler * (size // len(filler)))
    return f"{size} bytes of {filler!r}"


def huge_statement(signature: Path, keys: Keys, random: Random) -> str:
    depth = random.choice([101, 5000])
    many = random.choice([10, 200_000])

    def change(statement: Any) -> Any:
        nested: Any = []
        for _ in range(min(depth, 900)):
            nested = [nested]
        statement["predicate"]["extra"] = nested if many == 10 else [0] * many
        return statement

    sign_again(signature, keys, change)
    return f"{depth} deep, {many} values"


def other_algorithm(signature: Path, keys: Keys, random: Random) -> str:
    name = random.choice(["sha1", "md5", "SHA256", "none", "blake3"])

    def change(statement: Any) -> Any:
        statement["predicate"]["serialization"]["hash_type"] = name
        return statement

    sign_again(signature, keys, change)
    return name


def other_subject(signature: Path, keys: Keys, random: Random) -> str:
    def change(statement: Any) -> Any:
        statement["subject"][0]["digest"]["sha256"] = random.randbytes(32).hex()
        return statement

    sign_again(signature, keys, change)
    return ""


def other_key(signature: Path, keys: Keys, random: Random) -> str:
    """Another key, which says that it is the right one or not."""
    hint = json.loads(signature.read_bytes())["verificationMaterial"]["publicKey"]["hint"]
    sign_again(signature, write_keys(signature.parents[1] / "other"), lambda statement: statement)
    if random.random() < 0.5:
        return "with its hint"
    bundle = json.loads(signature.read_bytes())
    bundle["verificationMaterial"]["publicKey"]["hint"] = random.choice([hint, None, ""])
    signature.write_bytes(json.dumps(bundle).encode())
    return "with another hint"


_HOSTILE: tuple[Callable[[Path, Keys, Random], str], ...] = (
    another_bundle, another_statement, another_signed_statement, huge_bundle, huge_statement, other_algorithm, other_subject,
    other_key,
)  # fmt: skip
