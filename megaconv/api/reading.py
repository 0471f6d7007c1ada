"""The functions of the Python interface that read and write nothing."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaconv.called import checked
from megaconv.checkpoint import Checkpoint, open_checkpoint
from megaconv.commands import comparison, inspection, scanning, verification
from megaconv.commands.comparison import Diff
from megaconv.commands.inspected import Inspection
from megaconv.commands.scanning import Scan
from megaconv.commands.verification import Verification
from megaconv.engine import conversion
from megaconv.engine.fingerprints import Fingerprint
from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.errors import UsageError
from megaconv.extras import require_torch
from megaconv.input import find_input
from megaconv.options import ConvertOptions, LoadOptions, SealOptions, require_workers
from megaconv.options.option import built
from megaconv.serving import state_dict as native_state
from megaconv.serving.state_dict import StateDict


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
    public_key: str | Path | None = None,
    signature: str | Path | None = None,
    identity: str | None = None,
    identity_provider: str | None = None,
    trust_config: str | Path | None = None,
    workers: int = 0,
) -> Verification:
    """Compare a checkpoint's tensors with the fingerprints in its megaconv.json, and small files with the hashes there.

    public_key, or identity with identity_provider: require a signature first, and compare every file with it.
    Raises megaconv.errors.CheckpointError if there is no megaconv.json, or if nothing can be opened.
    """
    read = built(LoadOptions, "verify", locals())
    required = built(SealOptions, "verify", locals())
    require_workers(workers)
    return verification.verify(path, read, workers, loader=loader, seal=required)


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
    config: str | Path | None = None,
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
