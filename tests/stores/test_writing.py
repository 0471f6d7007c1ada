"""Outputs in a store: the bytes of a local output, visible only when they are complete."""

import json
import os
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from formats.partial_files import Span
from formats.stores import claim, slots, waiting, windows
from formats.stores.part_file import PartFile
from formats.stores.part_sizes import gaps, part_bytes, part_count
from formats.stores.windows import Windows
from megaconv.engine.conversion import fingerprint
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run
from tests.stores.conftest import BUCKET, KEY, SECRET
from tests.stores.small_store import Asked, Fault, SmallStore

LLAMA = FIXTURES / "peft-llama-all-linear/base"
CORE = FIXTURES / "core-llama-tp2pp2/checkpoint"
OUT = f"s3://{BUCKET}/out"
SAVERS = {
    "hf": "--saver hf",
    "hf shards": "--saver hf --max-shard-size 20KB",
    "hf int4": "--saver hf --quantize w4a16 --option group_size=32 --max-shard-size 20KB",
    "core": "--saver core --tp 2 --pp 2",
    "torch_dist": "--saver core --ckpt-format torch_dist",
    "zarr": "--saver core --ckpt-format zarr",
    "legacy": "--saver legacy --tp 2",
    "dcp": "--saver dcp",
    "gguf": "--saver gguf --option tokenizer=none",
}


def local(words: str, place: Path, source: Path = LLAMA) -> dict[str, bytes]:
    """The files of the same conversion to a disk."""
    assert run("convert", source, place, *words.split()).status == 0
    return {
        str(file.relative_to(place)): file.read_bytes()
        for file in place.rglob("*")
        if file.is_file()
    }


def assert_only(store: SmallStore, expected: dict[str, bytes], prefix: str = "out/") -> None:
    """The output is there, equal but for the source's name in its record, and nothing else is."""
    assert _comparable(store.below(prefix)) == _comparable(expected)
    assert not store.uploads


def _comparable(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of an output, without the source's name in its record."""
    record = json.loads(files["megaconv.json"])
    record["source"].pop("path")
    return files | {"megaconv.json": json.dumps(record).encode()}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "hf shards" else pytest.param(name, marks=pytest.mark.slow)
        for name in SAVERS
    ],
)
def test_an_output_has_the_bytes_of_a_local_one(
    writable: SmallStore, tmp_path: Path, name: str
) -> None:
    outcome = run("convert", LLAMA, OUT, *SAVERS[name].split())
    assert outcome.status == 0, outcome.err
    assert_only(writable, local(SAVERS[name], tmp_path / "local"))


def test_a_conversion_goes_from_store_to_store(writable: SmallStore, tmp_path: Path) -> None:
    words = "--saver core --ckpt-format torch_dist --dist-files 2"
    assert run("convert", CORE, f"s3://{BUCKET}/a", *words.split()).status == 0
    outcome = run("convert", f"s3://{BUCKET}/a", OUT, "--saver", "core", "--tp", 4, "--verify")
    assert outcome.status == 0, outcome.err
    assert fingerprint(OUT) == fingerprint(CORE)
    assert json.loads(writable.below("out/")["megaconv.json"])["source"]["path"].endswith("/a")


def test_every_part_is_sent_once_and_requests_are_few(writable: SmallStore, tmp_path: Path) -> None:
    """Acceptance 3: parts are exactly ⌈size / part⌉; the other requests don't grow with the bytes."""
    source = write_llama(tmp_path / "model", layers=4, hidden=128, vocab=512)
    writable.restart()
    assert run("convert", source, OUT, *["--saver", "core", "--tp", "2"]).status == 0
    sizes = {name: len(content) for name, content in writable.below("out/").items()}
    in_parts = {each.key.removeprefix("out/") for each in writable.of("begin")}
    counts = Counter(each.action for each in writable.asked)
    assert counts["part"] == sum(part_count(sizes[name]) for name in in_parts) > 50
    assert counts["begin"] == counts["complete"] == len(in_parts)
    other_requests = counts.total() - sum(
        counts[name] for name in ("part", "begin", "complete", "head")
    )
    whole_objects = len(sizes) - len(in_parts)
    assert other_requests <= whole_objects + 26, counts


