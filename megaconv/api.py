"""The Python interface: the same work as the commands, with plain arguments, called as the options are.

docs/api.md describes it; a test compares the signatures there with these, and runs its examples.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from pathlib import Path
from threading import Lock
from typing import Any, get_type_hints

from megaconv.called import checked, require_type, unknown
from megaconv.checkpoint import Checkpoint, open_checkpoint
from megaconv.commands import comparison, inspection, layouts, scanning, verification
from megaconv.commands import push as pushing
from megaconv.commands.comparison import Diff
from megaconv.commands.inspection import Inspection
from megaconv.commands.layouts import Layouts
from megaconv.commands.push import PushOptions, PushReport
from megaconv.commands.scanning import Scan
from megaconv.commands.verification import Verification
from megaconv.engine import conversion
from megaconv.engine.fingerprints import Fingerprint
from megaconv.engine.plan import default_workers
from megaconv.engine.preparation import ConvertOptions, Report
from megaconv.errors import UsageError
from megaconv.model.layout import LayerSplit
from megaconv.options import (
    LoadOptions,
    SaveOptions,
    adapter_choice,
    byte_size,
    checkpoint_types,
    numbers,
    save_options,
)


@checked
def convert(
    load_dir: str | Path,
    save_dir: str | Path,
    *,
    saver: str,
    loader: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    layer_split: str | Iterable[int] | None = None,
    split_rank: int | None = None,
    ckpt_format: str | None = None,
    transformer_impl: str | None = None,
    moe_grouped_gemm: bool = False,
    make_vocab_size_divisible_by: int | None = None,
    vocab_padding: str | None = None,
    release: bool = False,
    dist_files: int | None = None,
    max_shard_size: int | str | None = None,
    checkpoint_type: str | None = None,
    config: str | Path | None = None,
    base: str | Path | None = None,
    true_vocab_size: int | None = None,
    text_only: bool = False,
    dtype: str | None = None,
    quantize: str | None = None,
    optimizer: bool | None = None,
    use_distributed_optimizer: bool | None = None,
    allow_lossy: Sequence[str] = (),
    adapters: Sequence[str] = (),
    dry_run: bool = False,
    verify: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    check_source: bool = True,
    max_memory: int | str = "256MiB",
    workers: int = 0,
    options: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **fields: Any,
) -> Report:
    """Convert load_dir (a directory or a Hub id) into save_dir, which must not exist yet.

    Options are called as on the command line. Sizes left out stay as the source has them. optimizer: whether its state goes along;
    None: where both sides can hold it. check_source: a source that has a megaconv.json has to be what that says.
    adapters: LoRA adapters to merge into the weights, each as `DIR` or `DIR:WEIGHT`.
    split_rank: how many of the pp stages are a T5's encoder's, the first ones. options: of
    the loader's and the saver's own, by key, as `megaconv formats` lists them. fields: of SaveOptions, by their own names. Sizes
    are bytes, or text with a unit. progress: called with (bytes done, bytes in all) of the tensors after every block, from any thread.
    dry_run: write nothing, and report what would be written.
    Raises megaconv.errors.CheckpointError, TypeError for an option that there isn't or that is of another type.
    """
    read_type, written_type = checkpoint_types(checkpoint_type, saver)
    save = save_options(
        tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, split=LayerSplit(layers=numbers(layer_split), split_rank=split_rank),
        ckpt_format=ckpt_format, transformer_impl=transformer_impl, vocab_padding=vocab_padding, release=release,
        checkpoint_type=written_type, base=_path(base), quantize=quantize, allow_lossy=tuple(allow_lossy),
        **{
            "grouped_experts": moe_grouped_gemm, "vocab_divisor": make_vocab_size_divisible_by, "files": dist_files,
            "distributed_optimizer": use_distributed_optimizer,
            "max_shard_bytes": None if max_shard_size is None else byte_size(max_shard_size),
        } | _known_fields(fields),
    )  # fmt: skip
    asked = ConvertOptions(
        loader=loader or ("llama_mistral" if read_type else None),
        load=LoadOptions(_path(config), true_vocab_size, read_type, text_only=text_only), save=save,
        dtype=dtype, optimizer=optimizer, max_memory=byte_size(max_memory), workers=workers, verify=verify, resume=resume,
        overwrite=overwrite, extra=options or {}, check_source=check_source, adapters=tuple(map(adapter_choice, adapters)),
    )  # fmt: skip
    if dry_run:
        return conversion.rehearse(load_dir, save_dir, saver, asked)
    counter = _Counter(progress or (lambda done, total: None))
    return conversion.convert(load_dir, save_dir, saver, asked, counter.advance, planned=counter.planned)


def _known_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Raises TypeError."""
    hints = get_type_hints(SaveOptions)
    for name, value in given.items():
        if name not in {each.name for each in dataclass_fields(SaveOptions)}:
            raise unknown("convert", name, [*_CONVERT_OPTIONS, *hints])
        require_type(f"convert({name}={value!r:.200})", value, hints[name])
    return dict(given)


