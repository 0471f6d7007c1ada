"""Makes a patch: reads two checkpoints block by block, and writes what differs."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from formats import torch_zip
from formats.lazy_numpy import Bytes, np
from formats.opened import OpenedFiles
from formats.output import FileLayout, PlainFile
from formats.stores.target import StoreTarget
from formats.stores.waiting import growing_file_alone
from formats.target import Target
from formats.tensor import ITEMSIZE, Box, LazyTensor, row_blocks
from megaconv._version import __version__
from megaconv.engine.fingerprints import Fingerprint, combine, tensor_hasher
from megaconv.engine.lineage import Lineage
from megaconv.engine.outputs import remove_failed
from megaconv.engine.plan import BLOCK_BYTES, OutputPlan
from megaconv.engine.record import RECORD_NAME, record_json
from megaconv.engine.run_identity import source_files
from megaconv.engine.sidecars import small_files
from megaconv.engine.source_check import SourceCheck
from megaconv.errors import NotExpressible, is_interruption
from megaconv.megatron.optimizer.training_output import written_rng
from megaconv.model.ir import Header, Key, Source, TensorInfo
from megaconv.model.shared_names import require_shared_names
from megaconv.options import LoadOptions
from megaconv.patches.blocks import encode, zstandard
from megaconv.patches.blocks_file import BlocksFile, Finished
from megaconv.patches.described import plain
from megaconv.patches.patch import BLOCKS, FILES, FORMAT, HEADER, INDEX, VERSION, Entry
from megaconv.threads import thread_pool
from megaconv.values.shifted import PlainSource

_WAITING = 4
"""Blocks that wait for each worker's results. It bounds the memory: a few MiB a worker."""
_OVERHEAD_BYTES = 1024
"""More than the form of a block and the frame of zstandard add to a tensor's last block."""


@dataclass(frozen=True)
class PatchReport:
    """The contents of a patch, in numbers."""

    target: Path | str
    """The place of the patch: a path, or a URI."""
    base: Fingerprint
    new: Fingerprint
    tensors: int
    changed: int
    """Tensors of which any element differs, or that the base doesn't have."""
    removed: tuple[Key, ...]
    nbytes: int
    """Bytes of the patch's blocks."""
    full_bytes: int
    """Bytes of the newer checkpoint's tensors."""
    notices: tuple[str, ...] = ()
    """Notices for the user about the provenance."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "target": str(self.target),
            "base": {"weights": self.base.weights, "optimizer": self.base.optimizer},
            "new": {"weights": self.new.weights, "optimizer": self.new.optimizer},
            "tensors": self.tensors,
            "changed": self.changed,
            "removed": [str(key) for key in self.removed],
            "bytes": self.nbytes,
            "full_bytes": self.full_bytes,
            "notices": list(self.notices),
        }


class _Block(NamedTuple):
    """A block, and the bytes that it was made of."""

    content: bytes
    new: Bytes
    base: Bytes | None


def make_patch(
    old: Source,
    new: Source,
    staging: Target,
    *,
    options: LoadOptions,
    workers: int,
    resume: bool = False,
    opened: OpenedFiles | None = None,
    advance: Callable[[int], None] = lambda count: None,
    lineage: Lineage | None = None,
    checks: tuple[SourceCheck, SourceCheck] | None = None,
) -> PatchReport:
    """Write the patch that makes `new` of `old`. It appears complete or not at all.

    staging: the place of the patch, not opened yet. options: those with which both sources were opened.
    resume: continue a killed run, and keep the work of an interrupted one. opened: the files that were opened for both
    sources; they must not change meanwhile. advance: called with the bytes of each block. lineage: of the patch.
    checks: comparisons with the sources' own records.
    Raises UsageError without zstandard, NotExpressible for adapters and for encoders with other tensors, TargetExists,
    CorruptCheckpoint for a source that changed, and ModelsDiffer for a patch that was read on another base.
    """
    zstandard()
    _require_models(old.header, new.header)
    opened = opened or OpenedFiles()
    try:
        journal = _begin(staging, _identity(opened, old, new, options), new.header, resume=resume)
        with opened, BlocksFile(staging, journal, _most_bytes(new.header)) as blocks:
            report = _write(staging, blocks, old, new, options, workers, advance, lineage)
        opened.require_as_stored()
        for check, found in zip(checks or (), (report.base, report.new), strict=False):
            check.compare(found)
        staging.finish()
        staging.commit()
    except BaseException as error:
        if resume and is_interruption(error):
            staging.keep()
        else:
            remove_failed(staging, staging.target, error)
        raise
    return report if lineage is None else replace(report, notices=lineage.notices)


def _begin(
    staging: Target, identity: Mapping[str, str], header: Header, *, resume: bool
) -> list[dict[str, Any]]:
    """Open the place of a patch. Returns the journal of an earlier run."""
    if not isinstance(staging, StoreTarget):
        return staging.open(identity, resume=resume)
    names = [f"{FILES}/{name}" for name in (*header.files, *header.made)]
    staging.expect(growing_file_alone(_most_bytes(header)))
    # A store has to know the names of all files, and the size of the file that has parts.
    sizes = {BLOCKS: _most_bytes(header)} | dict.fromkeys([*names, INDEX, HEADER], 0)
    return staging.open(identity, resume=resume, sizes=sizes)


def _most_bytes(header: Header) -> int:
    """The largest possible size of all blocks in bytes. zstandard makes a block longer by less than one part in 100."""
    nbytes = sum(info.nbytes for info in header.manifest.values())
    return nbytes + nbytes // 100 + _OVERHEAD_BYTES * len(header.manifest)


def _identity(
    opened: OpenedFiles, old: Source, new: Source, options: LoadOptions
) -> dict[str, str]:
    """Values that must be equal for a run to continue another run's work. The keys are names for messages."""
    return {
        "megaconv": __version__,
        "--optimizer": str(options.optimizer),
        "--text-only": str(options.text_only),
        "--option": repr(sorted(options.extra.items())),
        "the revision of OLD": str(old.header.revision),
        "the revision of NEW": str(new.header.revision),
        **source_files(opened),
    }


