"""Structure-aware fuzzing of every parser in formats/, in process: thousands of inputs a second.

A case is a batch of inputs, in a fork of its own. Whatever is no CheckpointError is a failure; so are seconds of time
and half a gigabyte of memory. An input depends on the seed, the target and its number alone.
"""

import io
import json
import logging
import os
import resource
import signal
import tarfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from formats import (
    dcp_metadata,
    dtensor_files,
    gguf_header,
    orbax_arrays,
    pickle_guard,
    rank_files,
    safetensors,
    sharded_safetensors,
    stored_zip,
    tar_archive,
    torch_dist,
    torch_zip,
    zarr_arrays,
)
from formats.errors import CheckpointError
from formats.journal import Journal
from formats.tensor import InputFile, byte_count, read_tensor
from formats.yaml_file import read_yaml
from megaconv.adapters import opening, peft_files
from megaconv.families import read_config
from megaconv.families.parts.meta_params import load_params
from tests.trust.bench import Bench
from tests.trust.fuzz_inputs import (
    any_bytes,
    header_bytes,
    json_text,
    pickle,
    safetensors_file,
    tar_file,
    torch_file,
)
from tests.trust.judging import MEMORY_BYTES, Failure

BATCH = 1000
_SECONDS = 4.0
"""Seconds of processor time for one input."""
_BATCH_SECONDS = 300.0

Maker = Callable[[Sequence[bytes], Random], bytes]
Parser = Callable[[bytes, Path], object]


def _read_pickle(content: bytes, folder: Path) -> object:
    return pickle_guard.load(content, lambda identity: identity, source="fuzzed")


def _read_torch_file(content: bytes, folder: Path) -> object:
    found = torch_zip.read(_file(content, folder / "fuzzed.pt"))
    _read_tensors(found)
    return found


def _read_tensors(found: object) -> None:
    for value in found.values() if isinstance(found, dict) else ():
        if hasattr(value, "read_into") and byte_count(value.shape, value.dtype) < 1 << 16:
            read_tensor(value)


def _read_safetensors(content: bytes, folder: Path) -> object:
    path = _file(content, folder / "fuzzed.safetensors")
    safetensors.read_metadata(path)
    _read_tensors(found := safetensors.read(path))
    return found


def _read_sharded(content: bytes, folder: Path) -> object:
    _file(content, folder / "shard-00001-model-00001-of-00001.safetensors")
    return sharded_safetensors.read(folder)


def _read_distributed(content: bytes, folder: Path) -> object:
    for name in ("__0_0.distcp", "__1_0.distcp"):
        if not (folder / name).exists():
            (folder / name).write_bytes(bytes(1 << 14))
    _file(content, folder / ".metadata")
    dcp_metadata.read(folder / ".metadata")
    return torch_dist.open_directory(folder).tensors()


def _read_zarr(content: bytes, folder: Path) -> object:
    array = folder / "weight"
    if not array.is_dir():
        array.mkdir()
        for name in ("0.0", "0.1", "1.0", "0", "0.0.0"):
            (array / name).write_bytes(bytes(256))
    _file(content, array / ".zarray")
    return zarr_arrays.open_directory(folder)


def _read_journal(content: bytes, folder: Path) -> object:
    return Journal(_file(content, folder / "journal.jsonl")).read()


def _read_tracker(content: bytes, folder: Path) -> object:
    (folder / "iter_0000001" / "mp_rank_00").mkdir(parents=True, exist_ok=True)
    _file(content, folder / rank_files.TRACKER)
    return rank_files.find_version(folder)


def _read_dtensors(content: bytes, folder: Path) -> object:
    _file(content, folder / "model_world_size_1_rank_0.pt")
    return dtensor_files.read(folder)


def _read_adapter(content: bytes, folder: Path) -> object:
    config = opening.read_adapter_config(_file(content, folder / peft_files.CONFIG))
    return [
        config.scale_of(f"model.layers.{layer}.self_attn.q_proj", config.rank) for layer in range(4)
    ]