_CONVERT_OPTIONS = [name for name in get_type_hints(convert) if name not in ("return", "fields")]


def _path(place: str | Path | None) -> Path | None:
    return None if place is None else Path(place)


class _Counter:
    """Adds up what a conversion has moved, for somebody who wants to know how far it is."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell, self._lock, self._done, self._total = tell, Lock(), 0, 0

    def planned(self, report: Report) -> None:
        self._total = report.header.nbytes

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._tell(self._done, self._total)


@checked
def merge(
    base: str | Path,
    adapters: str | Sequence[str],
    save_dir: str | Path,
    *,
    saver: str = "hf",
    loader: str | None = None,
    config: str | Path | None = None,
    dtype: str | None = None,
    dry_run: bool = False,
    verify: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    max_memory: int | str = "256MiB",
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Merge LoRA adapters, each as `DIR` or `DIR:WEIGHT`, into the model that they were trained on.

    Short for `convert(base, save_dir, adapters=...)`, which shards as well. Raises megaconv.errors.CheckpointError.
    """
    return convert(
        base, save_dir, saver=saver, loader=loader, config=config, dtype=dtype, dry_run=dry_run, verify=verify,
        overwrite=overwrite, resume=resume, adapters=[adapters] if isinstance(adapters, str) else adapters, max_memory=max_memory,
        workers=workers, progress=progress,
    )  # fmt: skip