def _require_models(old: Header, new: Header) -> None:
    """Raises NotExpressible for adapters, and for an encoder that OLD doesn't have in the same form.

    Raises UnknownFamily if a family describes only one of the two models.
    """
    require_shared_names("OLD", old, "NEW", new)
    if new.adapter is not None:
        raise NotExpressible("a patch of an adapter isn't supported; adapters are small: copy it")
    whole, of_base = new.config.whole, old.config.whole
    if whole is None:
        return
    if of_base is None or replace(of_base, config={}) != replace(whole, config={}):
        raise NotExpressible(
            "a patch between multimodal models needs the same encoders on both sides, and OLD has others; "
            "--text-only makes a patch of the language models"
        )


def _write(
    staging: Target,
    blocks: BlocksFile,
    old: Source,
    new: Source,
    options: LoadOptions,
    workers: int,
    advance: Callable[[int], None],
    lineage: Lineage | None,
) -> PatchReport:
    before = dict(PlainSource(old, exact=True).tensors())
    after = dict(PlainSource(new, exact=True).tensors())
    found = list(_finished(blocks, before, after, workers, advance))
    nbytes = blocks.end()
    entries = [each.entry for each in found]
    of_base = {each.entry.key: each.base for each in found if each.base is not None}
    for key, tensor in before.items():
        if key not in of_base:
            of_base[key] = _hash(tensor, advance)
    removed = tuple(key for key in before if key not in after)
    ends = combine(of_base), combine({each.entry.key: each.new for each in found})
    index = {
        "format": FORMAT,
        "version": VERSION,
        "base": {"weights": ends[0].weights, "optimizer": ends[0].optimizer},
        "new": {"weights": ends[1].weights, "optimizer": ends[1].optimizer},
        "tensors": [entry.to_json() for entry in entries],
        "removed": [list(key) for key in removed],
        "options": {"optimizer": options.optimizer, "text_only": options.text_only},
    }
    _write_small_files(staging, new.header, index, ends[1], lineage)
    changed = sum(not entry.has_base or any(size > 1 for size in entry.sizes) for entry in entries)
    full = sum(entry.info.nbytes for entry in entries)
    return PatchReport(
        staging.target, ends[0], ends[1], len(entries), changed, removed, nbytes, full
    )


def _finished(
    blocks: BlocksFile,
    before: Mapping[Key, LazyTensor],
    after: Mapping[Key, LazyTensor],
    workers: int,
    advance: Callable[[int], None],
) -> Iterator[Finished]:
    """Write the blocks of all tensors that no earlier run has finished, and yield every tensor in model order."""
    yield from blocks.kept
    advance(sum(each.entry.info.nbytes * (1 + each.entry.has_base) for each in blocks.kept))
    kept = {each.entry.key for each in blocks.kept}
    with thread_pool(workers) as pool:
        for key, tensor in after.items():
            if key in kept:
                continue
            made = _tensor(pool, blocks, key, tensor, before.get(key), workers, advance)
            blocks.finish(made)
            yield made


