"""The command line. Work is imported inside each command, so that --help answers at once."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from megaconv.commands import command_options as opt
from megaconv.commands.endings import say
from megaconv.commands.process import ignore_signals
from megaconv.commands.process import run as run_process
from megaconv.errors import Interrupted, is_interruption
from megaconv.terminal import show

app = typer.Typer(
    name="megaconv",
    help="Convert LLM checkpoints between Hugging Face and Megatron at any parallel layout: streaming, bit-exact, without a GPU.",
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Hugging Face directory with what the source can't say: config.json, tokenizer."),
]
TrueVocab = Annotated[
    int | None,
    typer.Option("--true-vocab-size", help="Vocabulary size without padding, where the source doesn't give it."),
]


def _version(value: bool) -> None:
    if value:
        from megaconv._version import __version__

        typer.echo(f"megaconv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=opt.CONVERT_EXAMPLES)
def convert(
    load_dir: opt.LoadDir,
    save_dir: opt.SaveDir,
    saver: opt.Saver,
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
    ckpt_format: opt.CkptFormat = "torch",
    transformer_impl: opt.TransformerImpl = "transformer_engine",
    grouped_experts: opt.Grouped = False,
    config: Config = None,
    dtype: opt.Dtype = None,
    optimizer: opt.Optimizer = None,
    distributed_optimizer: opt.DistributedOptimizer = None,
    bf16: opt.Bf16 = False,
    fp16: opt.Fp16 = False,
    vocab_divisor: opt.VocabDivisor = None,
    vocab_padding: opt.VocabPadding = "repeat",
    true_vocab_size: TrueVocab = None,
    checkpoint_type: opt.CheckpointType = None,
    max_shard_size: opt.MaxShardSize = "5GB",
    dist_files: opt.DistFiles = None,
    base: opt.Base = None,
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
    as_json: Json = False,
    model_type: opt.ModelType = None,
    ignored: opt.Ignored = None,
    ignored_flags: opt.IgnoredFlag = False,
) -> None:
    """Convert a checkpoint into another format, naming scheme or parallel layout.

    The output appears at --save-dir complete or not at all. Sizes that are left out stay as the source has them.
    """
    opt.check_model_type(model_type)
    from megaconv.engine.conversion import ConvertOptions
    from megaconv.engine.ranks import started_ranks
    from megaconv.model.layout import LayerSplit
    from megaconv.options import LoadOptions, SaveOptions, checkpoint_types

    read_type, written_type = checkpoint_types(checkpoint_type, saver)
    pp, split_rank = opt.all_stages(pp, split_rank, encoder_pp)
    split = LayerSplit(
        opt.numbers(layer_split),
        first_layers,
        last_layers,
        account_for_embedding,
        account_for_loss,
        layout_string,
        split_rank,
    )
    save = SaveOptions(
        tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, split=split, transformer_impl=transformer_impl,
        grouped_experts=grouped_experts, vocab_divisor=vocab_divisor,
        vocab_padding=vocab_padding, distributed_optimizer=distributed_optimizer, release=release,
        max_shard_bytes=opt.byte_size(max_shard_size), ckpt_format=ckpt_format, files=dist_files,
        allow_lossy=tuple(allow_lossy or ()), checkpoint_type=written_type, base=base,
    )  # fmt: skip
    options = ConvertOptions(
        loader=loader or ("llama_mistral" if read_type else None), load=LoadOptions(config, true_vocab_size, read_type), save=save,
        dtype=opt.one_dtype(dtype, bf16, fp16), optimizer=optimizer,
        max_memory=opt.byte_size(max_memory), workers=workers, verify=verify, resume=resume, overwrite=overwrite,
        extra=opt.extra(option), check_source=check_source,
    )  # fmt: skip
    ranks = started_ranks()
    if not dry_run:
        _convert(load_dir, save_dir, saver, options, ranks, as_json)
    elif ranks.rank == 0:
        _dry_run(load_dir, save_dir, saver, options, as_json)


def _complete(error: BaseException) -> str:
    """What an interruption that came too late says of the output."""
    return str(error) if isinstance(error, Interrupted) else ""


def _convert(load_dir: str, save_dir: str, saver: str, options: Any, ranks: Any, as_json: bool) -> None:
    from megaconv.commands.inspection import readable
    from megaconv.commands.progress import Progress
    from megaconv.engine.conversion import convert as run
    from megaconv.engine.conversion import open_input

    metadata_only = replace(options, load=replace(options.load, metadata_only=True))
    try:
        with Progress(
            "converting",
            lambda: open_input(load_dir, saver, metadata_only)[0].header.nbytes,
            shown=ranks.rank == 0,
        ) as progress:
            report = run(load_dir, save_dir, saver, options, progress.advance, ranks)
    except (Interrupted, RuntimeError) as error:
        if not is_interruption(error):
            raise
        raise Interrupted(_complete(error) or ("give --resume again to go on" if options.resume else "")) from None
    if ranks.rank:
        return
    ignore_signals()
    if as_json:
        _print_json(report.to_json())
        return
    assert report.fingerprint is not None
    speed = readable(int(report.header.nbytes / max(report.seconds, 1e-9)))
    written = f"{readable(report.nbytes)} in {len(report.files)} files"
    show(f"{save_dir}: {report.header.parameters:,} parameters, {written}, {report.seconds:.2f} s ({speed}/s)")
    _print_from_base(report)
    for notice in report.notices:
        say(notice)
    verified = " (verified)" if report.verified else ""
    show(f"fingerprint {report.fingerprint.weights}{verified}")
    if report.fingerprint.optimizer is not None:
        show(f"optimizer   {report.fingerprint.optimizer}{verified}")


def _print_from_base(report: Any) -> None:
    for name in report.plan.from_base:
        show(f"from the original: {name}")


def _dry_run(load_dir: str, save_dir: str, saver: str, options: Any, as_json: bool) -> None:
    from megaconv.commands.inspection import readable
    from megaconv.engine.conversion import prepare

    _, report = prepare(load_dir, save_dir, saver, options)
    if as_json:
        _print_json(report.to_json())
        return
    _print_from_base(report)
    for name, size in report.files.items():
        show(f"{size:>18,}  {Path(save_dir) / name}")
    for notice in report.notices:
        say(notice)
    show(
        f"{report.nbytes:>18,}  bytes in {len(report.files)} files; buffers will take {readable(report.memory)} of memory at most"
    )


@app.command(epilog="Example: megaconv inspect ckpt --json | jq .layout")
def inspect(
    path: opt.Input,
    loader: opt.Loader = None,
    config: Config = None,
    true_vocab_size: TrueVocab = None,
    option: opt.Option = None,
    check_source: opt.CheckSource = True,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint is: format, family, parameters, sizes, dtypes, layout. Reads metadata only.

    Exit status 3: names or shapes of its tensors are not what its megaconv.json says.
    """
    from megaconv.commands.inspection import inspect as run
    from megaconv.options import LoadOptions

    options = LoadOptions(config, true_vocab_size, optimizer=False, extra=opt.extra(option))
    found = run(path, options, loader, check_source=check_source)
    if as_json:
        _print_json(found.to_json())
    else:
        for label, text in found.lines():
            show(f"{label:<11} {text}")
    if found.differences:
        what = f"names or shapes of {len(found.differences)} tensors are not what its megaconv.json says"
        show(f"megaconv: error: {path}: {what}", sys.stderr)
        raise typer.Exit(3)


