"""Writes the sparse weight update that vLLM takes: positions and new values of the elements that changed.

    UPDATE/sparse.json               format, version, fingerprints of both checkpoints, and the changed tensors
    UPDATE/patches.safetensors       NAME.indices (int32) and NAME.values of each changed tensor

vLLM has no file format for it. Its trainer hands `SparseWeightPatch(name, indices, values, full_shape)` to
`SparseNCCLTrainerWeightTransferEngine.send_weights`. Source of the facts: vLLM 0.33.0,
vllm/distributed/weight_transfer/sparse_nccl_engine.py and vllm/model_executor/model_loader/checkpoint_weight_patch.py.

* Names and shapes are those of the Hugging Face checkpoint. Positions count in the flattened tensor.
* Positions are int32, in one dimension, and occur once. Values have the tensor's dtype, and replace the old ones.
* NaN marks an unchanged element inside vLLM, so that no new value may be NaN. Other dtypes than floating-point are refused.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any, BinaryIO, NamedTuple

from formats.full_writes import write_at
from formats.lazy_numpy import Bytes, np
from formats.output import FileLayout, PlainFile
from formats.safetensors import SafetensorsLayout
from formats.staged_file import write_error
from formats.staging import Staging
from formats.stores.target import StoreTarget
from formats.target import Target
from formats.tensor import ITEMSIZE, Shape
from megaconv.engine.fingerprints import Fingerprint, fingerprint_source
from megaconv.engine.outputs import remove_failed
from megaconv.engine.source_check import SourceCheck
from megaconv.errors import ModelsDiffer, NotExpressible, UsageError
from megaconv.model.ir import WEIGHT, Header, Source
from megaconv.patches.making import PatchReport
from megaconv.patches.patch import SPARSE_INDEX
from megaconv.serving.state_dict import Slice, state_dict
from megaconv.threads import thread_pool
from megaconv.values.rounding import exact
from megaconv.values.shifted import PlainSource

SPARSE_FILE = "patches.safetensors"
FORMAT, VERSION = "megaconv-sparse-update", 1
ENGINES = {"vllm": "0.33.0"}
"""The engines whose sparse updates can be written, and the versions that were read."""
FLOATS = ("float64", "float32", "float16", "bfloat16")
_INDEX = "int32"
_MOST_ELEMENTS = 1 << 31
"""Elements that int32 positions can address."""
_RANGE_BYTES = 4 << 20
_WAITING = 2
"""Ranges that wait for each worker's results. It bounds the memory: some MiB a worker."""
_COPY_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class SparseReport(PatchReport):
    """The contents of a sparse update, in numbers. It removes no tensor, and has no optimizer state."""

    engine: str
    elements: int
    """Elements that differ."""
    all_elements: int

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        further = {
            "engine": self.engine,
            "elements": self.elements,
            "all_elements": self.all_elements,
        }
        return super().to_json() | further


class _Changes(NamedTuple):
    """The changed elements of a range of a tensor."""

    indices: Bytes
    """int32 positions in the tensor, as bytes."""
    values: Bytes
    read: int
    """Bytes that were read on each side."""


@dataclass
class _Spool:
    """The arrays of one dtype, one after the other, in a file without a name."""

    file: BinaryIO
    place: Path
    """The directory that holds the file, for messages."""
    size: int = 0
    """Bytes in the file."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Array -> number of its elements."""

    def append(self, name: str, data: Bytes, itemsize: int) -> None:
        try:
            write_at(self.file.fileno(), data.data, self.size)
        except OSError as error:
            raise write_error(error, self.place) from error
        self.size += len(data)
        self.sizes[name] = self.sizes.get(name, 0) + len(data) // itemsize


def require_engine(engine: str) -> None:
    """Raises UsageError for an engine whose updates can't be written."""
    if engine not in ENGINES:
        raise UsageError(f"--sparse {engine!r} is not known; expected {' or '.join(ENGINES)}")


def refuse_resume(*, resume: bool) -> None:
    """Raises UsageError for --resume."""
    if resume:
        raise UsageError(
            "--resume: an update of --sparse starts again from the beginning; leave it out"
        )


