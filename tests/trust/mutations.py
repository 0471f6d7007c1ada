"""Damage to every file of a checkpoint of every format, and to what an interrupted run left; then it is read.

The rule. Let `intact` be the output that the undamaged checkpoint converts to, file by file.

* verify of a checkpoint with megaconv.json ends with exit 0 only if the damaged checkpoint still converts to `intact`.
* convert ends with exit 0 only if its output is `intact`, or
  - the damaged file is megaconv.json, and the output is `intact` but for its provenance, which comes from there,
  - megaconv.json is there, every weight is intact, only configuration or tokenizer files differ, and stderr has a notice;
  - megaconv.json is absent, and the damage is one that no reader can notice (`unnoticeable`).
* resuming from damaged remains, with --verify, ends with an error or with `intact`.

Neither ends in a traceback, takes more than its time and memory, or leaves remains.
"""

import json
import os
import shutil
import signal
import tarfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from io import BytesIO
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from formats.staging import Staging
from megaconv.engine.record import RECORD_NAME
from tests.trust import server
from tests.trust.bench import Bench, command
from tests.trust.checkpoints import SAVERS, Checkpoint
from tests.trust.foreign_fields import changed_field
from tests.trust.judging import (
    ABSENT,
    Failure,
    check_conduct,
    check_nothing_left,
    check_one_of,
    state,
)
from tests.trust.kills import journal_every_tensor
from tests.trust.strange_values import mutate_json

_TORCH_ZIP = b"PK\3\4"
FOREIGN = ("gguf", "nemo", "orbax", "bridge", "adapter")
"""The beginnings of the names of checkpoints in formats of other software."""
_TEXTS = (".json", ".txt", ".zarray", ".yaml", "")
"""Suffixes of files whose every change may be a change of mind: configuration, tokenizer, tracker."""


class Damage(NamedTuple):
    kind: str
    file: str
    """Below the checkpoint."""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.file} {self.text}"


