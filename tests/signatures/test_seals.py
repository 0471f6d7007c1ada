"""`megaconv seal`, and `megaconv verify` of what it made."""

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

import megaconv
from megaconv.commands.progress import Progress
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run, snapshot
from tests.signatures.made import Keys, statement_in, write_keys

MEGATRON = FIXTURES / "core-llama-tp2pp2" / "checkpoint"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return write_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=1)


def test_a_checkpoint_of_others_gets_fingerprints_and_a_signature(model: Path, keys: Keys) -> None:
    weights = megaconv.fingerprint(model).weights
    outcome = run("seal", model, "--key", keys.private)
    assert outcome.status == 0
    assert weights in outcome.out
    names = [each["name"] for each in statement_in(model / "model.sig")["predicate"]["resources"]]
    assert names == ["config.json", "megaconv.json", "model.safetensors"]
    outcome = run("verify", model, "--public-key", keys.public)
    assert outcome.status == 0
    assert outcome.out.startswith("as signed: 3 files, digest ")
    assert f"and 1 other file, fingerprint {weights}" in outcome.out


def test_a_seal_without_a_key_finds_a_changed_tensor_and_a_changed_file(model: Path) -> None:
    assert "without a signature" in run("seal", model).out
    assert run("verify", model).status == 0
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)
    outcome = run("verify", model)
    assert outcome.status == 4
    assert "config.json  changed" in outcome.out
    assert len(outcome.out.splitlines()) == 3


def test_a_megatron_run_is_sealed_and_still_converts(tmp_path: Path, keys: Keys) -> None:
    source = Path(shutil.copytree(MEGATRON, tmp_path / "run"))
    assert run("seal", source, "--key", keys.private).status == 0
    assert run("verify", source, "--public-key", keys.public).status == 0
    out = tmp_path / "out"
    assert run("convert", source, out, "--saver", "hf").status == 0
    assert megaconv.fingerprint(out).weights == megaconv.fingerprint(MEGATRON).weights
    assert not (out / "model.sig").exists()


def test_an_output_keeps_its_record_but_no_directory_of_this_machine(
    model: Path, tmp_path: Path, keys: Keys
) -> None:
    out = tmp_path / "out"
    megaconv.convert(model, out, saver="core", tp=2)
    before = json.loads((out / "megaconv.json").read_bytes())
    run("seal", out, "--key", keys.private)
    after = json.loads((out / "megaconv.json").read_bytes())
    assert after["source"]["path"] == "model"
    assert after | {"source": before["source"]} == before
    assert str(tmp_path) not in (out / "megaconv.json").read_text()
    assert run("verify", out, "--public-key", keys.public).status == 0


def test_a_damaged_output_is_not_sealed(model: Path, tmp_path: Path, keys: Keys) -> None:
    out = tmp_path / "out"
    megaconv.convert(model, out, saver="hf")
    (out / "config.json").write_text((out / "config.json").read_text() + " ")
    assert_refused(
        run("seal", out, "--key", keys.private), 4, "a seal would confirm it", "config.json"
    )
    assert not (out / "model.sig").exists()


def test_an_earlier_signature_is_kept_unless_overwrite_is_given(model: Path, keys: Keys) -> None:
    run("seal", model, "--key", keys.private)
    assert_refused(run("seal", model, "--key", keys.private), 2, "--overwrite")
    (model / "notes.md").write_text("new")
    assert run("verify", model, "--public-key", keys.public).status == 4
    assert run("seal", model, "--key", keys.private, "--overwrite").status == 0
    assert run("verify", model, "--public-key", keys.public).status == 0


def test_files_of_any_directory_can_be_signed(tmp_path: Path, keys: Keys) -> None:
    (tmp_path / "any" / "deep").mkdir(parents=True)
    (tmp_path / "any" / "deep" / "file.bin").write_bytes(b"1")
    any_directory = tmp_path / "any"
    assert run("seal", any_directory, "--key", keys.private).status == 3
    assert run("seal", any_directory, "--key", keys.private, "--files-only").status == 0
    outcome = run("verify", any_directory, "--public-key", keys.public, "--json")
    assert outcome.status == 0
    assert json.loads(outcome.out)["signature"]["resources"] == 1


