"""Acceptance tests of stores that have no other place: requests, memory, races, and stand-ins whose holes are poisoned."""

import os
import random
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from formats.stores.stand_in import StandIn
from megaconv.engine.conversion import fingerprint
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run
from tests.stores.conftest import BUCKET, put
from tests.stores.proxy import Proxy
from tests.stores.small_store import SmallStore
from tests.stores.test_reading import FORMATS
from tests.stores.test_writing import assert_only

LLAMA = FIXTURES / "peft-llama-all-linear/base"
POISON = b"\xa5"
_MEBIBYTE = 1 << 20


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins whose local files hold wrong bytes wherever nothing was fetched."""
    create = StandIn.__init__

    def init(self: StandIn, path: Path, *rest: object) -> None:
        create(self, path, *rest)  # type: ignore[arg-type]
        path.write_bytes(POISON * self.state.size)

    monkeypatch.setattr(StandIn, "__init__", init)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", FORMATS)
def test_no_format_reads_a_hole(store: Proxy, tmp_path: Path, name: str) -> None:
    """Acceptance 10: whatever maps or opens a file itself has the bytes fetched first."""
    source = FIXTURES / FORMATS[name]
    uri = put(store, source, f"run/{source.name}")
    assert fingerprint(uri) == fingerprint(source)
    assert run("scan", uri).status == run("scan", source).status


def test_few_requests_read_the_metadata_of_many_files(store: Proxy, tmp_path: Path) -> None:
    """Acceptance 3."""
    source = write_llama(tmp_path / "model", layers=16, hidden=16, vocab=64)
    words = ("convert", source, tmp_path / "many", "--saver", "hf", "--max-shard-size", "8KB")
    assert run(*words).status == 0
    files = len(list((tmp_path / "many").glob("*.safetensors")))
    uri = put(store, tmp_path / "many", "run")
    assert run("inspect", uri).status == 0
    listings = [each for each in store.of("GET") if not each.key]
    assert len(listings) <= 2
    assert files > 8
    assert len(store.of("GET")) <= len(listings) + 2 * files + 2


@pytest.mark.slow
def test_six_requests_read_the_metadata_of_a_distributed_checkpoint(
    store: Proxy, tmp_path: Path
) -> None:
    """Acceptance 3."""
    assert (
        run(
            "convert", LLAMA, tmp_path / "run", "--saver", "core", "--ckpt-format", "torch_dist"
        ).status
        == 0
    )
    uri = put(store, tmp_path / "run", "run")
    assert run("inspect", uri).status == 0
    assert len([each for each in store.of("GET") if each.key]) <= 6
    assert not [each for each in store.requests if each.key.endswith(".distcp")]


@pytest.mark.slow
def test_exactly_one_of_two_runs_on_one_target_wins(writable: SmallStore, tmp_path: Path) -> None:
    """Acceptance 7, a sample: two processes that begin at random moments. The loser touches nothing."""
    words = ("convert", LLAMA, f"s3://{BUCKET}/out", "--saver", "hf")
    assert run(*words).status == 0
    expected, dice = writable.below("out/"), random.Random(3)
    context = get_context("fork")
    for _ in range(int(os.environ.get("MEGACONV_TEST_RACES", "10"))):
        writable.clear()
        pauses = [dice.random() * 0.05 for _ in range(2)]
        runs = [context.Process(target=_converting, args=(words, pause)) for pause in pauses]
        for each in runs:
            each.start()
        for each in runs:
            each.join(120)
        assert sorted(each.exitcode or 0 for each in runs) == [0, 2]
        assert_only(writable, expected)


def _converting(words: tuple[object, ...], pause: float) -> None:
    time.sleep(pause)
    status = run(*words).status
    sys.stdout.flush()
    os._exit(status)


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["hf", "core --tp 2 --pp 2", "core --ckpt-format torch_dist"])
def test_memory_of_a_conversion_between_stores_stays_below_500_mb(
    writable: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saver: str
) -> None:
    """Acceptance 2: anonymous memory of a process of its own, for a model of 700 MB."""
    monkeypatch.undo()
    source = write_llama(tmp_path / "model", layers=16, hidden=2048, vocab=32000)
    size = 0
    for file in source.iterdir():
        size += file.stat().st_size
        writable.put(f"model/{file.name}", file.read_bytes())
        file.unlink()
    assert size > 600 * _MEBIBYTE
    environment = {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": writable.url, "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = ["convert", f"s3://{BUCKET}/model", f"s3://{BUCKET}/out", "--saver", *saver.split()]
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-m", "megaconv", *words])
    peak, over = [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(pid, peak, over))
    watcher.start()
    _, status = os.waitpid(pid, 0)
    over.set()
    watcher.join()
    assert os.waitstatus_to_exitcode(status) == 0
    # The interpreter with its libraries has more than 20 MB: the process was seen.
    assert 20 * 10**6 < peak[0] <= 500 * 10**6, f"{peak[0]:,} bytes"


def _watch(pid: int, peak: list[int], over: threading.Event) -> None:
    """Note the largest anonymous memory of a process."""
    while not over.wait(0.02):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        for line in lines:
            if line.startswith("RssAnon:"):
                peak[0] = max(peak[0], int(line.split()[1]) << 10)