def attack(bench: Bench, number: int) -> None:
    """Every eighth case resumes from damaged remains; the others go round all checkpoints."""
    random = bench.random("mutations", number)
    if number % 8 == 7:
        _attack_remains(bench, random)
        return
    names = list(bench.checkpoints)
    _attack_checkpoint(bench, random, bench.checkpoints[names[(number - number // 8) % len(names)]])


def attack_foreign(bench: Bench, number: int) -> None:
    """The checkpoints in GGUF, NeMo's, Orbax's and Bridge's formats in turn; half of the time a field of a header is changed."""
    random = bench.random("foreign", number)
    names = [name for name in bench.checkpoints if name.startswith(FOREIGN)]
    _attack_checkpoint(bench, random, bench.checkpoints[names[number % len(names)]])


def _attack_checkpoint(bench: Bench, random: Random, checkpoint: Checkpoint) -> None:
    intact = _intact(bench, checkpoint)
    bench.fresh_folder()
    source = bench.copy(checkpoint.name)
    before = {file: (source / file).read_bytes() for file in _files(source)}
    damage = damage_a_file(source, random)
    if checkpoint.recorded and random.random() < 0.4:
        _judge_verify(bench, checkpoint, damage, intact)
    else:
        _judge_convert(bench, checkpoint, damage, before.get(damage.file, b""), intact)


class Intact(NamedTuple):
    """The outputs of an undamaged checkpoint."""

    files: Mapping[str, str]
    fingerprints: tuple[Any, ...]
    record: Mapping[str, Any]
    """The output's megaconv.json, without the provenance."""


def _judge_verify(bench: Bench, checkpoint: Checkpoint, damage: Damage, intact: Intact) -> None:
    what = f"{checkpoint.name}: {damage}; verify"
    outcome = server.run("verify", bench.folder / "source", folder=bench.folder)
    check_conduct(outcome, what, answers=(0, 4))
    if outcome.status == 0:
        found = _convert(bench, checkpoint.name)
        if found.status or state(bench.folder / "out") != intact.files:
            raise Failure(
                "wrong",
                f"{what}: says that all is as written (convert: exit {found.status} {found.err})",
            )


def _judge_convert(
    bench: Bench, checkpoint: Checkpoint, damage: Damage, content: bytes, intact: Intact
) -> None:
    """content: what the damaged file held before."""
    what, target = f"{checkpoint.name}: {damage}; convert", bench.folder / "out"
    outcome = _convert(bench, checkpoint.name)
    check_conduct(outcome, what)
    if outcome.status:
        check_one_of(target, (ABSENT,), what)
        check_nothing_left(bench.folder, ("out", "source"), what)
        return
    found = state(target)
    differing = sorted(
        file for file in {*found, *intact.files} if found.get(file) != intact.files.get(file)
    )
    is_provenance = differing == [RECORD_NAME] and RECORD_NAME in str(damage)
    if not differing or (is_provenance and _without_provenance(target) == intact.record):
        return
    if checkpoint.recorded:
        texts = all(Path(file).suffix in _TEXTS for file in differing)
        permitted = (
            texts and _fingerprints(target) == intact.fingerprints and bool(outcome.err.strip())
        )
    else:
        permitted = unnoticeable(damage, content)
    if not permitted:
        raise Failure(
            "wrong",
            f"{what}: exit 0, and {', '.join(differing)} differ; reported: {outcome.err.strip()[:200]!r}",
        )


def unnoticeable(damage: Damage, content: bytes) -> bool:
    """True if the damage to a checkpoint without a record could be the writer's own will.

    content: what the file held before.
    True for changed bytes where nothing has a checksum (safetensors, zarr, torch files before 1.6, `.metadata`), for
    small text files, and for whole files that are gone, doubled or exchanged for others of the same checkpoint that are
    valid by themselves. False for changed bytes of torch's zip files, whose every record has a CRC-32, and for files that
    got shorter or longer.
    """
    text = Path(damage.file).suffix in _TEXTS and not content.startswith(_TORCH_ZIP)
    if text or damage.kind in ("exchange", "copy over", "delete", "extra"):
        return True
    if damage.kind in ("truncate", "extend", "empty"):
        return False
    if damage.kind == "flip" and content[257:262] == b"ustar":
        return not _is_in_torch_zip(content, int(damage.text.split()[2].rstrip(",")))
    return not content.startswith(_TORCH_ZIP)


def _is_in_torch_zip(archive: bytes, place: int) -> bool:
    """True if a byte of a tar archive belongs to a torch file, whose records all have a checksum."""
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        members = [
            each
            for each in opened.getmembers()
            if each.offset_data <= place < each.offset_data + each.size
        ]
    return any(archive[each.offset_data :].startswith(_TORCH_ZIP) for each in members)


# What is done to a checkpoint.


def damage_a_file(source: Path, random: Random) -> Damage:
    files = _files(source)
    file = random.choice(files)
    content = (source / file).read_bytes()
    if file.endswith((".json", ".zarray")) and random.random() < 0.6:
        changed, text = mutate_json(content, random)
        (source / file).write_bytes(changed)
        return Damage("value", file, text)
    found = changed_field(file, content, random) if random.random() < 0.5 else None
    if found is not None:
        (source / file).write_bytes(found[0])
        return Damage("field", file, found[1])
    kind, change = random.choice(_CHANGES)
    if change is not None:
        changed, text = change(content, random)
        (source / file).write_bytes(changed)
        return Damage(kind, file, text)
    other = random.choice([name for name in files if name != file])
    text = f"and {other}"
    if kind == "delete":
        (source / file).unlink()
    elif kind == "copy over":
        shutil.copyfile(source / other, source / file)
    elif kind == "exchange":
        mine = (source / other).read_bytes()
        (source / other).write_bytes(content)
        (source / file).write_bytes(mine)
    else:
        extra = Path(file).with_name(
            random.choice(["copy-of-", "0", ".", "model-00003-of-00002.", "9"]) + Path(file).name
        )
        (source / extra).write_bytes(content)
        text = f"as {extra}"
    return Damage(kind, file, text if kind != "delete" else "")


STAGING = ".out.megaconv-partial"


def _files(source: Path) -> list[str]:
    return sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())


def flip(content: bytes, random: Random) -> tuple[bytes, str]:
    if not content:
        return b"\0", "(empty)"
    place, bit = random.randrange(len(content)), random.randrange(8)
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed), f"at byte {place}, bit {bit}"


def _truncate(content: bytes, random: Random) -> tuple[bytes, str]:
    size = random.randrange(len(content)) if content else 0
    return content[:size], f"to {size} bytes"


def _extend(content: bytes, random: Random) -> tuple[bytes, str]:
    count = random.choice([1, 8, 64, 4096])
    return content + (
        random.randbytes(count) if random.random() < 0.5 else content[:count]
    ), f"by {count} bytes"


def _empty(content: bytes, random: Random) -> tuple[bytes, str]:
    return b"", ""


def _overwrite(content: bytes, random: Random) -> tuple[bytes, str]:
    start, count = _stretch(content, random)
    new = bytes(count) if random.random() < 0.5 else random.randbytes(count)
    return content[:start] + new + content[start + count :], f"bytes {start} to {start + count}"


def _swap(content: bytes, random: Random) -> tuple[bytes, str]:
    (left, count), (right, _) = sorted((_stretch(content, random), _stretch(content, random)))
    count = min(count, right - left, len(content) - right)
    parts = (
        content[:left],
        content[right : right + count],
        content[left + count : right],
        content[left : left + count],
    )
    return b"".join(
        (*parts, content[right + count :])
    ), f"bytes from {left} and {right}, {count} each"


def _stretch(content: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(content) + 1)
    return start, min(random.choice([1, 2, 8, 64, 512, 4096]), len(content) - start)


_CHANGES: list[tuple[str, Callable[[bytes, Random], tuple[bytes, str]] | None]] = [
    ("flip", flip), ("flip", flip), ("flip", flip), ("overwrite", _overwrite), ("swap", _swap), ("truncate", _truncate),
    ("extend", _extend), ("empty", _empty), ("delete", None), ("copy over", None), ("exchange", None), ("extra", None),
]  # fmt: skip


def _convert(bench: Bench, name: str) -> server.Outcome:
    """`source` to `out`: weights to a Hugging Face directory, optimizer state to rank files, adapters to peft's."""
    checkpoint = bench.checkpoints[name]
    source = checkpoint.source(bench.folder / "source")
    words = command(source, bench.folder / "out", checkpoint.writing, checkpoint.reading)
    return server.run(*words, folder=bench.folder)


@cache
def _intact(bench: Bench, checkpoint: Checkpoint) -> Intact:
    """The outputs of the undamaged checkpoint, at the same place, because its path is in the output."""
    bench.fresh_folder()
    bench.copy(checkpoint.name)
    outcome = _convert(bench, checkpoint.name)
    assert outcome.status == 0, outcome.err
    out = bench.folder / "out"
    return Intact(state(out), _fingerprints(out), _without_provenance(out))


def _without_provenance(output: Path) -> dict[str, Any]:
    record = json.loads((output / RECORD_NAME).read_bytes())
    return {name: value for name, value in record.items() if not name.startswith("provenance")}


def _fingerprints(output: Path) -> tuple[Any, ...]:
    record = json.loads((output / RECORD_NAME).read_bytes())
    return record["fingerprint"], record["optimizer_fingerprint"], record["tensors"]


# What an interrupted run left.


def _attack_remains(bench: Bench, random: Random) -> None:
    """A run is killed, its staging directory damaged, and resumed."""
    saver = random.choice(list(SAVERS))
    remains = _remains(bench, saver)
    folder = bench.fresh_folder()
    staging = folder / STAGING
    shutil.copytree(remains, staging)
    if random.random() < 0.6:
        journal = staging / "journal.jsonl"
        changed, text = random.choice([flip, flip, _overwrite, _swap, _truncate, _other_lines])(
            journal.read_bytes(), random
        )
        journal.write_bytes(changed)
        damage = Damage("change", "journal.jsonl", text)
    else:
        damage = damage_a_file(staging, random)
    what = f"{saver}, resumed after {damage}"
    arguments = bench.words(saver, folder / "out", "--resume --verify")
    outcome = server.run(*arguments, folder=folder)
    check_conduct(outcome, what)
    new = bench.output("hf", saver).files
    if outcome.status:
        check_one_of(folder / "out", (ABSENT, new), what)
        return
    if damage.file.startswith("data/") and state(folder / "out") != new:
        # Gaps between records: nobody writes them a second time, and nobody reads them.
        again = server.run("diff", folder / "out", bench.source(saver), folder=folder)
        if again.status:
            raise Failure("wrong", f"{what}: the output isn't the source: {again.out}{again.err}")
    else:
        check_one_of(folder / "out", (new,), what)
    check_nothing_left(folder, ("out",), what)


def _other_lines(content: bytes, random: Random) -> tuple[bytes, str]:
    """Entries that are whole, but gone, doubled or in another place."""
    lines = content.splitlines(keepends=True)
    place, other = random.randrange(len(lines)), random.randrange(len(lines))
    kind = random.choice(["gone", "doubled", "moved"])
    line = lines[place] if kind == "doubled" else lines.pop(place)
    if kind != "gone":
        lines.insert(other, line)
    return b"".join(lines), f"line {place} {kind} {other if kind != 'gone' else ''}"


@cache
def _remains(bench: Bench, saver: str) -> Path:
    """The staging directory of a run that was killed when half of its tensors were in the journal."""
    kept = bench.root / f"remains-{bench.worker}-{saver}"
    folder = bench.fresh_folder()
    arguments = bench.words(saver, folder / "out", "--resume")
    server.run(*arguments, folder=folder, prepare=partial(_die_while_journaling, 12))
    staging = folder / STAGING
    assert (staging / "journal.jsonl").read_bytes().count(b"\n") > 10
    return Path(shutil.copytree(staging, kept))


def _die_while_journaling(calls: int) -> None:
    """Kill the process when the journal has so many entries."""
    journal_every_tensor()
    record, done = Staging.record, count()

    def last(self: Staging, entries: list[dict[str, Any]]) -> None:
        record(self, entries)
        if next(done) == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    Staging.record = last  # type: ignore[method-assign]
