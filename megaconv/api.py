"""The Python interface: one function per command, with the same options as plain arguments.

The options are defined in `megaconv.options`. A function passes all of its arguments on by name (`locals()`), so that
nothing but its signature repeats them. Tests compare the signatures with the options, and docs/api.md with both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from megaconv.called import checked
from megaconv.checkpoint import Checkpoint, open_checkpoint
from megaconv.commands import cleaning, comparison, inspection, layouts, scanning, verification
from megaconv.commands import push as pushing
from megaconv.commands.cleaning import Cleaned
from megaconv.commands.comparison import Diff
from megaconv.commands.inspection import Inspection
from megaconv.commands.layouts import Layouts
from megaconv.commands.push import PushReport
from megaconv.commands.scanning import Scan
from megaconv.commands.verification import Verification
from megaconv.engine import conversion
from megaconv.engine.fingerprints import Fingerprint
from megaconv.engine.plan import default_workers
from megaconv.engine.preparation import open_source
from megaconv.engine.report import Report
from megaconv.engine.target import refuse_place
from megaconv.errors import UsageError
from megaconv.extras import require_torch
from megaconv.input import find_input
from megaconv.options import ConvertOptions, LoadOptions, PushOptions, require_workers
from megaconv.options.option import built
from megaconv.options.values import adapter_choices, byte_size
from megaconv.patches import applying
from megaconv.patches.making import PatchReport, make_patch
from megaconv.serving import state_dict as native_state
from megaconv.serving.state_dict import StateDict


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
    decoder_first_pipeline_num_layers: int | None = None,
    decoder_last_pipeline_num_layers: int | None = None,
    account_for_embedding_in_pipeline_split: bool = False,
    account_for_loss_in_pipeline_split: bool = False,
    pipeline_model_parallel_layout: str | None = None,
    split_rank: int | None = None,
    ckpt_format: str | None = None,
    transformer_impl: str | None = None,
    moe_grouped_gemm: bool = False,
    make_vocab_size_divisible_by: int | None = None,
    vocab_padding: str | None = None,
    release: bool = False,
    iteration: int | None = None,
    dist_files: int | None = None,
    max_shard_size: int | str | None = None,
    checkpoint_type: str | None = None,
    config: str | Path | None = None,
    base: str | Path | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    text_only: bool = False,
    drop_retrieval: bool = False,
    cache: bool = False,
    dtype: str | None = None,
    quantize: str | None = None,
    kv_cache: str | None = None,
    calibration: str | Path | None = None,
    optimizer: bool | None = None,
    use_distributed_optimizer: bool | None = None,
    allow_lossy: Sequence[str] = (),
    adapters: Sequence[str] = (),
    dry_run: bool = False,
    verify: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    take_over: bool = False,
    yes_replace_objects: bool = False,
    spool: str | Path | None = None,
    max_spool: int | str = "16GiB",
    check_source: bool = True,
    max_memory: int | str = "256MiB",
    workers: int = 0,
    options: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Convert load_dir (a directory, a Hub id or a URI of a store) into save_dir (a directory or an s3:// URI), which must
    not exist yet.

    Options have the names of the command line's options. A size that is left out stays as in the source.
    Sizes in bytes are numbers, or text with a unit.

    adapters: LoRA adapters to merge into the weights, each as `DIR` or `DIR:WEIGHT`.
    check_source: if the source has a megaconv.json, compare the source with it, and refuse a difference.
    dry_run: write nothing, and report what would be written.
    optimizer: whether to convert the optimizer state; None: convert it if both sides can hold it.
    options: the loader's and the saver's own options, by key, as `megaconv formats` lists them.
    progress: called with (bytes done, bytes in total) of the tensors after every block, from any thread.
    split_rank: the number of pp stages that hold a T5's encoder; these stages are the first ones.

    Raises megaconv.errors.CheckpointError. Raises TypeError for an unknown option or a value of the wrong type.
    """
    asked = built(ConvertOptions, "convert", locals())
    return _convert(load_dir, save_dir, saver, asked, dry_run, progress)


def _convert(
    load_dir: str | Path,
    save_dir: str | Path,
    saver: str,
    asked: ConvertOptions,
    dry_run: bool,
    progress: Callable[[int, int], None] | None,
) -> Report:
    options = asked.for_saver(saver)
    if dry_run:
        return conversion.rehearse(load_dir, save_dir, saver, options)
    counter = _Counter(progress or (lambda done, total: None))
    return conversion.convert(
        load_dir, save_dir, saver, options, counter.advance, planned=counter.planned
    )