def _tensor(
    pool: ThreadPoolExecutor,
    blocks: BlocksFile,
    key: Key,
    tensor: LazyTensor,
    found: LazyTensor | None,
    workers: int,
    advance: Callable[[int], None],
) -> Finished:
    """Write the blocks of one tensor. found: the base's tensor of this name."""
    info = TensorInfo(tuple(tensor.shape), tensor.dtype)
    is_base = found is not None and (tuple(found.shape), found.dtype) == info
    base = found if is_base else None
    hashers = [tensor_hasher(each) for each in (tensor, base) if each is not None]
    content = blake3()
    sizes = []
    for block in _blocks(pool, tensor, base, workers):
        blocks.write(block.content)
        content.update(block.content)
        sizes.append(len(block.content))
        for hasher, rows in zip(hashers, (block.new, block.base), strict=False):
            hasher.update(rows)
        advance(len(block.new) * len(hashers))
    entry = Entry(key, info, is_base, tuple(sizes), str(content.hexdigest()))
    digests = [str(hasher.hexdigest()) for hasher in hashers]
    return Finished(entry, digests[0], digests[1] if is_base else None)


def _blocks(
    pool: ThreadPoolExecutor, new: LazyTensor, base: LazyTensor | None, workers: int
) -> Iterator[_Block]:
    """A tensor's blocks in order. Few of them are in memory at once."""
    waiting: deque[Future[_Block]] = deque()
    for box in row_blocks(new.shape, new.dtype, BLOCK_BYTES):
        waiting.append(pool.submit(_block, new, base, box))
        if len(waiting) >= _WAITING * workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _block(new: LazyTensor, base: LazyTensor | None, box: Box) -> _Block:
    itemsize = ITEMSIZE[new.dtype]
    ours = _rows(new, box, itemsize)
    theirs = None if base is None else _rows(base, box, itemsize)
    return _Block(encode(ours, theirs, itemsize), ours, theirs)


def _rows(tensor: LazyTensor, box: Box, itemsize: int) -> Bytes:
    rows = np.empty((box.rows, box.cols * itemsize), np.uint8)
    tensor.read_into(box, rows)
    return rows.reshape(-1)


def _hash(tensor: LazyTensor, advance: Callable[[int], None]) -> str:
    hasher = tensor_hasher(tensor)
    for box in row_blocks(tensor.shape, tensor.dtype, BLOCK_BYTES):
        rows = _rows(tensor, box, ITEMSIZE[tensor.dtype])
        hasher.update(rows)
        advance(len(rows))
    return str(hasher.hexdigest())


def _write_small_files(
    staging: Target,
    header: Header,
    index: Mapping[str, Any],
    fingerprint: Fingerprint,
    lineage: Lineage | None,
) -> None:
    files: dict[str, FileLayout] = {
        f"{FILES}/{name}": file for name, file in small_files(header).items()
    }
    plain_header = replace(header, shifts={})
    record = record_json(
        "",
        "delta",
        plain_header,
        OutputPlan({}, {}),
        fingerprint,
        adapters=() if lineage is None else lineage.adapters,
        provenance=None if lineage is None else lineage.provenance,
    )
    files[RECORD_NAME] = PlainFile(record)
    files[INDEX] = PlainFile(json.dumps(index).encode())
    files[HEADER] = torch_zip.plan(_description(header), "header")
    for name, layout in files.items():
        written = staging.file(name, layout.size)
        for offset, content in layout.headers({}):
            written.write(offset, content)


def _description(header: Header) -> dict[str, Any]:
    """The header as plain values. Generators that no file can hold are left out."""
    training = plain(replace(header.training, rng={}))
    # The encoders' tables are those of the base: the patch holds the configuration alone.
    whole = None if header.config.whole is None else {"config": plain(header.config.whole.config)}
    own_names = header.config.own_names
    # Rows follow from the names and shapes of the tensors.
    named = None if own_names is None else plain(replace(own_names, rows=()))
    config = plain(replace(header.config, whole=None, own_names=None))
    rng = {tuple(rank): state for rank, state in written_rng(header.training.rng).items()}
    return {
        "config": config | {"whole": whole, "own_names": named},
        "training": training | {"rng": rng},
        "files": [*header.files, *header.made],
        "named_tokenizer": header.named_tokenizer,
        "source": header.source,
    }