@app.command(epilog="Example: megaconv fingerprint Llama-2-7b")
def fingerprint(
    path: opt.Input,
    loader: opt.Loader = None,
    config: Config = None,
    true_vocab_size: TrueVocab = None,
    option: opt.Option = None,
    optimizer: opt.ReadOptimizer = True,
    as_json: Json = False,
) -> None:
    """Hash a model: equal for the same weights in any format, naming scheme and layout. Reads everything.

    Optimizer state, where there is any, has a hash of its own.
    """
    from megaconv.commands.progress import Progress
    from megaconv.engine.conversion import fingerprint as run
    from megaconv.options import LoadOptions

    options = LoadOptions(config, true_vocab_size, optimizer=optimizer, extra=opt.extra(option))
    with Progress("reading", lambda: _size(path, loader, options)) as progress:
        found = run(path, options, advance=progress.advance, loader=loader)
    if as_json:
        _print_json(
            {
                "weights": found.weights,
                "optimizer": found.optimizer,
                "tensors": {str(key): digest for key, digest in found.tensors.items()},
            }
        )
    else:
        show(found.weights)
        if found.optimizer is not None:
            show(f"{found.optimizer} (optimizer)")


@app.command(epilog="Example: megaconv verify ckpt && echo as it was written")
def verify(
    path: opt.Input,
    loader: opt.Loader = None,
    config: Config = None,
    true_vocab_size: TrueVocab = None,
    option: opt.Option = None,
    as_json: Json = False,
) -> None:
    """Read a checkpoint back against the fingerprints in its megaconv.json. Exit status 0: as written; 4: it differs.

    Configuration, tokenizer and other small files are compared with the hashes there.
    """
    from megaconv.commands.progress import Progress
    from megaconv.commands.verification import verify as run
    from megaconv.options import LoadOptions

    options = LoadOptions(config, true_vocab_size, extra=opt.extra(option))
    with Progress("verifying", lambda: _size(path, loader, options)) as progress:
        found = run(path, options, advance=progress.advance, loader=loader)
    if as_json:
        _print_json(found.to_json())
    elif found.same:
        files = f" and {found.files} other files" if found.files else ""
        show(f"as written: {found.tensors} tensors{files}, fingerprint {found.found}")
    else:
        show(f"different: fingerprint {found.found}, written was {found.recorded}")
        for name, kind in found.differences.items():
            show(f"  {name}  {kind}")
    if not found.same:
        raise typer.Exit(4)


