"""Signatures of the real package model-signing 1.1.1 are verified, and it verifies ours.

tests/fixtures/model-signing-1.1.1 was made by it: a directory of five files, signed with keys on P-256 and P-384, by
files and by shards, with each of its hashes. The test that runs it needs an environment of its own (docs/seals.md has
the commands), whose Python MODEL_SIGNING_PYTHON names.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import megaconv
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run
from tests.signatures.made import sign_again, statement_in, write_keys

THEIRS = FIXTURES / "model-signing-1.1.1"
SIGNED = {
    "files": "prime256v1",
    "blake3": "prime256v1",
    "shards": "prime256v1",
    "blake2": "secp384r1",
}
"""Signatures of the fixture, with their keys."""
PYTHON = os.environ.get("MODEL_SIGNING_PYTHON", "")


def verify(model: Path, name: str, key: str) -> tuple[int, str]:
    signature, public = THEIRS / f"{name}.sig", THEIRS / f"{key}.pub"
    outcome = run("verify", model, "--signature", signature, "--public-key", public)
    return outcome.status, outcome.out + outcome.err


@pytest.mark.parametrize("name", SIGNED)
def test_a_signature_of_model_signing_is_verified(name: str) -> None:
    status, text = verify(THEIRS / "model", name, SIGNED[name])
    assert status == 0
    assert statement_in(THEIRS / f"{name}.sig")["subject"][0]["digest"]["sha256"] in text


@pytest.mark.parametrize("name", SIGNED)
def test_another_key_of_the_same_signer_is_refused(name: str) -> None:
    (other,) = {"prime256v1", "secp384r1"} - {SIGNED[name]}
    status, text = verify(THEIRS / "model", name, other)
    assert status == 4
    assert "was signed with another key" in text


@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("what", ["changed", "added", "missing"])
def test_every_difference_is_named(name: str, what: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(THEIRS / "model", tmp_path / "model"))
    if what == "changed":
        content = bytearray((model / "weights.bin").read_bytes())
        content[700] ^= 1
        (model / "weights.bin").write_bytes(content)
    elif what == "added":
        (model / "a" / "more").write_bytes(b"z")
    else:
        (model / "config.json").unlink()
    status, text = verify(model, name, SIGNED[name])
    expected = {"changed": "weights.bin", "added": "a/more", "missing": "config.json"}[what]
    assert status == 4
    assert text.count("\n") == 1
    assert expected in text
    assert f"({what})" in text


def test_paths_that_the_signer_left_out_are_named() -> None:
    assert "doesn't cover sub" in verify(THEIRS / "model", "blake2", "secp384r1")[1]


def in_shards_of_one_byte(statement: Any) -> Any:
    """A statement by which a file has as many shards as bytes."""
    statement["predicate"]["serialization"] |= {"method": "shards", "shard_size": 1}
    return statement


def test_small_shards_make_no_more_work_than_the_signature_has_lines(tmp_path: Path) -> None:
    keys, model = write_keys(tmp_path / "keys"), tmp_path / "model"
    model.mkdir()
    with (model / "weights.bin").open("wb") as file:
        file.truncate(1 << 40)  # a hole; a list of its bytes would fill the memory
    (model / "model.sig").write_bytes((THEIRS / "files.sig").read_bytes())
    sign_again(model / "model.sig", keys, in_shards_of_one_byte)
    outcome = run("verify", model, "--public-key", keys.public)
    assert outcome.status == 4
    assert "weights.bin:0:1 (added)" in outcome.err


def test_an_empty_file_that_no_shard_covers_is_named(tmp_path: Path) -> None:
    """The method has no shards of empty files, so that no signature tells whether one was added."""
    model = Path(shutil.copytree(THEIRS / "model", tmp_path / "model"))
    (model / "a" / "__init__.py").write_bytes(b"")
    status, text = verify(model, "shards", SIGNED["shards"])
    assert status == 0
    assert "doesn't cover a/__init__.py" in text
    status, text = verify(model, "files", SIGNED["files"])
    assert (status, "a/__init__.py (added)" in text) == (4, True)


CHECK = """
import sys
from model_signing import verifying
verifying.Config().use_elliptic_key_verifier(public_key=sys.argv[2]).verify(sys.argv[1], sys.argv[1] + "/model.sig")
"""
SIGN = """
import sys
from model_signing import hashing, signing
ignored = hashing.Config().set_ignored_paths(paths=["model.sig"])
signer = signing.Config().use_elliptic_key_signer(private_key=sys.argv[2]).set_hashing_config(ignored)
signer.sign(sys.argv[1], sys.argv[1] + "/model.sig")
"""


def model_signing(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]}
    )


@pytest.mark.model_signing
@pytest.mark.skipif(not PYTHON, reason="MODEL_SIGNING_PYTHON names no Python with model-signing")
@pytest.mark.parametrize(
    "curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda each: each.name
)
def test_model_signing_verifies_our_seal_and_finds_a_change(
    curve: ec.EllipticCurve, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", curve)
    model = write_llama(tmp_path / "model", layers=1)
    (model / "a").mkdir()
    (model / "a" / "c").write_text("y")
    (model / "a-b").write_text("x")
    megaconv.seal(model, key=keys.private)
    found = model_signing(CHECK, model, keys.public)
    assert found.returncode == 0, found.stderr
    (model / "a-b").write_text("z")
    found = model_signing(CHECK, model, keys.public)
    assert found.returncode
    assert "Hash mismatch for 'a-b'" in found.stderr


@pytest.mark.model_signing
@pytest.mark.skipif(not PYTHON, reason="MODEL_SIGNING_PYTHON names no Python with model-signing")
def test_a_seal_and_a_signature_of_model_signing_have_the_same_digest(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys")
    model = write_llama(tmp_path / "model", layers=1)
    sealed = megaconv.seal(model, key=keys.private)
    (model / "model.sig").unlink()
    assert model_signing(SIGN, model, keys.private).returncode == 0
    found = megaconv.verify(model, public_key=keys.public)
    assert found.same
    assert found.signed is not None
    assert found.signed.root == sealed.digest