def test_an_encrypted_key_needs_its_password(model: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", secret=b"open sesame")
    assert_refused(run("seal", model, "--key", keys.private), 2, "--key-password-file")
    password = tmp_path / "password"
    password.write_text("open sesame\n")
    arguments = ("--key", keys.private, "--key-password-file", password)
    assert run("seal", model, *arguments).status == 0
    assert run("verify", model, "--public-key", keys.public).status == 0


def pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a private key in PEM"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "is not a private key"),
        (
            pem(rsa.generate_private_key(65537, 1024)),
            "is not an elliptic-curve key; expected ECDSA on P-256, P-384 or P-521",
        ),
        (pem(ec.generate_private_key(ec.SECP256K1())), "expected P-256, P-384 or P-521"),
        (b"x" * 70_000, "70,000 bytes"),
    ],
    ids=["empty", "garbage", "rsa", "secp256k1", "huge"],
)
def test_other_keys_are_refused_before_anything_is_written(
    content: bytes, expected: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "key.pem").write_bytes(content)
    assert_refused(run("seal", model, "--key", tmp_path / "key.pem"), 2, expected)
    assert not (model / "megaconv.json").exists()


def test_a_public_key_in_place_of_the_private_one_is_not_called_a_wrong_password(
    model: Path, keys: Keys
) -> None:
    outcome = run("seal", model, "--key", keys.public)
    assert_refused(outcome, 2, "is not a private key in PEM", "-----BEGIN EC PRIVATE KEY-----")
    assert "password" not in outcome.err
    outcome = run("verify", model, "--public-key", keys.private)
    assert_refused(outcome, 2, "is a private key", "give the public key")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--key", "a", "--sigstore"), "--key and --sigstore"),
        (("--files-only",), "--files-only"),
        (("--key-password-file", "a"), "--key-password-file"),
        (("--trust-config", "a"), "--trust-config"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arguments: tuple[str, ...], expected: str, model: Path
) -> None:
    assert_refused(run("seal", model, *arguments), 2, expected)


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (("--public-key", "missing.pem"), 2, "no such file"),
        (("--identity", "a@b.c"), 2, "give both"),
        (("--signature", "x.sig"), 2, "--public-key or --identity"),
        (("--public-key", "k", "--identity", "a@b.c"), 2, "leave one of them out"),
    ],
)
def test_verify_refuses_half_of_a_requirement(
    arguments: tuple[str, ...], status: int, expected: str, model: Path
) -> None:
    run("seal", model)
    assert_refused(run("verify", model, *arguments), status, expected)


def test_verify_refuses_a_checkpoint_without_the_required_signature(
    model: Path, keys: Keys
) -> None:
    run("seal", model)
    outcome = run("verify", model, "--public-key", keys.public, "--json")
    assert outcome.status == 3
    assert json.loads(outcome.out)["error"]["code"] == "not-signed"


def test_verify_mentions_a_signature_that_it_does_not_check(model: Path, keys: Keys) -> None:
    run("seal", model, "--key", keys.private)
    outcome = run("verify", model)
    assert outcome.status == 0
    assert "was not checked" in outcome.err


def test_links_are_refused_before_any_tensor_is_read(
    model: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "link.json").symlink_to(model / "config.json")
    monkeypatch.setattr("megaconv.commands.sealing.fingerprint_source", None)
    assert_refused(run("seal", model, "--key", keys.private), 3, "link.json", "is a link")
    assert not (model / "model.sig").exists()


