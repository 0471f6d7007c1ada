"""`delta` and `apply` with stores: patches with the bytes of local ones, visible only when they are complete."""

import random
from pathlib import Path

import pytest

from formats.stores.target import StoreTarget
from megaconv.patches import blocks_file
from tests.models import write_llama
from tests.patches.test_patches import make, require_equal
from tests.runs import assert_refused, run
from tests.stores.attacks import FAULTS, fault, kill, undisturbed
from tests.stores.conftest import BUCKET
from tests.stores.small_store import Asked, Fault, SmallStore
from tests.stores.test_writing import assert_only

OUT = f"s3://{BUCKET}/out"


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints whose patch has several parts of 16 KiB."""
    directory = tmp_path_factory.mktemp("models")
    old = write_llama(directory / "old", layers=2, hidden=64, vocab=128)
    return old, write_llama(directory / "new", layers=2, hidden=64, vocab=128, seed=1)


def test_a_patch_in_a_store_has_the_bytes_of_a_local_one(
    writable: SmallStore, ends: tuple[Path, Path], tmp_path: Path
) -> None:
    make(*ends, tmp_path / "patch")
    seen: list[set[str]] = []
    writable.done = lambda asked: seen.append(set(writable.objects))
    outcome = run("delta", *ends, "--save-dir", OUT)
    assert outcome.status == 0, outcome.err
    assert_only(writable, files(tmp_path / "patch"))
    assert len(writable.of("part")) > 4
    actions = [each.action for each in writable.asked]
    for keys in seen[: actions.index("complete")]:
        assert all(".megaconv-" in key for key in keys), keys
    order = [each.key for each in writable.of("put") if ".megaconv-" not in each.key]
    assert order[-2:] == ["out/megaconv.json", "out/delta.json"]


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }


def test_apply_goes_from_store_to_store(
    writable: SmallStore, ends: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = ends
    base, last = (
        f"s3://{BUCKET}/base",
        write_llama(tmp_path / "last", layers=2, hidden=64, vocab=128, seed=2),
    )
    assert run("convert", old, base, "--saver", "core", "--tp", 2).status == 0
    assert run("delta", base, new, "--save-dir", OUT).status == 0
    assert run("delta", new, last, "--save-dir", f"s3://{BUCKET}/second").status == 0
    words = ("apply", base, OUT, f"s3://{BUCKET}/second")
    assert run(*words, "--save-dir", tmp_path / "made", "--saver", "hf").status == 0
    require_equal(tmp_path / "made", last)
    outcome = run(*words, "--save-dir", f"s3://{BUCKET}/made", "--verify")
    assert outcome.status == 0, outcome.err
    assert run("diff", f"s3://{BUCKET}/made", last).status == 0
    assert '"name": "s3://models/out"' in writable.below("made/")["megaconv.json"].decode()
    own = ("--option", f"base={base}", "--option", f"earlier={OUT}")
    assert run("verify", f"s3://{BUCKET}/second", *own).status == 0
    assert_refused(run("apply", new, OUT, "--save-dir", f"s3://{BUCKET}/wrong"), 4, "not the base")
    assert not writable.below("wrong/")


@pytest.mark.slow
def test_a_damaged_patch_in_a_store_is_refused(
    writable: SmallStore, ends: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = ends
    assert run("delta", old, new, "--save-dir", OUT).status == 0
    content = bytearray(writable.below("out/")["blocks.bin"])
    content[len(content) // 2] ^= 1
    writable.put("out/blocks.bin", bytes(content))
    outcome = run("apply", old, OUT, "--save-dir", tmp_path / "made")
    assert_refused(outcome, 3, f"{OUT}/blocks.bin", "other bytes than were written")


@pytest.mark.slow
def test_a_patch_in_a_store_is_replaced_only_with_the_option(
    writable: SmallStore, ends: tuple[Path, Path]
) -> None:
    words = ("delta", *ends, "--save-dir", OUT)
    assert run(*words).status == 0
    before = writable.below("out/")
    assert_refused(run(*words), 2, "already exists")
    assert_refused(run(*words, "--overwrite"), 2, "--yes-replace-objects")
    assert run(*words, "--overwrite", "--yes-replace-objects").status == 0
    assert writable.below("out/") == before
    writable.put("letters/dear.txt", b"dear")
    outcome = run(
        "delta", *ends, "--save-dir", f"s3://{BUCKET}/letters", "--overwrite", "--yes-replace-objects"
    )  # fmt: skip
    assert_refused(outcome, 2, "replaces checkpoints")


@pytest.mark.slow
def test_a_sparse_update_goes_to_a_store(
    writable: SmallStore, ends: tuple[Path, Path], tmp_path: Path
) -> None:
    words = ("delta", *ends, "--sparse", "vllm", "--save-dir")
    assert run(*words, tmp_path / "update").status == 0
    outcome = run(*words, OUT)
    assert outcome.status == 0, outcome.err
    assert writable.below("out/") == files(tmp_path / "update")
    assert not writable.uploads


@pytest.mark.parametrize("checksums", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_resumed_delta_sends_only_what_is_missing(
    writable: SmallStore, ends: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, checksums: bool
) -> None:
    """The store may or may not list checksums. The tail after the last part comes from the journal."""
    writable.checksums = checksums
    monkeypatch.setattr(blocks_file, "JOURNAL_SECONDS", 0)
    words = ("delta", *ends, "--save-dir", OUT)
    scenario, _ = undisturbed(writable, words)
    parts = writable.of("part")
    half = len(parts) // 2
    writable.clear()
    count = 0

    def fail(asked: Asked) -> Fault | None:
        nonlocal count
        count += asked.action == "part"
        return Fault("status", 403, "AccessDenied") if count > half else None

    writable.hook = fail
    with monkeypatch.context() as patch:
        patch.setattr(StoreTarget, "discard", StoreTarget.keep)
        assert run(*words, "--resume").status == 1
    writable.restart()
    outcome = run(*words, "--resume")
    assert outcome.status == 0, outcome.err
    assert writable.below("out/") == scenario.expected
    assert len(writable.of("part")) <= len(parts) - half + 1
    assert not writable.uploads


@pytest.mark.slow
@pytest.mark.parametrize("count", [100])
def test_a_killed_delta_leaves_nothing_or_everything(
    writable: SmallStore, ends: tuple[Path, Path], count: int
) -> None:
    scenario, requests = undisturbed(writable, ("delta", *ends, "--save-dir", OUT))
    dice = random.Random(1)
    for place in range(count):
        number = dice.randrange(requests)
        kill(writable, scenario, number, after=bool(place % 2), resume=bool(place % 3))


@pytest.mark.slow
@pytest.mark.parametrize("count", [100])
def test_a_delta_with_a_failing_request_leaves_nothing_torn(
    writable: SmallStore, ends: tuple[Path, Path], count: int
) -> None:
    scenario, requests = undisturbed(writable, ("delta", *ends, "--save-dir", OUT))
    dice = random.Random(2)
    for _ in range(count):
        kind, lasting = dice.choice(list(FAULTS)), dice.random() < 0.3
        fault(writable, scenario, dice.randrange(requests), kind, lasting=lasting)
