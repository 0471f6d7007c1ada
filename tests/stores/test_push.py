"""`push` from a store: the files of the store arrive on the Hub, and none of them as the zeros of a stand-in."""

from pathlib import Path

import pytest

from formats.stores.stand_in import StandIn
from tests.commands.test_push import NAME, contents, hub, push
from tests.hub_server import Hub
from tests.models import write_llama
from tests.runs import assert_refused, run
from tests.stores.conftest import BUCKET
from tests.stores.small_store import SmallStore

__all__ = ["hub"]


def test_hashes_of_a_dry_run_are_those_of_local_files(writable: SmallStore, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", layers=1)
    for file in source.iterdir():
        writable.put(f"model/{file.name}", file.read_bytes())
    stored = run("push", f"s3://{BUCKET}/model", NAME, "--dry-run", "--json")
    assert stored.status == 0, stored.err
    assert stored.out == run("push", source, NAME, "--dry-run", "--json").out


def test_a_disk_that_is_full_is_named(
    writable: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in write_llama(tmp_path / "model", layers=1).iterdir():
        writable.put(f"model/{file.name}", file.read_bytes())
    hold = StandIn.hold

    def hold_on_a_full_disk(self: StandIn, start: int, end: int) -> None:
        self._path = Path("/dev/full")
        hold(self, start, end)

    monkeypatch.setattr(StandIn, "hold", hold_on_a_full_disk)
    outcome = run("push", f"s3://{BUCKET}/model", NAME, "--dry-run")
    assert_refused(outcome, 5, f"s3://{BUCKET}/model/", "No space left", "set TMPDIR")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--saver hf --max-shard-size 20KB", "--saver core --tp 2"])
def test_a_checkpoint_in_a_store_is_pushed(
    hub: Hub,
    writable: SmallStore,
    tmp_path: Path,
    words: str,
) -> None:
    source = write_llama(tmp_path / "model", layers=1)
    assert run("convert", source, tmp_path / "local", *words.split()).status == 0
    assert run("convert", source, f"s3://{BUCKET}/out", *words.split()).status == 0
    pushed = push(f"s3://{BUCKET}/out", NAME)
    assert pushed.status == 0, pushed.err
    there = hub.files(NAME)
    expected = tmp_path / "local"
    if "core" in words:  # the Hub gets a model for transformers
        expected = tmp_path / "hf"
        assert run("convert", tmp_path / "local", expected, "--saver", "hf").status == 0
    for name, content in contents(expected).items():
        if name.endswith(".safetensors"):
            assert there[name] == content, name
