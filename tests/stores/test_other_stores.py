"""Google Cloud Storage and Azure: reading and writing as with S3, against servers that refuse what these stores refuse."""

from pathlib import Path

import pytest

from formats.partial_files import RemoteState
from formats.stores import az, patience
from formats.stores.addresses import parse
from formats.stores.az import AzureContainer
from formats.stores.claim import CLAIM, Claim
from formats.stores.patience import Patience
from formats.stores.stand_in import fetch
from megaconv.engine import transfer
from megaconv.engine.conversion import fingerprint
from megaconv.errors import CorruptCheckpoint
from megaconv.hub import resolve
from megaconv.store_inputs import writable_store
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run
from tests.stores.attacks import FAULTS, fault, kill, undisturbed
from tests.stores.conftest import BUCKET
from tests.stores.small_azure import ACCOUNT, SmallAzure
from tests.stores.small_azure import KEY as AZURE_KEY
from tests.stores.small_google import SECRET, SmallGoogle
from tests.stores.small_store import Asked, Fault, SmallStore
from tests.stores.test_reading import FORMATS

LLAMA = FIXTURES / "peft-llama-all-linear/base"
STORES = ("gs", "az", pytest.param("azurite", marks=pytest.mark.azurite))
HF = ("--saver", "hf", "--max-shard-size", "20KB")


@pytest.fixture(params=STORES)
def other(request: pytest.FixtureRequest) -> tuple[str, SmallStore]:
    """(scheme, an empty store)."""
    scheme, name = {
        "gs": ("gs", "google"),
        "az": ("az", "azure"),
        "azurite": ("az", "microsofts"),
    }[request.param]
    return scheme, request.getfixturevalue(name)


def upload(store: SmallStore, source: Path, prefix: str = "model") -> None:
    for file in source.rglob("*"):
        if file.is_file():
            store.put(f"{prefix}/{file.relative_to(source)}", file.read_bytes())
    store.restart()


