"""`megaconv convert`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import GroupedCommand, app, print_json
from megaconv.commands.cli.push import print_push
from megaconv.commands.endings import say
from megaconv.commands.process import ignore_signals
from megaconv.errors import Interrupted, is_interruption
from megaconv.terminal import show


@app.command(epilog=opt.CONVERT_EXAMPLES, cls=GroupedCommand)
def convert(
    saver: opt.Saver = "",
    source: opt.Source = None,
    target: opt.Target = None,
    load_dir: opt.LoadDir = None,
    save_dir: opt.OptionalSaveDir = None,
    loader: opt.Loader = None,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    vpp: opt.Vpp = None,
    ep: opt.Ep = None,
    etp: opt.Etp = None,
    layer_split: opt.Split = None,
    first_layers: opt.FirstLayers = None,
    last_layers: opt.LastLayers = None,
    account_for_embedding: opt.AccountEmbedding = False,
    account_for_loss: opt.AccountLoss = False,
    layout_string: opt.LayoutString = None,
    split_rank: opt.SplitRank = None,
    encoder_pp: opt.EncoderPp = None,
    ckpt_format: opt.CkptFormat = None,
    transformer_impl: opt.TransformerImpl = None,
    grouped_experts: opt.Grouped = False,
    config: opt.Config = None,
    dtype: opt.Dtype = None,
    optimizer: opt.Optimizer = None,
    distributed_optimizer: opt.DistributedOptimizer = None,
    bf16: opt.Bf16 = False,
    fp16: opt.Fp16 = False,
    vocab_divisor: opt.VocabDivisor = None,
    vocab_padding: opt.VocabPadding = None,
    true_vocab_size: opt.TrueVocab = None,
    checkpoint_type: opt.CheckpointType = None,
    max_shard_size: opt.MaxShardSize = None,
    quantize: opt.Quantize = None,
    dist_files: opt.DistFiles = None,
    base: opt.Base = None,
    text_only: opt.TextOnly = False,
    adapter: opt.Adapter = None,
    push: opt.Push = None,
    release: opt.Release = False,
    allow_lossy: opt.AllowLossy = None,
    option: opt.Option = None,
    max_memory: opt.MaxMemory = "256MiB",
    workers: opt.Workers = 0,
    verify: opt.Verify = False,
    dry_run: opt.DryRun = False,
    resume: opt.Resume = False,
    overwrite: opt.Overwrite = False,
    check_source: opt.CheckSource = True,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
    model_type: opt.ModelType = None,
    ignored: opt.Ignored = None,
    ignored_flags: opt.IgnoredFlag = False,
) -> None:
    """Convert a checkpoint into another format, naming scheme or parallel layout.

    The output appears at --save-dir complete or not at all. Sizes that are left out stay as the source has them.
    """
    opt.check_model_type(model_type)
    load_dir = opt.one_place(source, load_dir, "input", "--load-dir")
    save_dir = opt.one_place(target, save_dir, "output", "--save-dir")
    from megaconv.engine.preparation import ConvertOptions
    from megaconv.engine.ranks import started_ranks
    from megaconv.errors import UsageError
    from megaconv.model.layout import LayerSplit
    from megaconv.options import LoadOptions, adapter_choice, byte_size, checkpoint_types, numbers, save_options
    from megaconv.registry import SAVERS

    if not saver:
        raise UsageError(f"--saver is missing, which says what to write; choose one of {', '.join(SAVERS)}")
    read_type, written_type = checkpoint_types(checkpoint_type, saver)
    pp, split_rank = opt.all_stages(pp, split_rank, encoder_pp)
    split = LayerSplit(
        numbers(layer_split),
        first_layers,
        last_layers,
        account_for_embedding,
        account_for_loss,
        layout_string,
        split_rank,
    )
    save = save_options(
        tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, split=split, transformer_impl=transformer_impl,
        grouped_experts=grouped_experts, vocab_divisor=vocab_divisor,
        vocab_padding=vocab_padding, distributed_optimizer=distributed_optimizer, release=release,
        max_shard_bytes=None if max_shard_size is None else byte_size(max_shard_size, "--max-shard-size "),
        ckpt_format=ckpt_format, files=dist_files,
        allow_lossy=tuple(allow_lossy or ()), checkpoint_type=written_type, base=base, quantize=quantize,
    )  # fmt: skip
    options = ConvertOptions(
        loader=loader or ("llama_mistral" if read_type else None), save=save,
        load=LoadOptions(config, true_vocab_size, read_type, text_only=text_only),
        dtype=opt.one_dtype(dtype, bf16, fp16), optimizer=optimizer,
        max_memory=byte_size(max_memory, "--max-memory "), workers=workers, verify=verify, resume=resume, overwrite=overwrite,
        extra=opt.extra(option), check_source=check_source, adapters=tuple(map(adapter_choice, adapter or ())),
    )  # fmt: skip
    ranks = started_ranks()
    if push is not None and not dry_run and ranks.rank == 0:
        from megaconv.commands.push import require_repository, require_token

        require_repository(push)
        require_token(push)  # rather now than after hours
    if not dry_run:
        _convert(load_dir, save_dir, saver, options, ranks, as_json, push, quiet)
    elif ranks.rank == 0:
        _dry_run(load_dir, save_dir, saver, options, as_json)


GO_ON = "the same command goes on from here (--resume)"
NOTHING_LEFT = (
    "nothing was left behind; a run with --resume keeps what is done, and the same command goes on from there"
)


def _push(save_dir: str, repository: str) -> Any:
    from megaconv.commands.process import heed_signals
    from megaconv.commands.push import PushOptions
    from megaconv.commands.push import push as run

    heed_signals()
    return run(save_dir, repository, PushOptions(as_is=True))


def _complete(error: BaseException) -> str:
    """What an interruption that came too late says of the output."""
    return str(error) if isinstance(error, Interrupted) else ""


def _convert(
    load_dir: str, save_dir: str, saver: str, options: Any, ranks: Any, as_json: bool, push: str | None, quiet: bool
) -> None:
    from megaconv.commands.progress import Progress
    from megaconv.engine.conversion import convert as run
    from megaconv.engine.preparation import open_input

    metadata_only = replace(options, load=replace(options.load, metadata_only=True))
    try:
        with Progress(
            "converting",
            lambda: open_input(load_dir, saver, metadata_only)[0].header.nbytes,
            shown=ranks.rank == 0 and not quiet,
        ) as progress:
            planned = _say_notices if not as_json and not ranks.rank else _say_nothing
            report = run(load_dir, save_dir, saver, options, progress.advance, ranks, planned)
    except (Interrupted, RuntimeError) as error:
        if not is_interruption(error):
            raise
        raise Interrupted(_complete(error) or (GO_ON if options.resume else NOTHING_LEFT)) from None
    if ranks.rank:
        return
    ignore_signals()
    if as_json:
        print_json(report.to_json() | ({"push": _push(save_dir, push).to_json()} if push is not None else {}))
        return
    if not quiet:
        _print_summary(save_dir, report)
    if push is not None:
        print_push(_push(save_dir, push), as_json=False)


def _print_summary(save_dir: str, report: Any) -> None:
    from megaconv.commands.inspection import readable

    speed = readable(int(report.header.nbytes / max(report.seconds, 1e-9)))
    written = f"{readable(report.nbytes)} in {len(report.files)} files"
    show(f"{save_dir}: {report.parameters:,} parameters, {written}, {report.seconds:.2f} s ({speed}/s)")
    _print_from_base(report)
    if (off := report.rounding) is not None:
        show(f"quantized   {off.count:,} weights are off by at most {off.largest:.3g}, {off.rms:.3g} rms")
    verified = " (verified)" if report.verified else ""
    show(f"fingerprint {report.fingerprint.weights}{verified}")
    if report.fingerprint.optimizer is not None:
        show(f"optimizer   {report.fingerprint.optimizer}{verified}")


def _say_notices(report: Any) -> None:
    for notice in report.notices:
        say(notice)


def _say_nothing(report: Any) -> None:
    pass


def _print_from_base(report: Any) -> None:
    for name in report.plan.from_base:
        show(f"from the original: {name}")


def _dry_run(load_dir: str, save_dir: str, saver: str, options: Any, as_json: bool) -> None:
    from megaconv.commands.inspection import readable
    from megaconv.engine.conversion import rehearse

    report = rehearse(load_dir, save_dir, saver, options)
    if as_json:
        print_json(report.to_json())
        return
    _print_from_base(report)
    for name, size in report.files.items():
        show(f"{size:>18,}  {Path(save_dir) / name}")
    _say_notices(report)
    show(
        f"{report.nbytes:>18,}  bytes in {len(report.files)} files; buffers will take {readable(report.memory)} of memory at most"
    )