def test_nothing_is_visible_before_everything_is_sent_and_selectors_come_last(
    writable: SmallStore,
) -> None:
    seen: list[set[str]] = []
    writable.done = lambda asked: seen.append(set(writable.objects))
    assert run("convert", LLAMA, OUT, "--saver", "hf", "--max-shard-size", "20KB").status == 0
    actions = [each.action for each in writable.asked]
    first = actions.index("complete")
    assert max(place for place, action in enumerate(actions) if action == "part") < first
    for keys in seen[:first]:
        assert all(".megaconv-" in key for key in keys), keys
    order = [each.key for each in writable.of("put") if ".megaconv-" not in each.key]
    assert order[-3:] == [
        "out/model.safetensors.index.json",
        "out/megaconv.json",
        "out/config.json",
    ]


def test_the_tag_of_a_universal_checkpoint_comes_last(writable: SmallStore) -> None:
    """DeepSpeed reads the directory that it names, and skips states whose files are missing."""
    source = FIXTURES / "core-llama-optim-tp2pp2/checkpoint"
    assert run("convert", source, OUT, "--saver", "deepspeed", "--optimizer").status == 0
    order = [each.key for each in writable.of("put") if ".megaconv-" not in each.key]
    assert len(order) > 20
    assert order[-3:] == ["out/megaconv.json", "out/config.json", "out/latest_universal"]


def test_sizes_and_checksums_are_compared(writable: SmallStore) -> None:
    """A body that a proxy changes is refused by the store, since its CRC-32 is sent with it."""
    assert run("convert", LLAMA, OUT, "--saver", "core").status == 0
    sums = [headers for headers in writable.headers if "x-amz-checksum-crc32" in headers.lower()]
    assert len(sums) >= len(writable.of("part")) + len(writable.of("complete"))