class _Counter:
    """Adds up the bytes that a conversion has moved, and reports the sum to a callback."""

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
    cache: bool = False,
    dtype: str | None = None,
    dry_run: bool = False,
    verify: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    take_over: bool = False,
    yes_replace_objects: bool = False,
    spool: str | Path | None = None,
    max_spool: int | str = "16GiB",
    max_memory: int | str = "256MiB",
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Merge LoRA adapters, each as `DIR` or `DIR:WEIGHT`, into the model that they were trained on.

    Short for `convert(base, save_dir, adapters=...)`; call `convert` to shard the result as well.
    Raises megaconv.errors.CheckpointError.
    """
    asked = built(ConvertOptions, "merge", locals())
    words = [adapters] if isinstance(adapters, str) else adapters
    return _convert(
        base, save_dir, saver, replace(asked, adapters=adapter_choices(words)), dry_run, progress
    )


@checked
def delta(
    old: str | Path,
    new: str | Path,
    save_dir: str | Path,
    *,
    loader: str | None = None,
    text_only: bool = False,
    optimizer: bool = True,
    options: Mapping[str, str] | None = None,
    overwrite: bool = False,
    workers: int = 0,
) -> PatchReport:
    """Write a patch to save_dir: what changed between two checkpoints, of any formats and layouts.

    loader: the loader of both checkpoints. options: the loaders' own options.
    Needs the extra `delta`. Raises megaconv.errors.CheckpointError.
    """
    read = built(LoadOptions, "delta", locals())
    require_workers(workers)
    inputs = comparison.find_both(old, new, read, (loader, loader))
    left, right = comparison.open_both(inputs, read)
    threads = workers or default_workers(writing=False)
    refuse_place(save_dir)
    return make_patch(
        left, right, Path(save_dir), options=read, workers=threads, overwrite=overwrite
    )


@checked
def apply(
    old: str | Path,
    patches: str | Sequence[str],
    save_dir: str | Path,
    *,
    saver: str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    max_memory: int | str = "256MiB",
    workers: int = 0,
) -> Report:
    """Make the newer checkpoint of a base and its patches, in their order. Checks base and patches first.

    saver: the output's format; None for the format and the layout of the base.
    Raises megaconv.errors.CheckpointError: ModelsDiffer for another base, CorruptCheckpoint for a damaged patch.
    """
    asked = built(ConvertOptions, "apply", locals())
    listed = [patches] if isinstance(patches, str) else list(patches)
    found = applying.prepare(str(old), listed, saver, asked)
    return conversion.convert(found.load_dir, save_dir, found.saver, found.options)


@checked
def open(  # noqa: A001
    path: str | Path,
    *,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    text_only: bool = False,
    drop_retrieval: bool = False,
    options: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open a directory, a Hub id, or any other input that a loader reads, to look into it. Reads metadata only.

    Raises megaconv.errors.CheckpointError.
    """
    return open_checkpoint(path, built(LoadOptions, "inspect", locals()), loader)


@checked
def state_dict(
    path: str | Path,
    *,
    names: str = "hf",
    tp: int = 1,
    tp_rank: int = 0,
    make_vocab_size_divisible_by: int | None = None,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    text_only: bool = False,
    options: Mapping[str, str] | None = None,
) -> StateDict:
    """The tensors of one tensor-parallel rank, under the names of a naming scheme. Each is read when it is asked for.

    names: `hf`, `core` (Transformer Engine's layers), `core_local`, `core_grouped` or `legacy`.
    make_vocab_size_divisible_by: the padding of the vocabulary in Megatron's schemes, with its last row. None: as in
    the source, or 128.
    Raises megaconv.errors.CheckpointError, and LayoutError if the model can't be sharded by tp.
    """
    for name, size in (("tp", tp), ("make_vocab_size_divisible_by", make_vocab_size_divisible_by)):
        if size is not None and size < 1:
            raise UsageError(f"{name}={size}: expected 1 or more")
    require_torch("megaconv.state_dict")
    read = built(LoadOptions, "inspect", locals())
    source = open_source(find_input(path, loader, read), read)
    return native_state.state_dict(
        source.header,
        dict(source.tensors()),
        names,
        tp=tp,
        tp_rank=tp_rank,
        divisor=make_vocab_size_divisible_by,
    )


@checked
def load_transformers(
    path: str | Path,
    *,
    device_map: Any = None,
    dtype: str | None = None,
    loader: str | None = None,
    config: str | Path | None = None,
    text_only: bool = False,
) -> Any:
    """A checkpoint of any format as a model of transformers, in evaluation mode. Nothing is written to disk.

    device_map: as `from_pretrained` takes it. dtype: `bf16`, `fp16` or `fp32`; None: the checkpoint's own.
    Needs torch and transformers 5. Raises megaconv.errors.CheckpointError.
    """
    from megaconv.serving import transformers_model

    asked = built(ConvertOptions, "serve_hf", locals())
    return transformers_model.load_transformers(path, asked, device_map)