def _read_tar(content: bytes, folder: Path) -> object:
    return tar_archive.read_members(InputFile.open(_file(content, folder / "x.nemo")))


TARGETS: list[tuple[str, Maker, Parser, str, int]] = [
    ("pickle", pickle, _read_pickle, "pickles", 8),
    ("torch file", torch_file, _read_torch_file, "*.pt", 3),
    ("torch file before 1.6", any_bytes, _read_torch_file, "pytorch_model-0*.bin", 1),
    (
        "zip directory",
        any_bytes,
        lambda content, folder: stored_zip.read_directory(
            InputFile.open(_file(content, folder / "zip"))
        ),
        "*.pt",
        2,
    ),
    ("safetensors", safetensors_file, _read_safetensors, "*.safetensors", 2),
    ("sharded safetensors", safetensors_file, _read_sharded, "*.safetensors", 1),
    (
        "index",
        json_text,
        lambda content, folder: safetensors.read_index(_file(content, folder / "index")),
        "*.index.json",
        1,
    ),
    (".metadata", pickle, _read_distributed, ".metadata", 3),
    (".zarray", json_text, _read_zarr, ".zarray", 1),
    (
        "metadata.json",
        json_text,
        lambda content, folder: torch_dist.read_backend(
            _file(content, folder / "metadata.json").parent
        ),
        "metadata.json",
        1,
    ),
    ("journal", any_bytes, _read_journal, "journal", 1),
    ("tracker", any_bytes, _read_tracker, "latest_checkpointed_iteration.txt", 1),
    (
        "config.json",
        json_text,
        lambda content, folder: read_config(_file(content, folder / "config.json")),
        "config.json",
        1,
    ),
    (
        "YAML",
        any_bytes,
        lambda content, folder: read_yaml(_file(content, folder / "x.yaml")),
        "yaml",
        1,
    ),
    (
        "params.json",
        json_text,
        lambda content, folder: load_params(_file(content, folder / "params.json")),
        "params.json",
        1,
    ),
    (
        "GGUF",
        header_bytes,
        lambda content, folder: gguf_header.read(_file(content, folder / "x.gguf")),
        "*.gguf",
        1,
    ),
    ("tar", tar_file, _read_tar, "tar", 1),
    ("DTensors", torch_file, _read_dtensors, "model_world_size_*.pt", 1),
    ("adapter_config.json", json_text, _read_adapter, "adapter", 1),
    (
        "_METADATA",
        json_text,
        lambda content, folder: orbax_arrays.read_tree(
            _file(content, folder / orbax_arrays.METADATA).parent
        ),
        orbax_arrays.METADATA,
        1,
    ),
]
"""(what is parsed, how inputs are made, the parser, where real ones are found, how often it has its turn)."""

_TURNS = [index for index, target in enumerate(TARGETS) for _ in range(target[4])]


def attack(bench: Bench, case: int) -> None:
    target = TARGETS[_TURNS[case % len(_TURNS)]]
    folder, real = bench.fresh_folder(), seeds(bench, target[3])
    reported, place = os.memfd_create("failures"), os.memfd_create("place")
    process = os.fork()
    if not process:
        _fuzz(target, real, bench, case, folder, reported, place)
    timer = _watchdog(process)
    _, status = os.waitpid(process, 0)
    timer()
    number = int(os.pread(place, 20, 0) or b"0")
    found = json.loads(os.pread(reported, 1 << 24, 0) or b"[]")
    os.close(reported)
    os.close(place)
    if status:
        promise = (
            "hang"
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
            else "traceback"
        )
        raise Failure(
            promise,
            f"{target[0]}, input {number} of the batch: the process ended with {os.waitstatus_to_exitcode(status)}",
        )
    if found:
        promise, text = found[0]
        raise Failure(promise, f"{target[0]}: {len(found)} of {BATCH} inputs; {text}")


def _watchdog(process: int) -> Callable[[], object]:
    """Ends a batch that hangs where no exception gets through. Returns what stops it."""
    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(process, signal.SIGALRM))
    signal.setitimer(signal.ITIMER_REAL, _BATCH_SECONDS)

    def stop() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

    return stop