def test_a_store_without_checksums_gets_an_md5_of_each_part(
    writable: SmallStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writable.checksums = False
    outcome = run("convert", LLAMA, OUT, "--saver", "core")
    assert outcome.status == 0, outcome.err
    assert_only(writable, local("--saver core", tmp_path / "local"))
    assert [headers for headers in writable.headers if "content-md5" in headers.lower()]


def test_a_journal_of_other_bytes_ends_the_run_with_one_line(writable: SmallStore) -> None:
    """A store without checksums can't tell that the journal's list of files came with other bytes."""
    writable.checksums = False

    def damage(asked: Asked) -> Fault | None:
        is_list = asked.action == "get" and asked.key.endswith("-files.json")
        return Fault("other") if is_list else None

    writable.hook = damage
    outcome = run("convert", LLAMA, OUT, "--saver", "hf")
    assert_refused(outcome, 1, "0-files.json: is not as a run writes it", f"{OUT} is complete")
    writable.restart()
    assert run("inspect", OUT).status == 0
    assert run("convert", LLAMA, OUT, "--saver", "hf").status == 2
    assert not [key for key in writable.objects if ".megaconv-" in key]


def test_an_output_that_exists_is_not_touched(writable: SmallStore) -> None:
    writable.put("out/anything", b"x")
    assert_refused(run("convert", LLAMA, OUT, "--saver", "hf"), 2, "already exists")
    assert writable.below("") == {"out/anything": b"x"}
    assert_refused(run("convert", LLAMA, f"{OUT}/anything", "--saver", "hf"), 2, "is an object")


def test_objects_are_replaced_only_with_the_option(writable: SmallStore, tmp_path: Path) -> None:
    assert run("convert", LLAMA, OUT, "--saver", "core").status == 0
    again = ("convert", LLAMA, OUT, "--saver", "hf", "--overwrite")
    assert_refused(run(*again), 2, "--yes-replace-objects")
    outcome = run(*again, "--yes-replace-objects")
    assert outcome.status == 0, outcome.err
    assert_only(writable, local("--saver hf", tmp_path / "local"))


def test_overwrite_replaces_only_checkpoints(writable: SmallStore) -> None:
    writable.put("out/letters.txt", b"dear")
    words = ("--saver", "hf", "--overwrite", "--yes-replace-objects")
    assert_refused(run("convert", LLAMA, OUT, *words), 2, "replaces checkpoints")
    assert writable.below("") == {"out/letters.txt": b"dear"}


def test_overwrite_removes_no_further_checkpoint(writable: SmallStore) -> None:
    for place in (OUT, f"{OUT}/checkpoint-500"):
        assert run("convert", LLAMA, place, "--saver", "hf").status == 0
    before = writable.below("")
    words = ("--saver", "core", "--overwrite", "--yes-replace-objects")
    refused = run("convert", LLAMA, OUT, *words)
    assert_refused(refused, 2, f"{OUT}: holds 1 checkpoint besides its own (checkpoint-500)")
    assert writable.below("") == before


def test_a_dry_run_writes_nothing_and_tells_what_waits(writable: SmallStore) -> None:
    outcome = run("convert", LLAMA, OUT, "--saver", "core", "--dry-run")
    assert outcome.status == 0, outcome.err
    assert "bytes of parts wait at most" in outcome.out
    assert f"{OUT}/latest_checkpointed_iteration.txt" in outcome.out
    assert not writable.objects
    assert {each.action for each in writable.asked} <= {"list", "head"}


def test_parts_beyond_memory_wait_in_a_spool_of_the_planned_size(
    writable: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance 12: the spool never exceeds its plan, and one byte less is refused beforehand."""
    from megaconv.engine import outputs

    monkeypatch.setattr(outputs, "MEMORY_BYTES", 20 << 10)
    words = ("convert", LLAMA, OUT, *SAVERS["torch_dist"].split(), "--max-memory", "100KiB")
    planned = json.loads(run(*words, "--dry-run", "--json").out)["spool_bytes"]
    assert planned > 0
    most: list[int] = []
    close = slots.Spool.close

    def noted(spool: slots.Spool) -> None:
        most.append(os.fstat(spool.descriptor).st_size)
        close(spool)

    monkeypatch.setattr(slots.Spool, "close", noted)
    outcome = run(*words, "--max-spool", planned - 1)
    assert_refused(outcome, 5, "--max-spool")
    assert not writable.objects
    outcome = run(*words, "--max-spool", planned)
    assert outcome.status == 0, outcome.err
    assert most
    assert 0 < max(most) <= planned
    assert_only(writable, local(SAVERS["torch_dist"], tmp_path / "local"))


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> list[waiting.Waiting]:
    """Runs have places for the parts that are open at once by the plan, and for two that are sent. Returns their plans."""
    from megaconv.engine import conversion

    found: list[waiting.Waiting] = []
    parts_of = conversion.parts_of

    def tightened(*arguments: object) -> object:
        parts, planned = parts_of(*arguments)  # type: ignore[arg-type]
        memory = planned.open_bytes + 2 * planned.part_bytes
        found.append(replace(planned, memory_bytes=memory))
        return parts, found[-1]

    monkeypatch.setattr(conversion, "parts_of", tightened)
    monkeypatch.setattr(slots, "STUCK_SECONDS", 5.0)
    return found


QUICK = ("core", "torch_dist")
"""The savers of `make test`: the other ones write files in the same two ways."""


@pytest.mark.parametrize(
    "saver",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SAVERS],
)
def test_no_more_parts_wait_than_the_plan_says(
    writable: SmallStore, tmp_path: Path, few_places: list[waiting.Waiting], saver: str
) -> None:
    """Places are few, and no writer waits for ever."""
    source = write_llama(tmp_path / "model", layers=2, hidden=128, vocab=512)
    outcome = run("convert", source, OUT, *SAVERS[saver].split(), "--workers", 3)
    assert outcome.status == 0, outcome.err
    assert few_places.pop().open_parts


@pytest.mark.parametrize("most", [1 << 20, pytest.param(20 << 20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "saver",
    [pytest.param(name, marks=() if name == "core" else pytest.mark.slow) for name in SAVERS],
)
def test_few_parts_of_a_large_tensor_wait(
    writable: SmallStore,
    tmp_path: Path,
    few_places: list[waiting.Waiting],
    saver: str,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A matrix of 64 parts is written from its first to its last row. Memory decides how many tensors are written at once."""
    for module in ("plan", "open_parts"):
        monkeypatch.setattr(f"megaconv.engine.{module}.BLOCK_BYTES", 16 << 10)
    monkeypatch.setattr("megaconv.engine.outputs.MEMORY_BYTES", most)
    source = write_llama(tmp_path / "model", layers=2, hidden=256, ffn=2048, vocab=512)
    words = *SAVERS[saver].split(), "--workers", 3, "--max-memory", "2MB"
    outcome = run("convert", source, OUT, *words)
    assert outcome.status == 0, outcome.err
    planned = few_places.pop()
    assert planned.open_parts < 64
    assert planned.open_bytes <= most


def test_tensors_without_elements_are_written(writable: SmallStore, tmp_path: Path) -> None:
    """They fill no byte of any part."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["Nova"], "model_type": "nova"}')
    shapes = {"first": (0, 4), "full": (300, 40), "middle": (5, 0), "other": (70, 3), "last": (0,)}
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for words in ("--saver hf", "--saver hf --max-shard-size 20KB --workers 3", "--saver dcp"):
        writable.clear()
        outcome = run("convert", source, OUT, *words.split())
        assert outcome.status == 0, outcome.err
        assert_only(writable, local(words, tmp_path / words.replace(" ", ""), source))


def test_a_second_run_is_refused(writable: SmallStore, tmp_path: Path) -> None:
    """Acceptance 7, one case: both begin at once, and exactly one wins."""
    both = threading.Barrier(2)
    outcomes: list[str] = []

    def convert() -> None:
        from megaconv.api import convert as convert_
        from megaconv.errors import CheckpointError

        both.wait()
        try:
            convert_(LLAMA, OUT, saver="core")
            outcomes.append("won")
        except CheckpointError as error:
            outcomes.append(f"{error.code}: {error}")

    for _ in range(3):
        writable.clear()
        outcomes.clear()
        threads = [threading.Thread(target=convert) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first, last = sorted(outcomes)
        assert last == "won", outcomes
        assert first.startswith(("target-busy", "target-exists")), outcomes
        assert fingerprint(OUT).weights == fingerprint(LLAMA).weights
        assert not writable.uploads


def holder(**values: object) -> bytes:
    found = claim.this_process("0")
    fields = json.loads(found.content()) | {"host": "elsewhere", "boot": "other"} | values
    return json.dumps(fields).encode()


def test_a_claim_of_another_host_is_taken_over_when_it_is_old_or_on_demand(
    writable: SmallStore,
) -> None:
    name = f"out/{claim.CLAIM}"
    writable.put(name, holder())
    outcome = run("convert", LLAMA, OUT, "--saver", "hf")
    assert_refused(outcome, 2, "on elsewhere is writing there", "--take-over")
    assert run("convert", LLAMA, OUT, "--saver", "hf", "--take-over").status == 0
    writable.clear()
    writable.put(name, holder())
    writable.objects[name].written -= claim.STALE_SECONDS + 5
    assert run("convert", LLAMA, OUT, "--saver", "hf").status == 0
    assert name not in writable.objects


def test_a_refused_claim_leaves_nothing_that_was_fetched_beside_it(
    writable: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "_SHARED", windows._Shared())
    for file in LLAMA.iterdir():
        writable.put(f"model/{file.name}", file.read_bytes())
    writable.put(f"out/{claim.CLAIM}", holder())
    begun: list[Windows] = []
    announce = Windows.announce

    def noted(found: Windows, tensor: Span) -> None:
        begun.append(found)
        announce(found, tensor)

    monkeypatch.setattr(Windows, "announce", noted)
    before = set(writable.objects)
    outcome = run("convert", f"s3://{BUCKET}/model", OUT, "--saver", "hf")
    assert_refused(outcome, 2, "on elsewhere is writing there")
    assert begun
    assert not windows._SHARED._windows
    assert not windows._SHARED.announced._reached
    assert set(writable.objects) == before
    assert not writable.uploads


def test_a_claim_of_a_process_that_is_gone_is_taken_over_at_once(writable: SmallStore) -> None:
    gone = json.loads(claim.this_process("0").content()) | {"process": [2**22 + 1, 1]}
    writable.put(f"out/{claim.CLAIM}", json.dumps(gone).encode())
    assert run("convert", LLAMA, OUT, "--saver", "hf").status == 0


def test_a_run_whose_claim_was_taken_over_ends(writable: SmallStore) -> None:
    def steal(asked: Asked) -> Fault | None:
        if asked.action == "part":
            writable.put(f"out/{claim.CLAIM}", holder(run="another"))
        return None

    writable.hook = steal
    assert_refused(run("convert", LLAMA, OUT, "--saver", "hf"), 2, "another run is writing there")
    assert "out/model.safetensors" not in writable.objects


def test_an_incomplete_output_is_not_read(writable: SmallStore) -> None:
    writable.put(f"out/{claim.CLAIM}", holder())
    assert_refused(run("inspect", OUT), 3, "is not complete")
    writable.put(f"out/{claim.CLAIM}", holder(phase=claim.PUBLISHING))
    writable.put("out/model.safetensors", (LLAMA / "model.safetensors").read_bytes())
    writable.put("out/.megaconv-journal/0-files.json", b'["model.safetensors", "config.json"]')
    assert_refused(run("fingerprint", OUT), 3, "is not complete")


def test_clean_lists_and_removes_what_a_run_has_left(writable: SmallStore) -> None:
    assert "no run has left anything" in run("clean", OUT).out
    writable.hook = lambda asked: (
        Fault("status", 403, "AccessDenied") if asked.action in ("complete", "delete") else None
    )
    outcome = run("convert", LLAMA, OUT, "--saver", "core", "--tp", 2)
    assert outcome.status == 1
    assert "s3:PutObject on models/out/" in outcome.err
    writable.restart()
    listed = run("clean", OUT)
    assert "give --yes" in listed.out, listed.err
    assert writable.objects
    writable.put("out-other/x", b"1")
    removed = run("clean", OUT, "--yes")
    assert removed.out.rstrip().endswith("removed"), removed.err
    assert list(writable.objects) == ["out-other/x"]
    assert not writable.uploads


def test_clean_names_what_is_left_of_an_output_that_a_run_was_replacing(
    writable: SmallStore,
) -> None:
    assert run("convert", LLAMA, OUT, "--saver", "hf", "--max-shard-size", "20KB").status == 0
    writable.restart()

    def fail(asked: Asked) -> Fault | None:
        is_late = asked.key == "out/config.json" and asked.action == "put"
        is_tidy = asked.action == "delete" and "config.json" not in asked.key
        return Fault("status", 403, "AccessDenied") if is_late or is_tidy else None

    writable.hook = fail
    words = ("--saver", "hf", "--overwrite", "--yes-replace-objects")
    assert run("convert", LLAMA, OUT, *words).status == 1
    writable.restart()
    cleaned = run("clean", OUT, "--yes")
    assert cleaned.status == 0, cleaned.err
    left = writable.all_keys()
    assert left
    assert all(f"stays    {key}\n" in cleaned.out for key in left)
    assert f"of which {len(left)} objects are left; remove them yourself" in cleaned.out


def test_uploads_of_other_programs_stay(writable: SmallStore) -> None:
    import boto3

    client = boto3.Session().client("s3")
    client.create_multipart_upload(Bucket=BUCKET, Key="out/model.safetensors")
    assert run("convert", LLAMA, OUT, "--saver", "hf").status == 0
    assert len(writable.uploads) == 1


def test_the_credentials_are_written_nowhere(writable: SmallStore) -> None:
    """Acceptance 9: neither in output, messages and objects, nor in the journal of a run that fails."""
    texts: list[str] = []
    writable.hook = lambda asked: (
        Fault("status", 403, "AccessDenied") if asked.action == "complete" else None
    )
    keep = writable.objects
    for words in (["--json"], ["--resume"], ["--verify"]):
        outcome = run("convert", LLAMA, OUT, "--saver", "core", *words)
        assert outcome.status
        texts += [
            outcome.out,
            outcome.err,
            *(text.content.decode("latin-1") for text in keep.values()),
        ]
    writable.restart()
    outcome = run("convert", LLAMA, OUT, "--saver", "core")
    texts += [outcome.out, outcome.err]
    texts += [content.decode("latin-1") for content in writable.below("").values()]
    assert outcome.status == 0
    assert not [text for text in texts if SECRET in text or KEY in text]
    assert not [text for text in texts if re.search(r"X-Amz-Signature|Credential=", text)]


def test_gaps_are_the_ranges_that_no_writer_fills() -> None:
    assert gaps(10, [(2, 4), (4, 6), (8, 9)]) == [(0, 2), (6, 8), (9, 10)]
    assert gaps(4, [(0, 4)]) == []


def test_an_object_has_at_most_ten_thousand_parts() -> None:
    for size in (1, 8 << 20, 78 << 30, 5 << 40):
        assert part_count(size) <= 10_000
        assert part_bytes(size) >= 5 << 20
        assert part_bytes(size) * part_count(size) >= size


def test_bytes_that_are_written_twice_are_noticed(writable: SmallStore) -> None:
    from formats.stores.part_file import Sender
    from formats.stores.s3_writing import WritableS3Bucket
    from megaconv.errors import CheckpointError

    sender = Sender(WritableS3Bucket(BUCKET), slots.Slots(1 << 20))
    file = PartFile(sender, "x", 100)
    file.write(0, bytes(60))
    with pytest.raises(CheckpointError, match="written twice"):
        file.write(20, bytes(60))
    sender.close()


@pytest.mark.parametrize("option", ["--average", "--experts-of"])
def test_an_output_does_not_replace_a_further_input(writable: SmallStore, option: str) -> None:
    assert run("convert", LLAMA, OUT, "--saver", "hf").status == 0
    before = writable.below("out/")
    words = ["convert", LLAMA, OUT, "--saver", "hf", "--overwrite", "--yes-replace-objects"]
    experts = ["--num-experts", 2] if option == "--experts-of" else []
    refused = run(*words, option, OUT, *experts)
    assert_refused(refused, 2, f"{OUT}: is or holds the source {OUT}, which it would replace")
    assert writable.below("out/") == before


@pytest.mark.parametrize("spelled", [f"s3://requester-pays@{BUCKET}/out", f"S3://{BUCKET}/out/"])
def test_an_input_is_not_replaced_under_another_spelling(
    writable: SmallStore, spelled: str
) -> None:
    assert run("convert", LLAMA, OUT, "--saver", "hf").status == 0
    before = writable.below("out/")
    words = ("--saver", "core", "--overwrite", "--yes-replace-objects")
    refused = run("convert", OUT, spelled, *words)
    assert_refused(refused, 2, f"is or holds the source {OUT}, which it would replace")
    assert writable.below("out/") == before
    assert run("convert", OUT, f"s3://{BUCKET}/out2", "--saver", "hf").status == 0
