"""The options of seals: whose signature a checkpoint gets, and whose it must have."""

from dataclasses import dataclass
from pathlib import Path

from megaconv.local_paths import local_path
from megaconv.options.option import normalize, option


@dataclass(frozen=True)
class SealOptions:
    """Options of `seal`, and of `verify` for a seal's signature."""

    key: Path | None = option(
        None,
        "--key",
        commands=("seal",),
        read=local_path,
        help="Sign with this private key (ECDSA, in PEM).",
    )
    key_password_file: Path | None = option(
        None,
        "--key-password-file",
        commands=("seal",),
        read=local_path,
        help="A file with the password of an encrypted --key.",
    )
    sigstore: bool = option(
        False,
        "--sigstore",
        commands=("seal",),
        help="Sign by sigstore, as the identity of the environment. Its servers are asked.",
    )
    files_only: bool = option(
        False,
        "--files-only",
        commands=("seal",),
        help="Sign the files of any directory, without fingerprints of tensors.",
    )
    overwrite: bool = option(
        False, "--overwrite", commands=("seal",), help="Replace an earlier signature."
    )
    public_key: Path | None = option(
        None,
        "--public-key",
        commands=("verify",),
        read=local_path,
        help="Require a signature of this key (ECDSA, in PEM).",
    )
    signature: Path | None = option(
        None,
        "--signature",
        commands=("verify",),
        read=local_path,
        help="The signature's file, if it isn't PATH/model.sig.",
    )
    identity: str | None = option(
        None,
        "--identity",
        commands=("verify",),
        help="Require a signature by sigstore of this identity.",
    )
    identity_provider: str | None = option(
        None,
        "--identity-provider",
        metavar="URL",
        commands=("verify",),
        help="The URL of the provider that vouches for --identity.",
    )
    trust_config: Path | None = option(
        None,
        "--trust-config",
        commands=("seal", "verify"),
        read=local_path,
        help="Sigstore's root of trust, in a file; its public one by default.",
    )

    def __post_init__(self) -> None:
        normalize(self)