def _fuzz(
    target: Any,
    real: Sequence[bytes],
    bench: Bench,
    case: int,
    folder: Path,
    reported: int,
    place: int,
) -> None:
    """Ends this process."""
    name, make, parse, _, _ = target
    failures: list[tuple[str, str]] = []
    os.chdir(folder)
    logging.disable()  # calls that parsers leave out are warned about
    _limit_memory()
    for number in range(BATCH):
        os.pwrite(place, b"%d" % number, 0)
        content = make(real, bench.random(f"fuzz {name}", case * BATCH + number))
        try:
            with _limited_time():
                parse(content, folder)
        except CheckpointError:
            pass
        except _TooLongError:
            failures.append(
                ("hang", _described(number, content, f"{_SECONDS} seconds of the processor"))
            )
        except BaseException:
            failures.append(
                ("traceback", _described(number, content, traceback.format_exc()[-700:]))
            )
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > MEMORY_BYTES:
            failures.append(("memory", _described(number, content, "half a gigabyte")))
            break
    os.pwrite(reported, json.dumps(failures[:50]).encode(), 0)
    os._exit(0)


def _described(number: int, content: bytes, what: str) -> str:
    Path(f"failing-{number}").write_bytes(content)
    return f"input {number} of the batch (--keep leaves it as failing-{number}): {content[:80]!r}: {what}"


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


@contextmanager
def _limited_time() -> Iterator[None]:
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(*_: object) -> None:
    raise _TooLongError


class _TooLongError(BaseException):
    """No Exception, which a parser might take for one of its own."""


def _file(content: bytes, path: Path) -> Path:
    path.write_bytes(content)
    return path


@cache
def seeds(bench: Bench, pattern: str) -> list[bytes]:
    """Real inputs: the small ones among those that the checkpoints have, each once."""
    if pattern == "journal":
        journal = Journal(bench.folder / "seed.jsonl")
        journal.open(keep=False)
        journal.append(
            [{"plan": "plan"}, {"tensor": ["a", "weight"], "runs": [["f", "r", [[0, 2, 5]]]]}, {}]
        )
        journal.close()
        return [journal.path.read_bytes()]
    if pattern == "yaml":
        return [
            b"model: &m\n  _target_: a.b.C\n  rotary_base: 1.0e+4\n  window_size: !!python/tuple\n  - 15\n  - 0\nagain: {m: *m, t: 'x'}\n"
        ]
    if pattern == "tar":
        return [
            _tar(kind) for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
        ]
    if pattern == "adapter":
        patterns = {
            "rank_pattern": {"q_proj": 8, r"layers\.(0|1)\..*_proj": 2},
            "alpha_pattern": {"^model.*k_proj": 2.5},
        }
        return [
            json.dumps(
                {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, **patterns}
            ).encode()
        ]
    if pattern == "pickles":
        torch_files = [
            data
            for path in sorted(bench.root.glob("sources/*-bare/**/*.pt"))
            for data in [path.read_bytes()]
        ]
        inner = [found for content in torch_files for found in _pickles(content)]
        return sorted({*inner, *seeds(bench, ".metadata")}, key=len)[:40]
    found = {
        path.read_bytes()
        for path in sorted(bench.root.glob(f"sources/*/**/{pattern}"))
        if path.is_file()
    }
    assert found, pattern
    return sorted(found, key=len)[:20]


def _tar(kind: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=kind) as archive:
        for name in ("./model_weights.ckpt", "tp_rank_00_pp_rank_000/" + "long" * 22 + ".ckpt"):
            entry = tarfile.TarInfo(name)
            entry.size = 600
            archive.addfile(entry, io.BytesIO(bytes(600)))
    return made.getvalue()[:6144]


def _pickles(content: bytes) -> list[bytes]:
    from tests.trust.torch_containers import members

    return [data for name, data in members(content) if name.endswith("data.pkl")]
