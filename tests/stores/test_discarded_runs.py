"""A run that discards the work of another run, and is interrupted itself: nothing of the first run gets into the output."""

import shutil
from pathlib import Path

import pytest

from formats.stores import part_sizes
from formats.stores.target import StoreTarget
from megaconv.engine import transfer
from tests.conftest import FIXTURES
from tests.runs import run
from tests.stores.conftest import BUCKET
from tests.stores.small_store import Asked, Fault, SmallStore

LLAMA = FIXTURES / "peft-llama-all-linear/base"
SERVERS = {"s3": "writable", "gs": "google", "az": "azure"}
HF = ("--saver", "hf", "--workers", "1")


def model_with_other_weights(directory: Path) -> Path:
    """A copy of the model in which half of the bytes of the tensors differ."""
    shutil.copytree(LLAMA, directory)
    for file in directory.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        tensors = 8 + int.from_bytes(content[:8], "little")
        content[tensors::2] = bytes(byte ^ 1 for byte in content[tensors::2])
        file.unlink()
        file.write_bytes(content)
    return directory


def interrupted(store: SmallStore, words: tuple[object, ...], after: int) -> None:
    """Run a command with --resume that ends when the store has got some parts, and leaves them."""
    store.restart()

    def refuse(asked: Asked) -> Fault | None:
        too_late = asked.action == "part" and len(store.of("part")) > after
        return Fault("status", 403, "AccessDenied") if too_late else None

    store.hook = refuse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreTarget, "discard", StoreTarget.keep)
        assert run(*words, "--resume").status == 1
    store.restart()


@pytest.mark.parametrize("scheme", SERVERS)
def test_a_resumed_run_takes_no_part_of_a_run_that_was_discarded(
    scheme: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first run gets further than the second, so that its parts look like the better ones."""
    store: SmallStore = request.getfixturevalue(SERVERS[scheme])
    monkeypatch.setattr(part_sizes, "PART_BYTES", 4 << 10)
    monkeypatch.setattr(transfer, "JOURNAL_SECONDS", 0)
    target, other = f"{scheme}://{BUCKET}/out", model_with_other_weights(tmp_path / "other")
    interrupted(store, ("convert", LLAMA, target, *HF), after=8)
    interrupted(store, ("convert", other, target, *HF), after=2)
    outcome = run("convert", other, target, *HF, "--resume")
    assert outcome.status == 0, outcome.err
    assert run("convert", other, tmp_path / "local", *HF).status == 0
    found = store.below("out/")
    for file in (tmp_path / "local").glob("*.safetensors"):
        assert found[file.name] == file.read_bytes(), file.name
    assert not store.unfinished