def make_sparse(
    old: Source,
    new: Source,
    staging: Target,
    *,
    engine: str,
    workers: int,
    advance: Callable[[int], None] = lambda count: None,
    checks: tuple[SourceCheck, SourceCheck] | None = None,
) -> SparseReport:
    """Write the update that makes the weights of `new` of those of `old`. It appears complete or not at all.

    Reads both checkpoints twice: for the elements, and for the fingerprints. advance: called with the bytes that were
    read. checks: comparisons with the sources' own records. Raises UsageError for an unknown engine, ModelsDiffer if a
    tensor is missing on a side or has another shape or dtype, NotExpressible for values that the engine can't take,
    TargetExists, and CorruptCheckpoint for a source that differs from its record.
    """
    require_engine(engine)
    before, after = _slices(old), _slices(new)
    _require_same_tensors(before, after)
    try:
        # A store has to know the names of all files before their sizes are known.
        names = [SPARSE_FILE, SPARSE_INDEX] if isinstance(staging, StoreTarget) else []
        staging.open({}, resume=False, sizes=dict.fromkeys(names, 0))
        report = _write(staging, (old, new), before, after, engine, workers, advance)
        for check, found in zip(checks or (), (report.base, report.new), strict=False):
            check.compare(found)
        staging.finish()
        staging.commit()
    except BaseException as error:
        if not staging.committed:
            remove_failed(staging, staging.target, error)
        raise
    return report


def _compare(
    spools: Mapping[str, "_Spool"],
    before: Mapping[str, Slice],
    after: Mapping[str, Slice],
    workers: int,
    advance: Callable[[int], None],
) -> None:
    """Keep the changed elements of all tensors in the spools."""
    with thread_pool(workers) as pool:
        for name, tensor in after.items():
            for found in _ranges(pool, name, tensor, before[name], workers):
                advance(2 * found.read)
                if len(found.indices):
                    _keep(spools, name, tensor, found)


def _slices(source: Source) -> Mapping[str, Slice]:
    header: Header = source.header
    if header.adapter is not None:
        raise NotExpressible("--sparse: an adapter has no sparse update; vLLM loads adapters whole")
    return state_dict(header, dict(source.tensors()), "hf").slices


def _require_same_tensors(before: Mapping[str, Slice], after: Mapping[str, Slice]) -> None:
    for name in (*after, *before):
        ours, theirs = after.get(name), before.get(name)
        if ours is None or theirs is None:
            where = "OLD" if theirs is None else "NEW"
            raise ModelsDiffer(
                f"{name}: {where} has no such tensor; a sparse update keeps all tensors"
            )
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise ModelsDiffer(
                f"{name}: is {theirs.dtype} {list(theirs.shape)} in OLD and {ours.dtype} {list(ours.shape)} in NEW; "
                "a sparse update keeps shapes and dtypes"
            )


def _write(
    staging: Target,
    ends: tuple[Source, Source],
    before: Mapping[str, Slice],
    after: Mapping[str, Slice],
    engine: str,
    workers: int,
    advance: Callable[[int], None],
) -> SparseReport:
    # The file system of the output, where there is one, has room for arrays of this size.
    directory = staging.root if isinstance(staging, Staging) else Path(gettempdir())
    with ExitStack() as opened:
        # Ordered by the size of their elements, so that all arrays in the file are aligned.
        spools = {
            dtype: _Spool(opened.enter_context(TemporaryFile(dir=directory)), directory)
            for dtype in ("float64", _INDEX, "float32", "float16", "bfloat16")
        }
        _compare(spools, before, after, workers, advance)
        base, made = (_fingerprint(each, workers, advance) for each in ends)
        nbytes = _write_arrays(staging, spools)
    counts = {name: spools[_INDEX].sizes.get(_indices(name), 0) for name in after}
    index = _index(engine, base, made, after, counts)
    _write_whole(staging, SPARSE_INDEX, PlainFile(json.dumps(index).encode()))
    return SparseReport(
        staging.target,
        base,
        made,
        tensors=len(after),
        changed=sum(count > 0 for count in counts.values()),
        removed=(),
        nbytes=nbytes,
        full_bytes=sum(each.file.size for each in after.values()),
        engine=engine,
        elements=sum(counts.values()),
        all_elements=sum(prod(each.shape) for each in after.values()),
    )