def test_an_output_in_another_store_has_the_bytes_of_a_local_one(
    other: tuple[str, SmallStore], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scheme, store = other
    upload(store, LLAMA)
    assert run("convert", LLAMA, tmp_path / "out", *HF).status == 0
    uri = f"{scheme}://{BUCKET}"
    outcome = run("convert", f"{uri}/model", f"{uri}/out", *HF, "--verify")
    assert outcome.status == 0, outcome.err
    found = store.below("out/")
    for file in (tmp_path / "out").iterdir():
        if file.name != "megaconv.json":
            assert found[file.name] == file.read_bytes(), file.name
    assert not [key for key in store.all_keys() if ".megaconv-" in key]
    assert not store.unfinished
    assert fingerprint(f"{uri}/out").weights == fingerprint(LLAMA).weights
    again = run("convert", f"{uri}/model", f"{uri}/out", *HF)
    assert (again.status, "already exists" in again.err) == (2, True)
    printed = outcome.out + outcome.err + again.err + "".join(capfd.readouterr())
    for secret in (SECRET, AZURE_KEY):
        assert secret not in printed + "".join(str(each) for each in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_reads_from_another_store(other: tuple[str, SmallStore], name: str) -> None:
    scheme, store = other
    source = FIXTURES / FORMATS[name]
    if source.is_file():
        store.put(f"model/{source.name}", source.read_bytes())
        uri = f"{scheme}://{BUCKET}/model/{source.name}"
    else:
        upload(store, source)
        uri = f"{scheme}://{BUCKET}/model"
    assert fingerprint(uri) == fingerprint(source)


def test_an_object_that_changes_while_it_is_read_ends_the_run(
    other: tuple[str, SmallStore],
) -> None:
    scheme, store = other
    upload(store, LLAMA)
    place = resolve(f"{scheme}://{BUCKET}/model")
    name = next(LLAMA.glob("*.safetensors")).name
    content = (LLAMA / name).read_bytes()
    store.put(f"model/{name}", content[:-1] + bytes([content[-1] ^ 1]))
    assert isinstance(place, Path)
    with pytest.raises(CorruptCheckpoint, match="replaced or deleted"):
        fingerprint(place)


@pytest.mark.parametrize("prefix", ["a/../out", "out/..", "a//out", "./out"])
def test_an_output_at_a_prefix_that_is_no_path_is_refused(
    other: tuple[str, SmallStore], prefix: str
) -> None:
    """Azure's client resolves `..`: objects of another checkpoint could lie there."""
    scheme, store = other
    outcome = run("convert", LLAMA, f"{scheme}://{BUCKET}/{prefix}", *HF)
    assert_refused(outcome, 2, "between two slashes")
    assert not store.all_keys()


def test_a_second_run_on_the_same_target_is_refused(other: tuple[str, SmallStore]) -> None:
    scheme, _ = other
    words = ("convert", LLAMA, f"{scheme}://{BUCKET}/out", *HF)
    claim = Claim(writable_store(f"{scheme}://{BUCKET}"), "out", "1.0")
    claim.take(replaces=False, foreign=())
    claim.change(phase="sending")
    outcome = run(*words)
    assert outcome.status == 2
    assert "is writing there" in outcome.err
    claim.remove()
    assert run(*words).status == 0


def test_a_claim_is_never_replaced_without_looking(other: tuple[str, SmallStore]) -> None:
    """An object that another program puts in the place of the claim, between look and put, stays."""
    scheme, store = other

    def race(asked: Asked) -> Fault | None:
        if (
            asked.action == "put"
            and asked.key.endswith(CLAIM)
            and asked.key not in store.all_keys()
        ):
            store.put(asked.key, b"{}")
        return None

    store.hook = race
    outcome = run("convert", LLAMA, f"{scheme}://{BUCKET}/out", *HF)
    assert outcome.status == 2
    assert store.below("out/") == {CLAIM: b"{}"}


@pytest.mark.parametrize("kind", ["reset after", "403"])
def test_faults_leave_no_torn_output(other: tuple[str, SmallStore], kind: str) -> None:
    scheme, store = other
    words = ("convert", LLAMA, f"{scheme}://{BUCKET}/out", "--saver", "hf")
    scenario, requests = undisturbed(store, words)
    for place in (requests // 2, requests - 4):
        fault(store, scenario, place, kind, lasting=kind == "403")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_any_request_may_fail(other: tuple[str, SmallStore], kind: str) -> None:
    """Acceptance 5 for these stores."""
    scheme, store = other
    words = ("convert", LLAMA, f"{scheme}://{BUCKET}/out", *HF)
    scenario, requests = undisturbed(store, words)
    for number in range(0, requests, 3):
        fault(store, scenario, number, kind, lasting=bool(number % 2))


@pytest.mark.slow
def test_killed_runs_leave_nothing_or_everything(other: tuple[str, SmallStore]) -> None:
    """Acceptance 6 for these stores."""
    scheme, store = other
    words = ("convert", LLAMA, f"{scheme}://{BUCKET}/out", *HF)
    scenario, requests = undisturbed(store, words)
    for number in range(0, requests, 2):
        kill(store, scenario, number, after=bool(number % 4), resume=bool(number % 3))


@pytest.mark.slow
def test_a_resumed_run_sends_only_what_is_missing(
    other: tuple[str, SmallStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance 11. Google's store doesn't list checksums; the journal has them. It is written now and then, so that a run
    as short as this has no entry before all parts are sent."""
    from formats.stores.target import StoreTarget

    scheme, store = other
    monkeypatch.setattr(transfer, "JOURNAL_SECONDS", 0)
    words = ("convert", LLAMA, f"{scheme}://{BUCKET}/out", *HF, "--workers", "1")
    scenario, _ = undisturbed(store, words)
    total = sum(each.nbytes for each in store.of("part"))
    store.clear()
    taken = 0

    def refuse(asked: Asked) -> Fault | None:
        """Refuse the end to Google's store, and more parts than a third of all bytes to the others."""
        nonlocal taken
        if asked.action == "part" and (scheme == "gs" or 3 * taken < total):
            taken += asked.nbytes
            return None
        is_refused = asked.action == ("complete" if scheme == "gs" else "part")
        return Fault("status", 403, "AccessDenied") if is_refused else None

    store.hook = refuse
    with monkeypatch.context() as patch:
        patch.setattr(StoreTarget, "discard", StoreTarget.keep)
        assert run(*words, "--resume").status == 1
    store.restart()
    outcome = run(*words, "--resume")
    assert outcome.status == 0, outcome.err
    assert store.below("out/") == scenario.expected
    assert sum(each.nbytes for each in store.of("part")) <= 0.75 * total


def test_a_token_that_has_expired_is_replaced(google: SmallGoogle) -> None:
    upload(google, LLAMA)
    moments = iter((2, 4))
    moment = [next(moments)]

    def expire(asked: Asked) -> Fault | None:
        if asked.number >= moment[0] and asked.action == "get":
            moment[0] = next(moments, 1 << 30)
            google.expire()
        return None

    google.hook = expire
    assert fingerprint(f"gs://{BUCKET}/model") == fingerprint(LLAMA)
    assert google.given >= 1


def test_credentials_of_google_that_give_no_token_are_one_line(
    google: SmallGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.json").write_text('{"type": "service_account", "private_key": "marked"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "broken.json"))
    outcome = run("inspect", f"gs://{BUCKET}/model")
    assert outcome.status == 1
    assert "check GOOGLE_APPLICATION_CREDENTIALS" in outcome.err
    assert "marked" not in outcome.err


@pytest.mark.parametrize("fault", [Fault("reset"), Fault("status", 503, "backendError")])
def test_a_token_that_does_not_come_at_once_is_asked_for_again(
    google: SmallGoogle, fault: Fault
) -> None:
    upload(google, LLAMA)
    google.hook = lambda asked: fault if asked.number == 0 else None
    assert fingerprint(f"gs://{BUCKET}/model") == fingerprint(LLAMA)
    assert len(google.of("token")) == 2


def test_a_token_comes_through_the_proxy_of_the_environment(
    google: SmallGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy is asked for an address in place of a path. This one has all tokens itself."""
    account = tmp_path / "account.json"
    words = account.read_text().replace(f"{google.url}/token", "http://tokens.invalid/token")
    account.write_text(words)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, google.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    upload(google, LLAMA)
    assert fingerprint(f"gs://{BUCKET}/model") == fingerprint(LLAMA)
    assert len(google.of("token")) == 1


def test_a_new_token_that_does_not_come_at_once_is_asked_for_again(google: SmallGoogle) -> None:
    upload(google, LLAMA)
    place = writable_store(f"gs://{BUCKET}")
    assert place.head("model/config.json") is not None
    google.restart()
    google.expire()
    google.hook = lambda asked: Fault("reset") if asked.number == 1 else None
    assert place.head("model/config.json") is not None
    assert [each.action for each in google.asked[:2]] == ["head", "token"]


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_small_object_of_other_bytes_is_fetched_again(
    request: pytest.FixtureRequest, scheme: str
) -> None:
    server = {"s3": "writable", "gs": "google", "az": "azure"}[scheme]
    store: SmallStore = request.getfixturevalue(server)
    place = writable_store(f"{scheme}://{BUCKET}")
    place.put("small.json", b"[1, 2]")
    store.restart()
    store.hook = lambda asked: Fault("other") if len(store.of("get")) == 1 else None
    found = place.get("small.json")
    assert found is not None
    assert found.content == b"[1, 2]"
    assert len(store.of("get")) == 2


@pytest.mark.parametrize(
    ("uri", "container", "endpoint"),
    [
        ("az://models/run", "models", "https://account.blob.core.windows.net"),
        ("abfs://models@other.dfs.core.windows.net/run", "models", "https://other.blob.core.windows.net"),
    ],
)  # fmt: skip
def test_an_account_of_azure_is_named_by_the_uri_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, uri: str, container: str, endpoint: str
) -> None:
    pytest.importorskip("azure.storage.blob")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv("AZURE_STORAGE_KEY", AZURE_KEY)
    store = writable_store(uri)
    assert isinstance(store, AzureContainer)
    assert store.endpoint == endpoint
    assert store.request("run/config.json") == f"azure read on {container}/run/config.json"
    assert AZURE_KEY not in store.uri


def test_a_range_that_is_longer_than_one_request_is_read(
    azure: SmallAzure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(az, "_MOST_BYTES", 1000)
    content = bytes(range(250)) * 11
    azure.put("model/.metadata", content)
    store = writable_store(f"az://{BUCKET}")
    there = store.head("model/.metadata")
    assert there is not None
    state = RemoteState(f"az://{BUCKET}/model/.metadata", there.size, there.tag)
    found = bytearray(len(content) - 5)
    fetch(store, "model/.metadata", state, 5, memoryview(found))
    assert found == content[5:]


def test_a_connection_string_serves_an_account_that_the_uri_names(azure: SmallAzure) -> None:
    upload(azure, LLAMA)
    uri = f"abfs://{BUCKET}@{ACCOUNT}.dfs.core.windows.net/model"
    assert fingerprint(uri) == fingerprint(LLAMA)


def test_an_input_in_azure_is_not_replaced_under_another_spelling(azure: SmallAzure) -> None:
    upload(azure, LLAMA)
    before = azure.below("model/")
    target = f"abfs://{BUCKET}@{ACCOUNT}.dfs.core.windows.net/model"
    words = ("--saver", "core", "--overwrite", "--yes-replace-objects")
    assert_refused(run("convert", f"az://{BUCKET}/model", target, *words), 2, "would replace")
    assert azure.below("model/") == before


def test_a_connection_string_of_another_account_is_not_used(
    azure: SmallAzure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", AZURE_KEY)
    store = writable_store(f"abfs://{BUCKET}@other.dfs.core.windows.net/model")
    assert store.endpoint == "https://other.blob.core.windows.net"
    assert azure.url not in store.endpoint


def test_a_key_of_azure_that_is_none_ends_the_run_at_once(
    azure: SmallAzure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "ATTEMPTS", 1)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure.settings.replace(AZURE_KEY, "abc"))
    outcome = run("inspect", f"az://{BUCKET}/model")
    assert outcome.status == 1
    assert "check AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_CONNECTION_STRING" in outcome.err
    assert not azure.asked


def test_a_certificate_that_is_not_trusted_ends_the_run_at_once(
    azure: SmallAzure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "ATTEMPTS", 1)
    azure.encrypt(tmp_path)
    words = azure.settings.replace("http:", "https:").replace("Protocol=http;", "Protocol=https;")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", words)
    outcome = run("inspect", f"az://{BUCKET}/model")
    assert outcome.status == 1
    assert "set REQUESTS_CA_BUNDLE" in outcome.err


def test_azure_is_asked_again_after_the_time_that_it_wants(
    azure: SmallAzure, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Patience, "wait", lambda self, failure: waited.append(failure.after))
    azure.hook = lambda asked: Fault("status", 503, "ServerBusy") if not asked.number else None
    azure.retry_after = "7"
    assert writable_store(f"az://{BUCKET}").head("model") is None
    assert waited == [7.0]


def test_directories_of_azure_are_not_asked_for_blocks(azure: SmallAzure) -> None:
    azure.put("out/folder", b"")
    azure.put("out/file", b"content")
    azure.folders.add("out/folder")
    assert not writable_store(f"az://{BUCKET}").uploads("out/")
    assert [each.key for each in azure.of("list-parts")] == ["out/file"]


@pytest.mark.parametrize("uri", ["az://models?sig=marked", "gs://key:marked@models/run", "abfs://models:marked@a/b",
    "s3://models/run?x-amz-signature=marked", "az://models/run?sv=1&sig=marked"])  # fmt: skip
def test_a_uri_with_a_secret_is_refused_without_repeating_it(uri: str) -> None:
    outcome = run("inspect", uri)
    assert outcome.status == 2
    assert "must not hold credentials" in outcome.err
    assert "marked" not in outcome.err


@pytest.mark.parametrize("key", ["run/design=2/sig=1", "X-Amz-reviews/model", "run/sig=0.1"])
def test_a_key_may_look_like_a_part_of_a_signature(key: str) -> None:
    for scheme in ("s3", "gs", "az"):
        assert parse(f"{scheme}://models/{key}").prefix == key
