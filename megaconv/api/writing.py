"""The functions of the Python interface that write: checkpoints, patches, the Hub, and stores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

from megaconv.called import checked
from megaconv.commands import cleaning, sealing
from megaconv.commands import push as pushing
from megaconv.commands.cleaning import Cleaned
from megaconv.commands.hub_commit import PushReport
from megaconv.commands.sealing import Seal
from megaconv.engine import conversion
from megaconv.engine.report import Report
from megaconv.errors import UsageError
from megaconv.options import ConvertOptions, LoadOptions, PushOptions, SealOptions, require_workers
from megaconv.options.model_shares import divided, model_shares
from megaconv.options.option import built
from megaconv.options.values import adapter_choices
from megaconv.patches import applying
from megaconv.patches.between import make_between
from megaconv.patches.making import PatchReport


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
    adapters: Sequence[str | Path] = (),
    average: Sequence[str | Path] = (),
    method: str = "linear",
    density: float | None = None,
    seed: int = 0,
    layers: str | Sequence[int] | None = None,
    keep_experts: str | Path | Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    keep_channels: str | Path | Mapping[str, Sequence[int]] | None = None,
    num_experts: int | None = None,
    moe_router_topk: int | None = None,
    moe_upcycling_granularity: int = 1,
    experts_of: Sequence[str | Path] = (),
    vocab_size: int | None = None,
    pad_to_multiple_of: int | None = None,
    tokenizer: str | Path | None = None,
    new_rows: str | None = None,
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
    """Convert load_dir (a directory, a Hub id or a URI of a store) into save_dir (a directory or a URI of a store), which must
    not exist yet.

    Options have the names of the command line's options. A size that is left out stays as in the source.
    Sizes in bytes are numbers, or text with a unit.

    adapters: LoRA adapters to merge into the weights, each as `DIR` or `DIR:WEIGHT`.
    average: models to average with the source, each as `MODEL` or `MODEL:SHARE`. The source has what they leave of 1.
    method, density, seed: how they are averaged; see `average`.
    layers: the source's layers that the output has, such as `"0-15,24-31"`, or their numbers.
    keep_experts: the experts of each layer that the output keeps, such as `"0-47,60"`, their numbers, a file of
    `megatron-lite rank-experts`, or numbers by layer: `{"layers.3": [0, 2]}`.
    keep_channels: the channels of hidden states and MLPs and the heads that the output keeps: a file of `megatron-lite rank-channels`, or
    numbers by name: `{"hidden": [0, 2], "layers.3.mlp": [1, 2, 5]}`.
    num_experts, moe_router_topk, moe_upcycling_granularity, experts_of: the experts that a dense model's MLPs become.
    vocab_size, pad_to_multiple_of: the output's number of tokens, and a number whose multiple it has to be.
    tokenizer, new_rows: the output's tokenizer, a directory or a Hub id, and the rows of new tokens.
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
    adapters: str | Path | Sequence[str | Path],
    save_dir: str | Path,
    *,
    saver: str = "hf",
    loader: str | None = None,
    config: str | Path | None = None,
    cache: bool = False,
    dtype: str | None = None,
    quantize: str | None = None,
    kv_cache: str | None = None,
    calibration: str | Path | None = None,
    allow_lossy: Sequence[str] = (),
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

    Short for `convert(base, save_dir, adapters=...)`; call `convert` to shard the result as well. quantize: as there, of
    the merged weights.
    Raises megaconv.errors.CheckpointError.
    """
    asked = built(ConvertOptions, "merge", locals())
    words = [adapters] if isinstance(adapters, (str, Path)) else adapters
    if not words:
        raise UsageError("merge(adapters=[]): expected one adapter or more")
    return _convert(
        base, save_dir, saver, replace(asked, adapters=adapter_choices(words)), dry_run, progress
    )


@checked
def average(
    models: Sequence[str | Path],
    save_dir: str | Path,
    *,
    saver: str = "hf",
    method: str = "linear",
    density: float | None = None,
    seed: int = 0,
    loader: str | None = None,
    config: str | Path | None = None,
    cache: bool = False,
    dtype: str | None = None,
    quantize: str | None = None,
    kv_cache: str | None = None,
    calibration: str | Path | None = None,
    allow_lossy: Sequence[str] = (),
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
    """Average the weights of several checkpoints of one model, each as `MODEL` or `MODEL:SHARE`.

    Short for `convert(models[0], save_dir, average=models[1:])`; call `convert` to shard the result as well. Shares add up
    to 1; without them all are equal. method: `linear`, `slerp` (of two models), or `ties`, `dare` and `dare-ties`, with
    which a share is the weight of a difference from the first model, and density is the part of it that is kept. The
    settings and the tokenizer are those of the first model.
    Raises megaconv.errors.CheckpointError.
    """
    asked = built(ConvertOptions, "average", locals())
    first, others = divided(model_shares(models), asked.average_method.method)
    return _convert(first, save_dir, saver, replace(asked, averaged=others), dry_run, progress)


@checked
def delta(
    old: str | Path,
    new: str | Path,
    save_dir: str | Path,
    *,
    loader: str | None = None,
    config: str | Path | None = None,
    text_only: bool = False,
    optimizer: bool = True,
    options: Mapping[str, str] | None = None,
    sparse: str | None = None,
    check_source: bool = True,
    overwrite: bool = False,
    resume: bool = False,
    take_over: bool = False,
    yes_replace_objects: bool = False,
    workers: int = 0,
) -> PatchReport:
    """Write a patch to save_dir: what changed between two checkpoints, of any formats and layouts.

    save_dir: a directory, or a URI of a store. loader: the loader of both checkpoints. options: the loaders' own options.
    sparse: `vllm` writes the sparse weight update that vLLM takes, in place of a patch; it holds no optimizer state.
    check_source: compare each checkpoint with its own megaconv.json, if it has one.
    A patch needs the extra `delta`. Raises megaconv.errors.CheckpointError.
    """
    return make_between(old, new, save_dir, built(ConvertOptions, "delta", locals()), sparse)


@checked
def apply(
    old: str | Path,
    patches: str | Path | Sequence[str | Path],
    save_dir: str | Path,
    *,
    saver: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    max_memory: int | str = "256MiB",
    workers: int = 0,
) -> Report:
    """Make the newer checkpoint of a base and its patches, in their order. Checks base and patches first.

    saver: the output's format; None for the format and the layout of the base.
    Raises megaconv.errors.CheckpointError: ModelsDiffer for another base, CorruptCheckpoint for a damaged patch.
    """
    asked = built(ConvertOptions, "apply", locals())
    listed = [patches] if isinstance(patches, (str, Path)) else patches
    if not listed:
        raise UsageError("apply(patches=[]): expected one patch or more")
    found = applying.prepare(old, listed, saver, asked)
    return conversion.convert(found.load_dir, save_dir, found.saver, found.options)


@checked
def push(
    directory: str | Path,
    repository: str,
    *,
    revision: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    replace_weights: bool = False,
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
    replace_weights: remove weight files of an earlier model that the push doesn't replace.
    dry_run: list files and hashes without a request to the Hub.
    Raises megaconv.errors.CheckpointError; ModelsDiffer if the Hub has different content afterwards.
    """
    asked = built(PushOptions, "push", locals())
    return pushing.push(directory, repository, asked, dry_run=dry_run)


@checked
def seal(
    path: str | Path,
    *,
    key: str | Path | None = None,
    key_password_file: str | Path | None = None,
    sigstore: bool = False,
    trust_config: str | Path | None = None,
    files_only: bool = False,
    overwrite: bool = False,
    loader: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    options: Mapping[str, str] | None = None,
    workers: int = 0,
) -> Seal:
    """Write the fingerprints of a checkpoint into its megaconv.json, and sign all its files with a key or by sigstore.

    Without `key` and `sigstore`, the seal has no signature. Raises megaconv.errors.CheckpointError; TargetExists for an
    earlier signature without `overwrite`.
    """
    asked, read = built(SealOptions, "seal", locals()), built(LoadOptions, "seal", locals())
    require_workers(workers)
    return sealing.seal(path, asked, read, loader, workers)


@checked
def clean(uri: str, *, yes: bool = False, take_over: bool = False) -> Cleaned:
    """The leftovers of a killed run at a URI of a store: uploads, a claim and a journal. Other uploads are never touched.

    yes: remove it. take_over: also the work of a run on another host that may live.
    Raises megaconv.errors.CheckpointError for a run that lives.
    """
    return cleaning.clean(uri, yes=yes, take_over=take_over)