def test_a_signature_that_verify_could_not_read_is_not_written(
    model: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaconv.commands.sealing.SIGNATURE_BYTES", 1000)
    assert_refused(run("seal", model, "--key", keys.private), 3, "for 3 files, and may have 1,000")
    assert not (model / "megaconv.json").exists()
    assert not (model / "model.sig").exists()


def test_an_iteration_is_sealed_with_its_run(tmp_path: Path, keys: Keys) -> None:
    """The run's record would otherwise be written into the iteration, whose paths are others."""
    out = tmp_path / "run"
    megaconv.convert(MEGATRON, out, saver="core")
    (iteration,) = out.glob("iter_*")
    before = snapshot(out)
    assert_refused(
        run("seal", iteration, "--key", keys.private), 2, f"seal the run's directory, {out}"
    )
    assert snapshot(out) == before
    assert run("seal", out, "--key", keys.private).status == 0
    assert run("verify", iteration, "--public-key", keys.public).status == 0


def test_a_record_with_a_number_for_adapters_is_sealed_as_it_is(
    model: Path, tmp_path: Path, keys: Keys
) -> None:
    out = tmp_path / "out"
    megaconv.convert(model, out, saver="hf")
    found = json.loads((out / "megaconv.json").read_bytes())
    (out / "megaconv.json").write_text(json.dumps(found | {"adapters": 5}))
    assert run("seal", out, "--key", keys.private).status == 0
    assert json.loads((out / "megaconv.json").read_bytes())["adapters"] == 5


def test_any_name_of_a_file_can_be_signed(tmp_path: Path, keys: Keys) -> None:
    """Two colons are in the names of shards, and `²` is a digit but not a number."""
    place = tmp_path / "any"
    place.mkdir()
    for name in ("a:²:3", "a:1:2", "a", "b::", ","):
        (place / name).write_text(name)
    assert run("seal", place, "--key", keys.private, "--files-only").status == 0
    assert run("verify", place, "--public-key", keys.public).status == 0


def test_progress_counts_the_files_and_the_tensors_each_from_the_start(
    model: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaconv.commands.progress.LINE_SECONDS", 0.0)
    for words in (
        ("seal", model, "--key", keys.private),
        ("verify", model, "--public-key", keys.public),
    ):
        shares = [int(each) for each in re.findall(r"\((\d+)%\)", run(*words).err)]
        assert max(shares) == 100
        assert shares.count(100) == 2


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_second_pass_replaces_the_bar_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[MagicMock] = []

    def make_bar() -> MagicMock:
        bars.append(MagicMock())
        return bars[-1]

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr("megaconv.commands.bar.make_bar", make_bar)
    with Progress("sealing") as progress:
        progress.expect(10)
        progress.expect(20)
        assert [bar.stop.call_count for bar in bars] == [1, 0]
    assert [bar.stop.call_count for bar in bars] == [1, 1]


def test_a_link_that_was_added_is_found(model: Path, tmp_path: Path, keys: Keys) -> None:
    run("seal", model, "--key", keys.private)
    (model / "link").symlink_to(tmp_path)
    assert_refused(run("verify", model, "--public-key", keys.public), 3, "is a link")


def test_a_signature_behind_a_link_hides_no_added_file(model: Path, keys: Keys) -> None:
    """transformers reads adapter_config.json. It may have the keys of a bundle, and those of an adapter."""
    run("seal", model, "--key", keys.private)
    signature, added = model / "model.sig", model / "adapter_config.json"
    bundle = json.loads(signature.read_text())
    added.write_text(json.dumps(bundle | {"base_model_name_or_path": "another/model"}))
    signature.unlink()
    signature.symlink_to(added.name)
    outcome = run("verify", model, "--public-key", keys.public)
    assert_refused(outcome, 4, "adapter_config.json (added)")


def test_a_seal_in_place_of_a_link_covers_the_file_behind_it(model: Path, keys: Keys) -> None:
    (model / "model.sig").symlink_to("config.json")
    sealed = run("seal", model, "--key", keys.private, "--overwrite", "--json")
    assert sealed.status == 0, sealed.err
    assert not (model / "model.sig").is_symlink()
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    outcome = run("verify", model, "--public-key", keys.public)
    assert_refused(outcome, 4, "config.json (changed)")


def test_a_seal_does_not_cover_the_files_of_git(model: Path, keys: Keys) -> None:
    run("seal", model, "--key", keys.private)
    (model / ".git").mkdir()
    (model / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (model / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert run("verify", model, "--public-key", keys.public).status == 0


def test_python_takes_paths_as_text(model: Path, keys: Keys) -> None:
    megaconv.seal(str(model), key=str(keys.private))
    assert megaconv.verify(str(model), public_key=str(keys.public)).signed is not None