@app.command(epilog="Example: megaconv diff Llama-2-7b ckpt && echo the same model")
def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Another, in any format and layout.", metavar="B")],
    config_too: Annotated[
        bool, typer.Option("--config-too", help="Let differences in the configurations count as well.")
    ] = False,
    loader: opt.Loader = None,
    loader_a: opt.LoaderA = None,
    loader_b: opt.LoaderB = None,
    option: opt.Option = None,
    optimizer: opt.ReadOptimizer = True,
    check_source: opt.CheckSource = True,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor. Exit status 0: the same; 4: they differ.

    Optimizer state is compared where both have it.
    """
    from megaconv.commands.comparison import diff_sources, open_both, source_checks
    from megaconv.commands.progress import Progress
    from megaconv.engine.plan import default_workers
    from megaconv.options import LoadOptions

    load = LoadOptions(optimizer=optimizer, extra=opt.extra(option))
    left, right = open_both(a, b, load, (loader_a or loader, loader_b or loader))
    checks = source_checks(a, left, b, right) if check_source else None
    with Progress("comparing", lambda: left.header.nbytes) as progress:
        found = diff_sources(left, right, default_workers(writing=False), progress.advance, checks)
    if as_json:
        _print_json(found.to_json())
    else:
        _print_diff(found)
    if not found.same or (config_too and found.config):
        raise typer.Exit(4)


def _print_diff(found: Any) -> None:
    if found.same:
        slots = f" ({', '.join(found.slots)})" if len(found.slots) > 1 else ""
        show(f"the same: {found.tensors} tensors are equal{slots}")
    else:
        show(f"different: {len(found.differences)} of {found.tensors} tensors")
        width = max(len(str(item.key)) for item in found.differences)
        for item in found.differences:
            largest = f", largest difference {item.max_abs:.3g}" if item.max_abs is not None else ""
            show(f"  {item.key!s:<{width}}  {item.kind:<9}  {item.detail}{largest}")
    for name, left, right in found.config:
        show(f"  configuration: {name} is {left!r} in A, {right!r} in B")


@app.command(epilog="Example: megaconv formats --json | jq .matrix.llama")
def formats(as_json: Json = False) -> None:
    """List the loaders and savers that are known, and which model family can be read and written in which naming."""
    from megaconv.commands.catalogue import catalogue

    found = catalogue()
    if as_json:
        _print_json(found.to_json())
        return
    for line in found.lines():
        show(line)


@app.command()
def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep what is made; a temporary directory otherwise.")
    ] = None,
) -> None:
    """Build a small Llama, convert it to Megatron and back, and prove that it is still the same model."""
    from megaconv.commands.demo import run

    run(directory)


def _size(place: str, loader: str | None, options: Any) -> int:
    from megaconv.engine.conversion import open_source

    return open_source(place, loader, replace(options, metadata_only=True))[1].header.nbytes


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=1))


def main() -> None:
    """The entry point."""
    run_process(lambda: app(standalone_mode=False))
