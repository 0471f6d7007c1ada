"""Signatures without a key of one's own: sigstore signs for an identity. Needs the package sigstore, 4 or newer.

Signing talks to sigstore's servers: an identity provider, a certificate authority, and a transparency log. It has been
tested with a stub of the package only, and never online. Verifying needs sigstore's root of trust: the package's own
copy, or a file (`--trust-config`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.regular_files import read_small
from megaconv.errors import CheckpointError, CorruptCheckpoint, ModelsDiffer, UsageError
from megaconv.signatures.bundle import PAYLOAD_TYPE, Bundle
from megaconv.signatures.statement import corrupt

_CONFIG_BYTES = 1 << 20
"""A file with sigstore's root of trust: some 10 kB."""


@dataclass(frozen=True)
class Identity:
    """The signer whom a certificate must name."""

    name: str
    """An email address, or the URI of a workflow."""
    provider: str
    """The URL of the identity provider that issued the token."""
    trust_config: Path | None = None

    def verify(self, bundle: Bundle) -> None:
        """Raises ModelsDiffer (`wrong-signature`) unless this identity signed the payload."""
        if not bundle.has_certificate:
            raise corrupt(bundle.path, "is signed with a key, not with a certificate of sigstore")
        models, verify = _module("sigstore.models"), _module("sigstore.verify")
        policy = verify.policy.Identity(identity=self.name, issuer=self.provider)
        root = _trusted_root(models, self.trust_config)
        try:
            kind, payload = verify.Verifier(trusted_root=root).verify_dsse(
                models.Bundle.from_json(bundle.content), policy
            )
        except Exception as error:  # sigstore's errors have no common class
            raise ModelsDiffer(
                f"{bundle.path}: is not a signature of {self.name} ({self.provider}): {_line(error)}",
                code="wrong-signature",
            ) from error
        if (kind, payload) != (PAYLOAD_TYPE, bundle.payload):
            raise corrupt(bundle.path, "sigstore reads another statement in it")


def sign(payload: bytes, trust_config: Path | None = None) -> bytes:
    """The bundle with sigstore's signature for a statement.

    The identity is that of the environment, such as a GitHub workflow; otherwise a browser asks for it.
    Raises CheckpointError if sigstore doesn't sign.
    """
    models, oidc = _module("sigstore.models"), _module("sigstore.oidc")
    statements, signing = _module("sigstore.dsse"), _module("sigstore.sign")
    try:
        config = _trust(models, trust_config, offline=False)
        token = _token(oidc, config)
        with signing.SigningContext.from_trust_config(config).signer(token) as signer:
            bundle = signer.sign_dsse(statements.Statement(payload))
        return str(bundle.to_json()).encode()
    except CheckpointError:
        raise
    except Exception as error:  # sigstore's errors have no common class
        raise CheckpointError(f"--sigstore: sigstore did not sign: {_line(error)}") from error


def _token(oidc: Any, config: Any) -> Any:
    """The identity token of the environment, or one from a browser."""
    found = oidc.detect_credential()
    if found is not None:
        return oidc.IdentityToken(found)
    return oidc.Issuer(config.signing_config.get_oidc_url()).identity_token()


def _trusted_root(models: Any, config: Path | None) -> Any:
    """The root of trust, without a network. Raises CheckpointError if the package's own one is not usable."""
    try:
        return _trust(models, config, offline=True).trusted_root
    except CheckpointError:
        raise
    except Exception as error:  # sigstore's errors have no common class
        raise CheckpointError(
            f"sigstore's root of trust can't be loaded: {_line(error)}; pass --trust-config FILE"
        ) from error


def _trust(models: Any, config: Path | None, *, offline: bool) -> Any:
    """The trust configuration. Raises UsageError for a file that holds none, and sigstore's errors without a file."""
    if config is None:
        return models.ClientTrustConfig.production(offline=offline)
    try:
        content = read_small(config, _CONFIG_BYTES)
    except CorruptCheckpoint as error:
        raise UsageError(f"--trust-config {error}") from error
    try:
        return models.ClientTrustConfig.from_json(content.decode())
    except Exception as error:  # pydantic's errors are no ValueError everywhere
        raise UsageError(
            f"--trust-config {config}: is not a trust configuration of sigstore: {_line(error)}"
        ) from error


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"sigstore is not installed ({error}); pip install 'sigstore>=4'"
        ) from error


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{text or type(error).__name__:.300}"
