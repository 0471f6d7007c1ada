"""Profiles of AWS: credentials and the endpoint come by boto3's own chain, and nothing shows a secret."""

from pathlib import Path

import pytest

from tests.conftest import FIXTURES
from tests.runs import run
from tests.stores.conftest import BUCKET
from tests.stores.small_store import Fault, SmallStore

LLAMA = FIXTURES / "peft-llama-all-linear/base"
KEY, SECRET, TOKEN = (
    "AKIAOFTHEPROFILE0001",
    "profile/secret/0123456789abcdefghijklmno",
    "session/token",
)


@pytest.fixture
def profile(
    writable: SmallStore, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A profile with keys, region and endpoint in AWS's two files. The environment holds none of them."""
    home = tmp_path_factory.mktemp("home")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    (home / "config").write_text(
        f"[profile lab]\nregion = eu-west-3\nendpoint_url = {writable.url}\n"
    )
    (home / "credentials").write_text(
        f"[lab]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\naws_session_token = {TOKEN}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    return home


@pytest.mark.usefixtures("profile")
def test_a_profile_gives_keys_region_and_endpoint_and_no_output_shows_them(
    writable: SmallStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    outcome = run(
        "convert", LLAMA, f"s3://{BUCKET}/out", "--saver", "hf", "--max-shard-size", "20KB"
    )
    assert outcome.status == 0, outcome.err
    assert writable.headers
    for headers in writable.headers:
        assert f"Credential={KEY}/" in headers
        assert "/eu-west-3/s3/" in headers
    looked = run("inspect", f"s3://{BUCKET}/out")
    assert looked.status == 0, looked.err
    writable.hook = lambda asked: Fault("status", 403, "AccessDenied")
    refused = run("inspect", f"s3://{BUCKET}/out")
    assert refused.status == 1
    shown = [caplog.text]
    shown += [text for each in (outcome, looked, refused) for text in (each.out, each.err)]
    stored = b"".join(writable.below("").values())
    for secret in (SECRET, TOKEN, KEY):
        assert secret not in "".join(shown)
        assert secret.encode() not in stored


@pytest.mark.usefixtures("profile")
def test_a_profile_that_does_not_exist_ends_the_run_before_a_request(
    writable: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "other")
    outcome = run("inspect", f"s3://{BUCKET}/model")
    assert outcome.status == 1
    assert "check AWS_PROFILE" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not writable.asked