@checked
def open(  # noqa: A001
    path: str | Path,
    *,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    text_only: bool = False,
    options: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open a directory, a Hub id, or whatever else a loader takes, to look into; reads metadata only.

    Raises megaconv.errors.CheckpointError.
    """
    read = LoadOptions(_path(config), true_vocab_size, text_only=text_only, extra=options or {})
    return open_checkpoint(path, read, loader)


@checked
def inspect(
    path: str | Path,
    *,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    text_only: bool = False,
    options: Mapping[str, str] | None = None,
    check_source: bool = True,
) -> Inspection:
    """What a checkpoint is: format, family, parameters, dtypes, layout. Reads metadata only.

    check_source: compare names and shapes with its own megaconv.json, if it has one. Raises megaconv.errors.CheckpointError, also
    for what `megaconv inspect` shows though it can't be converted.
    """
    read = LoadOptions(_path(config), true_vocab_size, text_only=text_only, extra=options or {})
    return inspection.inspect(path, read, loader, check_source=check_source)


@checked
def plan(
    path: str | Path,
    *,
    gpus: int | None = None,
    gpu_memory: int | str | None = None,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    text_only: bool = False,
    options: Mapping[str, str] | None = None,
) -> Layouts:
    """The parallel layouts that a model can have, what a rank holds of it, and the memory to train it.

    gpus: of the run; None: as few as hold the model once. gpu_memory: of one, in bytes, or text with a unit.
    Raises megaconv.errors.CheckpointError.
    """
    read = LoadOptions(_path(config), true_vocab_size, optimizer=False, text_only=text_only, extra=options or {})
    if gpus is not None and gpus < 1:
        raise UsageError(f"gpus={gpus}: expected 1 or more")
    header = inspection.inspect(path, read, loader, check_source=False).header
    return layouts.layouts(header, gpus, None if gpu_memory is None else byte_size(gpu_memory))


@checked
def fingerprint(
    path: str | Path,
    *,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    text_only: bool = False,
    optimizer: bool = True,
    options: Mapping[str, str] | None = None,
    workers: int = 0,
) -> Fingerprint:
    """One hash over all weights, whatever the format, naming scheme, padding and layout; one more over optimizer state. Reads all.

    Raises megaconv.errors.CheckpointError.
    """
    read = LoadOptions(_path(config), true_vocab_size, optimizer=optimizer, text_only=text_only, extra=options or {})
    return conversion.fingerprint(path, read, workers, loader=loader)


@checked
def verify(
    path: str | Path,
    *,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    options: Mapping[str, str] | None = None,
    workers: int = 0,
) -> Verification:
    """Read a checkpoint back against the fingerprints in its megaconv.json, and its small files against the hashes there.

    Raises megaconv.errors.CheckpointError where there is no megaconv.json, or nothing can be opened.
    """
    read = LoadOptions(_path(config), true_vocab_size, extra=options or {})
    return verification.verify(path, read, workers, loader=loader)


@checked
def diff(
    a: str | Path,
    b: str | Path,
    *,
    tolerance: float = 0.0,
    metadata: bool = False,
    loader_a: str | None = None,
    loader_b: str | None = None,
    optimizer: bool = True,
    options: Mapping[str, str] | None = None,
    check_source: bool = True,
    workers: int = 0,
) -> Diff:
    """Compare two checkpoints of any kinds tensor by tensor.

    tolerance: values that differ by no more are equal. metadata: compare names, shapes and dtypes alone, and read no weights.
    options: of the loaders' own. check_source: each has to be what its own megaconv.json says, if it has one.
    Raises megaconv.errors.CheckpointError.
    """
    if not 0 <= tolerance < float("inf") or (metadata and tolerance):
        raise UsageError(
            f"tolerance={tolerance}: expected 0 or a positive number, and 0 where metadata alone is compared"
        )
    read = LoadOptions(optimizer=optimizer and not metadata, metadata_only=metadata, extra=options or {})
    left, right = comparison.open_both(a, b, read, (loader_a, loader_b))
    if metadata:
        return comparison.diff_metadata(left, right)
    checks = comparison.source_checks(a, left, b, right) if check_source else None
    threads = workers or default_workers(writing=False)
    return comparison.diff_sources(left, right, threads, checks=checks, tolerance=tolerance)


@checked
def scan(path: str | Path) -> Scan:
    """Every class and function that a pickle names, judged, code that a configuration asks for, and files whose structure is damaged.

    A directory, a file, or a Hub id; loads nothing. Raises megaconv.errors.CheckpointError where nothing is there.
    """
    return scanning.scan(path)


@checked
def push(
    directory: str | Path,
    repository: str,
    *,
    revision: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    message: str | None = None,
    card: bool = True,
    as_is: bool = False,
    config: str | Path | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dry_run: bool = False,
) -> PushReport:
    """Put a finished model on the Hugging Face Hub in one commit, and compare what arrived with what was sent.

    What is no Hugging Face directory is converted first, unless as_is. dry_run: list files and hashes, ask nobody.
    Raises megaconv.errors.CheckpointError; ModelsDiffer where the Hub has something else afterwards.
    """
    asked = PushOptions(
        revision, private, create_pr, message, card, as_is, _path(config), tuple(include), tuple(exclude)
    )
    return pushing.push(directory, repository, asked, dry_run=dry_run)
