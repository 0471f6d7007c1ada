"""Signatures by sigstore, with a stub of its package: what we ask of it, and what we do with its answers.

The stub has the names and arguments of sigstore 4.5. Nothing here talks to sigstore's servers.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megaconv.signatures.bundle import MEDIA_TYPE, PAYLOAD_TYPE
from tests.models import write_llama
from tests.runs import assert_refused, run

CALLS: list[tuple[str, Any]] = []
WHO, PROVIDER = "robot@example.org", "https://accounts.example.org"


class Bundle(SimpleNamespace):
    """sigstore.models.Bundle."""

    content: str

    def to_json(self) -> str:
        return self.content

    @classmethod
    def from_json(cls, content: bytes) -> "Bundle":
        return cls(content=content.decode())


class Trust(SimpleNamespace):
    """sigstore.models.ClientTrustConfig."""

    trusted_root = "root"
    signing_config = SimpleNamespace(get_oidc_url=lambda: PROVIDER)

    @classmethod
    def production(cls, offline: bool = False) -> "Trust":
        CALLS.append(("trust", offline))
        return cls()

    @classmethod
    def from_json(cls, text: str) -> "Trust":
        json.loads(text)
        CALLS.append(("trust", text))
        return cls()


class Signer:
    """A stand-in for the result of SigningContext.signer()."""

    def sign_dsse(self, statement: Any) -> Bundle:
        import base64

        envelope = {
            "payload": base64.b64encode(statement.content).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(b"by sigstore").decode()}],
        }
        material = {"certificate": {"rawBytes": base64.b64encode(WHO.encode()).decode()}}
        value = {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": material,
            "dsseEnvelope": envelope,
        }
        return Bundle(content=json.dumps(value))


class Context:
    """sigstore.sign.SigningContext."""

    @classmethod
    def from_trust_config(cls, config: Trust) -> "Context":
        return cls()

    @contextmanager
    def signer(self, token: Any) -> Iterator[Signer]:
        CALLS.append(("token", token.text))
        yield Signer()


class Verifier:
    """sigstore.verify.Verifier: the certificate must name the identity of the policy."""

    def __init__(self, *, trusted_root: str) -> None:
        CALLS.append(("root", trusted_root))

    def verify_dsse(self, bundle: Bundle, policy: Any) -> tuple[str, bytes]:
        import base64

        value = json.loads(bundle.content)
        certificate = value["verificationMaterial"]["certificate"]["rawBytes"]
        if base64.b64decode(certificate).decode() != policy.identity or policy.issuer != PROVIDER:
            raise RuntimeError("Certificate's SANs\ndo not match")
        return PAYLOAD_TYPE, base64.b64decode(value["dsseEnvelope"]["payload"])


@pytest.fixture(autouse=True)
def sigstore(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    contents: dict[str, dict[str, Any]] = {
        "sigstore": {},
        "sigstore.models": {"Bundle": Bundle, "ClientTrustConfig": Trust},
        "sigstore.oidc": {
            "detect_credential": lambda: "a token of the environment",
            "IdentityToken": lambda text: SimpleNamespace(text=text),
        },
        "sigstore.dsse": {"Statement": lambda content: SimpleNamespace(content=content)},
        "sigstore.sign": {"SigningContext": Context},
        "sigstore.verify": {
            "Verifier": Verifier,
            "policy": SimpleNamespace(
                Identity=lambda identity, issuer: SimpleNamespace(identity=identity, issuer=issuer)
            ),
        },
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = write_llama(tmp_path / "model", layers=1)
    assert run("seal", model, "--sigstore").status == 0
    return model


def test_the_token_of_the_environment_signs_and_the_identity_verifies(model: Path) -> None:
    assert CALLS == [("trust", False), ("token", "a token of the environment")]
    asked = ("--identity", WHO, "--identity-provider", PROVIDER)
    outcome = run("verify", model, *asked)
    assert outcome.status == 0
    assert outcome.out.startswith("as signed: 3 files")
    assert CALLS[2:] == [("trust", True), ("root", "root")]


def test_another_identity_is_refused_in_one_line(model: Path) -> None:
    asked = ("--identity", "thief@example.org", "--identity-provider", PROVIDER)
    assert_refused(run("verify", model, *asked), 4, "thief@example.org", "SANs do not match")


def test_a_changed_file_is_found_behind_a_correct_signature(model: Path) -> None:
    (model / "config.json").write_text("{}")
    asked = ("--identity", WHO, "--identity-provider", PROVIDER)
    assert_refused(run("verify", model, *asked), 4, "config.json (changed)")


def test_a_root_of_trust_can_be_a_file(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "trust.json"
    root.write_text("{}")
    asked = ("--identity", WHO, "--identity-provider", PROVIDER, "--trust-config", root)
    assert run("verify", model, *asked).status == 0
    assert ("trust", "{}") in CALLS
    root.write_text("no JSON")
    assert_refused(run("verify", model, *asked), 2, "trust.json", "not a trust configuration")


def test_a_missing_root_of_trust_is_an_error_of_usage(model: Path, tmp_path: Path) -> None:
    words = ("--trust-config", tmp_path / "missing.json")
    asked = ("--identity", WHO, "--identity-provider", PROVIDER)
    assert_refused(run("verify", model, *asked, *words), 2, "--trust-config", "missing.json")
    assert_refused(run("seal", model, "--sigstore", "--overwrite", *words), 2, "--trust-config")


def test_a_root_of_trust_that_cannot_be_loaded_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(offline: bool = False) -> Trust:
        raise OSError("no cached\nroot")

    monkeypatch.setattr(Trust, "production", refuse)
    asked = ("--identity", WHO, "--identity-provider", PROVIDER)
    assert_refused(run("verify", model, *asked), 1, "no cached root", "pass --trust-config FILE")


def test_a_failure_of_sigstore_leaves_no_signature(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "model.sig").unlink()

    def refuse(self: Signer, statement: Any) -> Bundle:
        raise RuntimeError("the log\nis down")

    monkeypatch.setattr(Signer, "sign_dsse", refuse)
    assert_refused(run("seal", model, "--sigstore"), 1, "the log is down")
    assert not (model / "model.sig").exists()


def test_a_missing_package_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sigstore.models", None)
    asked = ("--identity", WHO, "--identity-provider", PROVIDER)
    assert_refused(run("verify", model, *asked), 2, "sigstore is not installed")
