"""A store that fails: requests are repeated within bounds, and a source that changes ends the run."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from formats import signals
from formats.stores import patience
from megaconv.engine.conversion import fingerprint
from megaconv.errors import CheckpointError, CorruptCheckpoint
from tests.conftest import FIXTURES
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run
from tests.stores import small_store
from tests.stores.conftest import BUCKET, plain_client, put
from tests.stores.proxy import Fault, Proxy
from tests.stores.small_store import Asked, SmallStore

LLAMA = FIXTURES / "peft-llama-all-linear/base"
CORE = FIXTURES / "core-llama-tp2pp2/checkpoint"
PASSING = {
    "503": Fault("status", 503, "SlowDown"),
    "500": Fault("status", 500, "InternalError"),
    "429": Fault("status", 429, "TooManyRequests"),
    "reset": Fault("reset"),
    "half": Fault("half"),
    "slow": Fault("slow", seconds=0.05),
}
"""Faults that a second attempt overcomes."""


@pytest.mark.parametrize(
    "fault",
    [
        kind if kind in ("503", "half") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in PASSING
    ],
)
def test_every_second_request_may_fail(store: Proxy, fault: str) -> None:
    uri, expected = put(store, LLAMA, "model"), fingerprint(LLAMA)
    store.faults = lambda number, method, key: PASSING[fault] if number % 2 else None
    assert fingerprint(uri) == expected


@pytest.mark.slow
@pytest.mark.parametrize("fault", PASSING)
def test_any_request_may_fail_once(store: Proxy, fault: str) -> None:
    uri, expected = put(store, CORE, "run"), fingerprint(CORE)
    fingerprint(uri)
    for failing in range(1, store.count + 1):
        store.reset()
        store.faults = lambda number, method, key, failing=failing: (  # type: ignore[misc]
            PASSING[fault] if number == failing else None
        )
        assert fingerprint(uri) == expected


@pytest.mark.parametrize("fault", ["503", "reset", "half"])
def test_a_store_that_always_fails_ends_the_run(store: Proxy, fault: str) -> None:
    uri = put(store, LLAMA, "model")
    store.faults = lambda number, method, key: PASSING[fault] if key else None
    with pytest.raises(CheckpointError, match="s3:GetObject on models/model/") as caught:
        fingerprint(uri)
    assert caught.value.code == "store-unreachable"
    assert len(store.requests) <= patience.MOST_ATTEMPTS + 10


@pytest.mark.parametrize(("after", "expected"), [(0.0, 0.0), (60.0, 60.0), (9999.0, 300.0)])
def test_a_store_may_ask_for_a_pause_of_up_to_five_minutes(
    monkeypatch: pytest.MonkeyPatch, after: float, expected: float
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(signals.arrived, "wait", paused.append)
    patience.Patience("GET object").wait(patience.Transient("429", after))
    assert paused == [pytest.approx(expected, abs=0.5)]


def test_after_a_signal_requests_are_hardly_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "arrived", threading.Event())
    failure = patience.Transient("503", 60.0)
    before = patience.Patience("GET object")
    signals.arrived.set()
    with pytest.raises(CheckpointError):
        before.wait(failure)
    cleanup = patience.Patience("DELETE object")
    cleanup.wait(failure)  # without a pause
    with pytest.raises(CheckpointError):
        cleanup.wait(failure)


@pytest.mark.parametrize("words", ["fingerprint {uri}", "convert {uri} {out} --saver hf"])
def test_a_command_that_waits_for_a_store_can_be_interrupted(
    writable: SmallStore, tmp_path: Path, words: str
) -> None:
    source = write_llama(tmp_path / "model", layers=1, hidden=256, vocab=4096)
    for file in source.iterdir():
        writable.put(f"model/{file.name}", file.read_bytes())
    asked = threading.Event()

    def refuse(request: Asked) -> small_store.Fault | None:
        requests = [each for each in writable.asked if each.key.endswith(".safetensors")]
        if request not in requests[1:]:  # the first one is for the header
            return None
        asked.set()
        return small_store.Fault("status", 503, "SlowDown")

    writable.hook, writable.retry_after = refuse, "60"
    command = words.format(uri=f"s3://{BUCKET}/model", out=tmp_path / "out").split()
    process = start(*command)
    assert asked.wait(20)
    time.sleep(0.5)  # the command has the answer, and waits
    process.send_signal(signal.SIGINT)
    outcome = finish(process, 10)
    assert outcome.status == 130, outcome
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("command", ["convert", "delta"])
def test_an_interrupted_run_that_cannot_remove_its_work_says_so(
    writable: SmallStore, command: str, tmp_path: Path
) -> None:
    asked = threading.Event()

    def refuse(request: Asked) -> small_store.Fault | None:
        if request.action == "part":
            asked.set()
        return small_store.Fault("status", 503, "SlowDown") if asked.is_set() else None

    writable.hook, writable.retry_after = refuse, "60"
    words: tuple[object, ...] = (LLAMA, f"s3://{BUCKET}/out", "--saver", "hf")
    if command == "delta":
        models = [
            write_llama(tmp_path / str(seed), layers=1, hidden=256, vocab=8192, seed=seed)
            for seed in (1, 2)
        ]
        words = (*models, "--save-dir", f"s3://{BUCKET}/out")
    process = start(command, *words)
    assert asked.wait(20)
    time.sleep(0.5)  # the command has the answer, and waits
    process.send_signal(signal.SIGINT)
    outcome = finish(process, 10)
    assert outcome.status == 130, outcome
    last = outcome.err.splitlines()[-1]
    assert last == f"megaconv: interrupted; `megaconv clean s3://{BUCKET}/out` removes what is left"


def test_a_store_that_is_not_there_is_named(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://name:secret@127.0.0.1:9")
    outcome = run("inspect", f"s3://{BUCKET}/model")
    assert_refused(outcome, 1, "s3:ListBucket on models/model/", "http://127.0.0.1:9")
    assert "secret" not in outcome.err


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", "ask the bucket's owner"),
        (403, "ExpiredToken", "log in again"),
        (403, "RequestTimeTooSkewed", "clock"),
        (403, "InvalidObjectState", "Glacier"),
        (400, "AuthorizationHeaderMalformed", "AWS_REGION"),
    ],
)
def test_a_refusal_names_the_request_and_is_not_repeated(
    store: Proxy, status: int, code: str, words: str
) -> None:
    uri = put(store, LLAMA, "model")
    refused = Fault("status", status, code)
    store.faults = lambda number, method, key: refused if key.endswith("config.json") else None
    outcome = run("fingerprint", uri)
    assert outcome.status in (1, 3)
    assert "s3:GetObject on models/model/config.json" in outcome.err
    assert words in outcome.err
    assert len([each for each in store.requests if each.key.endswith("config.json")]) == 1


def test_a_store_that_ignores_ranges_ends_the_run(store: Proxy) -> None:
    uri = put(store, LLAMA, "model")
    store.faults = lambda number, method, key: Fault("ignore-range") if key else None
    with pytest.raises(CheckpointError, match="answered a request for bytes"):
        fingerprint(uri)


def change(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("ignores_conditions", [False, True])
@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_an_object_that_changes_ends_the_run(
    store: Proxy, tmp_path: Path, how: str, ignores_conditions: bool
) -> None:
    """The change may come at any request after the listings, even if the object was already read to its end."""
    uri, client = put(store, CORE, "run"), plain_client(store)
    files = sorted(file for file in CORE.rglob("*.pt") if file.is_file())
    victim = f"run/{files[-1].relative_to(CORE)}"
    content = files[-1].read_bytes()
    fingerprint(uri)
    reads = [each.number for each in store.requests if each.key == victim]
    for moment in (reads[0], reads[-1] + 1):
        client.put_object(Bucket=BUCKET, Key=victim, Body=content)
        store.reset()
        store.faults = _at(moment, client, victim, content, how, ignores_conditions)
        with pytest.raises(CorruptCheckpoint, match="replaced or deleted while it was read"):
            fingerprint(uri, workers=1)
        outcome = tmp_path / "out"
        assert not outcome.exists()


def _at(
    moment: int, client: object, key: str, content: bytes, how: str, ignores_conditions: bool
) -> Callable[[int, str, str], Fault | None]:
    """Change an object before request number `moment`."""

    def fault(number: int, method: str, asked: str) -> Fault | None:
        if number == moment:
            if how == "deleted":
                client.delete_object(Bucket=BUCKET, Key=key)  # type: ignore[attr-defined]
            else:
                client.put_object(Bucket=BUCKET, Key=key, Body=change(content))  # type: ignore[attr-defined]
        return Fault("no-condition") if ignores_conditions else None

    return fault