def _ranges(
    pool: ThreadPoolExecutor, name: str, new: Slice, old: Slice, workers: int
) -> Iterator[_Changes]:
    """The changes of a tensor, range by range in order. Few ranges are in memory at once."""
    waiting: deque[Future[_Changes]] = deque()
    for start in range(0, new.file.size, _RANGE_BYTES):
        stop = min(new.file.size, start + _RANGE_BYTES)
        waiting.append(pool.submit(_changes, name, new, old, start, stop))
        if len(waiting) >= _WAITING * workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _changes(name: str, new: Slice, old: Slice, start: int, stop: int) -> _Changes:
    """The changed elements between two bytes of a tensor. Raises NotExpressible."""
    itemsize = ITEMSIZE[new.dtype]
    ours = np.frombuffer(new.file.read(start, stop), np.uint8).reshape(-1, itemsize)
    theirs = np.frombuffer(old.file.read(start, stop), np.uint8).reshape(-1, itemsize)
    places = np.flatnonzero((ours != theirs).any(axis=1))
    values = ours[places].reshape(-1)
    if len(places):
        _require_floats(name, new, values)
    indices = (places + start // itemsize).astype("<i4").view(np.uint8)
    return _Changes(indices, values, stop - start)


def _require_floats(name: str, tensor: Slice, values: Bytes) -> None:
    """Raises NotExpressible for changed values that vLLM's sparse update can't take."""
    if tensor.dtype not in FLOATS:
        raise NotExpressible(
            f"{name}: its {tensor.dtype} values changed; vLLM's sparse updates take {', '.join(FLOATS)}"
        )
    if prod(tensor.shape) > _MOST_ELEMENTS:
        raise NotExpressible(
            f"{name}: has more than {_MOST_ELEMENTS:,} elements; vLLM's positions are int32"
        )
    if np.isnan(exact(values, tensor.dtype)).any():
        raise NotExpressible(
            f"{name}: a new value is NaN, which marks an unchanged element in vLLM's sparse updates"
        )


def _keep(spools: Mapping[str, _Spool], name: str, tensor: Slice, found: _Changes) -> None:
    spools[_INDEX].append(_indices(name), found.indices, ITEMSIZE[_INDEX])
    spools[tensor.dtype].append(_values(name), found.values, ITEMSIZE[tensor.dtype])


def _indices(name: str) -> str:
    return f"{name}.indices"


def _values(name: str) -> str:
    return f"{name}.values"


def _fingerprint(source: Source, workers: int, advance: Callable[[int], None]) -> Fingerprint:
    """The fingerprint of a source's weights."""
    weights = {key for key in source.header.manifest if key.slot == WEIGHT}
    return fingerprint_source(PlainSource(source, exact=True), workers, advance, only=weights)


def _write_arrays(staging: Target, spools: Mapping[str, _Spool]) -> int:
    """Write all arrays as one safetensors file. Returns their bytes."""
    arrays: dict[str, tuple[Shape, str]] = {}
    for dtype, spool in spools.items():
        for name, count in spool.sizes.items():
            arrays[name] = (count,), dtype
    layout = SafetensorsLayout(arrays)
    written = staging.file(SPARSE_FILE, layout.size)
    (_, header), *_ = layout.headers({})
    written.write(0, header)
    place = len(header)
    for spool in spools.values():
        spool.file.seek(0)
        while block := spool.file.read(_COPY_BYTES):
            written.write(place, block)
            place += len(block)
    return layout.size - len(header)


def _write_whole(staging: Target, name: str, layout: FileLayout) -> None:
    written = staging.file(name, layout.size)
    for offset, content in layout.headers({}):
        written.write(offset, content)


def _index(
    engine: str,
    base: Fingerprint,
    new: Fingerprint,
    tensors: Mapping[str, Slice],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    patches = [
        {"name": name, "full_shape": list(each.shape), "dtype": each.dtype, "count": counts[name]}
        for name, each in tensors.items()
        if counts[name]
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "engine": engine,
        "engine_version": ENGINES[engine],
        "base": {"weights": base.weights},
        "new": {"weights": new.weights},
        "patches": patches,
    }