@checked
def inspect(
    path: str | Path,
    *,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    text_only: bool = False,
    drop_retrieval: bool = False,
    options: Mapping[str, str] | None = None,
    check_source: bool = True,
) -> Inspection:
    """Describe a checkpoint: format, family, parameters, dtypes, layout. Reads metadata only.

    check_source: compare names and shapes with the checkpoint's own megaconv.json, if it has one.
    Raises megaconv.errors.CheckpointError, also for files that `megaconv inspect` shows but that can't be converted.
    """
    read = built(LoadOptions, "inspect", locals())
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
    num_attention_heads: int | None = None,
    text_only: bool = False,
    drop_retrieval: bool = False,
    options: Mapping[str, str] | None = None,
) -> Layouts:
    """The parallel layouts that a model can have, the share of each rank, and the memory that training takes.

    gpus: the number of GPUs of the run; None: as few as can hold the model once.
    gpu_memory: the memory of one GPU in bytes, or text with a unit.
    Raises megaconv.errors.CheckpointError.
    """
    read = replace(built(LoadOptions, "plan", locals()), optimizer=False)
    if gpus is not None and gpus < 1:
        raise UsageError(f"gpus={gpus}: expected 1 or more")
    header = inspection.inspect(path, read, loader, check_source=False).header
    return layouts.layouts(
        header, gpus, None if gpu_memory is None else byte_size(gpu_memory, "gpu_memory=")
    )


@checked
def fingerprint(
    path: str | Path,
    *,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    text_only: bool = False,
    drop_retrieval: bool = False,
    cache: bool = False,
    optimizer: bool = True,
    options: Mapping[str, str] | None = None,
    workers: int = 0,
) -> Fingerprint:
    """One hash over all weights, and one over the optimizer state. Reads all tensors.

    The hashes don't depend on format, naming scheme, padding or layout. Raises megaconv.errors.CheckpointError.
    """
    read = built(LoadOptions, "fingerprint", locals())
    require_workers(workers)
    return conversion.fingerprint(path, read, workers, loader=loader)


@checked
def verify(
    path: str | Path,
    *,
    loader: str | None = None,
    config: str | Path | None = None,
    cache: bool = False,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    options: Mapping[str, str] | None = None,
    workers: int = 0,
) -> Verification:
    """Compare a checkpoint's tensors with the fingerprints in its megaconv.json, and small files with the hashes there.

    Raises megaconv.errors.CheckpointError if there is no megaconv.json, or if nothing can be opened.
    """
    read = built(LoadOptions, "verify", locals())
    require_workers(workers)
    return verification.verify(path, read, workers, loader=loader)


@checked
def diff(
    a: str | Path,
    b: str | Path,
    *,
    tolerance: float = 0.0,
    metadata: bool = False,
    loader: str | None = None,
    loader_a: str | None = None,
    loader_b: str | None = None,
    text_only: bool = False,
    cache: bool = False,
    optimizer: bool = True,
    options: Mapping[str, str] | None = None,
    check_source: bool = True,
    workers: int = 0,
) -> Diff:
    """Compare two checkpoints of any formats tensor by tensor.

    tolerance: values that differ by no more than this are equal.
    metadata: compare only names, shapes and dtypes, and read no weights.
    loader: the loader of both checkpoints; loader_a and loader_b take precedence.
    options: the loaders' own options.
    check_source: compare each checkpoint with its own megaconv.json, if it has one.
    Raises megaconv.errors.CheckpointError.
    """
    given = built(LoadOptions, "diff", locals())
    require_workers(workers)
    if not 0 <= tolerance < float("inf") or (metadata and tolerance):
        raise UsageError(
            f"tolerance={tolerance}: expected 0 or a positive number, and 0 where metadata alone is compared"
        )
    read = replace(given, optimizer=optimizer and not metadata, metadata_only=metadata)
    inputs = comparison.find_both(a, b, read, (loader_a or loader, loader_b or loader))
    left, right = comparison.open_both(inputs, read)
    if metadata:
        return comparison.diff_metadata(left, right)
    checks = comparison.source_checks(inputs, (left, right)) if check_source else None
    threads = workers or default_workers(writing=False)
    return comparison.diff_sources(left, right, threads, checks=checks, tolerance=tolerance)


@checked
def scan(path: str | Path) -> Scan:
    """Judge every class and function that a pickle names; report code that a configuration asks for, and damaged files.

    path: a directory, a file, or a Hub id. Loads nothing. Raises megaconv.errors.CheckpointError if nothing is there.
    """
    return scanning.scan(path)


@checked
def clean(uri: str, *, yes: bool = False, take_over: bool = False) -> Cleaned:
    """The leftovers of a killed run at an s3:// URI: uploads, a claim and a journal. Other uploads are never touched.

    yes: remove it. take_over: also the work of a run on another host that may live.
    Raises megaconv.errors.CheckpointError for a run that lives.
    """
    return cleaning.clean(uri, yes=yes, take_over=take_over)


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

    An input that is not a Hugging Face directory is converted first, unless `as_is` is set.
    dry_run: list files and hashes without a request to the Hub.
    Raises megaconv.errors.CheckpointError; ModelsDiffer if the Hub has different content afterwards.
    """
    asked = built(PushOptions, "push", locals())
    return pushing.push(directory, repository, asked, dry_run=dry_run)
