"""Hostile signatures: each is refused in one line with a code, whoever signed it."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megaconv
from tests.models import write_llama
from tests.runs import run
from tests.signatures.made import Keys, sign_again, write_keys

Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return write_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> tuple[Path, bytes]:
    model = write_llama(tmp_path_factory.mktemp("sealed") / "model", layers=1)
    megaconv.seal(model, key=keys.private)
    return model, (model / "model.sig").read_bytes()


def put(place: str, value: Any) -> Change:
    """A change of one value. place: its keys, with dots between them."""

    def change(document: Any) -> Any:
        *outer, last = [int(each) if each.isdigit() else each for each in place.split(".")]
        inner = document
        for key in outer:
            inner = inner[key]
        inner[last] = value
        return document

    return change


def doubled(statement: Any) -> Any:
    statement["predicate"]["resources"] *= 2
    return statement


def nested(statement: Any) -> Any:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    return statement | {"deep": deep}


def refused(model: Path, keys: Keys) -> tuple[int, str, str]:
    """(status, code, message) of verify."""
    outcome = run("verify", model, "--public-key", keys.public, "--json")
    found = json.loads(outcome.out)["error"]
    assert "\n" not in found["message"]
    return outcome.status, found["code"], found["message"]


STATEMENTS: dict[str, tuple[Change, str]] = {
    "swapped subject": (put("subject.0.digest.sha256", "ab" * 32), "not the digest"),
    "two subjects": (lambda each: each | {"subject": each["subject"] * 2}, "too many values"),
    "no subject": (put("subject", []), "not enough values"),
    "other algorithm": (put("predicate.serialization.hash_type", "md5"), "hash_type is 'md5'"),
    "other method": (put("predicate.serialization.method", "tensors"), "method is 'tensors'"),
    "other predicate": (put("predicateType", "https://slsa.dev/provenance/v1"), "predicateType"),
    "other statement": (put("_type", "https://in-toto.io/Statement/v0.1"), "_type"),
    "a name outside": (put("predicate.resources.0.name", "../config.json"), "not below"),
    "an absolute name": (put("predicate.resources.0.name", "/etc/passwd"), "not below"),
    "a name twice": (doubled, "twice"),
    "a digest that is none": (put("predicate.resources.0.digest", "xyz"), "hexadecimal"),
    "a number for a name": (put("predicate.resources.0.name", 5), "expected a text"),
    "no resources": (put("predicate.resources", None), "not iterable"),
    "deeply nested": (nested, "nested more than 100 levels"),
    "many values": (lambda each: each | {"x": [0] * 300_000}, "more than any checkpoint has"),
    "not an object": (lambda each: [each], "not readable"),
    "a fraction of a shard": (
        put(
            "predicate.serialization",
            {"method": "shards", "hash_type": "sha256", "shard_size": 0.5},
        ),
        "shard_size",
    ),
}


@pytest.mark.parametrize("what", STATEMENTS)
def test_a_statement_that_its_signer_made_wrong_is_refused(
    what: str, sealed: tuple[Path, bytes], keys: Keys
) -> None:
    model, original = sealed
    (model / "model.sig").write_bytes(original)
    change, expected = STATEMENTS[what]
    sign_again(model / "model.sig", keys, change)
    status, code, message = refused(model, keys)
    assert (status, code) == (3, "corrupt-signature")
    assert expected in message


BUNDLES: dict[str, tuple[Change, str]] = {
    "other media type": (put("mediaType", "application/json"), "mediaType"),
    "other payload type": (put("dsseEnvelope.payloadType", "text/plain"), "payloadType"),
    "no signature": (put("dsseEnvelope.signatures", []), "0 signatures"),
    "two signatures": (put("dsseEnvelope.signatures", [{"sig": ""}] * 2), "2 signatures"),
    "no base64": (put("dsseEnvelope.signatures.0.sig", "?"), "not a readable sigstore bundle"),
    "wrong types": (put("verificationMaterial", []), "not a readable sigstore bundle"),
    "a number for a hint": (put("verificationMaterial.publicKey.hint", 7), "hint"),
    "a certificate": (put("verificationMaterial", {"certificate": {}}), "with a certificate"),
    "deeply nested": (nested, "nested more than 100 levels"),
    "many values": (lambda each: each | {"x": [0] * 30_000}, "more than any checkpoint has"),
}


@pytest.mark.parametrize("what", BUNDLES)
def test_a_bundle_of_another_structure_is_refused(
    what: str, sealed: tuple[Path, bytes], keys: Keys
) -> None:
    model, original = sealed
    change, expected = BUNDLES[what]
    (model / "model.sig").write_text(json.dumps(change(json.loads(original))))
    status, code, message = refused(model, keys)
    assert (status, code) == (3, "corrupt-signature")
    assert expected in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not a readable"),
        (b"\x80\x81", "not a readable"),
        (b"[" * 100_000, "more than any checkpoint has"),
        (b" " * (40 << 20), "has 41,943,040 bytes"),
    ],
    ids=["empty", "binary", "brackets", "huge"],
)
def test_a_file_that_is_no_bundle_is_refused(
    content: bytes, expected: str, sealed: tuple[Path, bytes], keys: Keys
) -> None:
    model, _ = sealed
    (model / "model.sig").write_bytes(content)
    status, code, message = refused(model, keys)
    assert (status, code) == (3, "corrupt-signature")
    assert expected in message


def test_a_changed_statement_is_refused(sealed: tuple[Path, bytes], keys: Keys) -> None:
    model, original = sealed
    bundle = json.loads(original)
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    changed = payload.replace(b'"model"', b'"other"')
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
    (model / "model.sig").write_text(json.dumps(bundle))
    status, code, message = refused(model, keys)
    assert (status, code) == (4, "wrong-signature")
    assert "for this statement" in message


@pytest.mark.parametrize("hint", ["own", "the right one's", "none"])
def test_another_key_is_refused_whatever_it_calls_itself(
    hint: str, sealed: tuple[Path, bytes], keys: Keys, tmp_path: Path
) -> None:
    model, original = sealed
    (model / "model.sig").write_bytes(original)
    right = json.loads(original)["verificationMaterial"]["publicKey"]["hint"]
    sign_again(model / "model.sig", write_keys(tmp_path), lambda statement: statement)
    bundle = json.loads((model / "model.sig").read_bytes())
    if hint != "own":
        bundle["verificationMaterial"]["publicKey"]["hint"] = right if hint != "none" else None
        (model / "model.sig").write_text(json.dumps(bundle))
    status, code, _ = refused(model, keys)
    assert (status, code) == (4, "wrong-signature")


def test_a_changed_byte_an_added_file_and_a_removed_file_have_the_same_code(
    sealed: tuple[Path, bytes], keys: Keys
) -> None:
    model, original = sealed
    (model / "model.sig").write_bytes(original)
    (model / "added").write_text("")
    assert refused(model, keys)[:2] == (4, "changed-since-signed")
    (model / "added").unlink()
    config = (model / "config.json").read_bytes()
    (model / "config.json").unlink()
    assert refused(model, keys)[:2] == (4, "changed-since-signed")
    (model / "config.json").write_bytes(config.replace(b" ", b"\n", 1))
    assert refused(model, keys)[:2] == (4, "changed-since-signed")
    (model / "config.json").write_bytes(config)
    assert megaconv.verify(model, public_key=keys.public).same
