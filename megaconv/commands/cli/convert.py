"""`megaconv convert`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from formats.wording import are, counted, listing
from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import GroupedCommand, print_json
from megaconv.commands.cli.parameters import command
from megaconv.commands.cli.push import print_push
from megaconv.commands.endings import how_to_continue, say
from megaconv.commands.process import ignore_signals
from megaconv.options import ConvertOptions
from megaconv.terminal import show


@dataclass(frozen=True)
class Request:
    """A conversion as the command line asks for it."""

    load_dir: str
    save_dir: str
    saver: str
    options: ConvertOptions
    push: str | None = None
    """The repository on the Hub that gets the output; None: none."""
    model_type: str | None = None
    """The type that the model must have; None: any."""
    dry_run: bool = False
    quiet: bool = False
    as_json: bool = False


@command(epilog=opt.CONVERT_EXAMPLES, cls=GroupedCommand)
def convert(
    *,
    source: opt.Source = None,
    target: opt.Target = None,
    load_dir: opt.LoadDir = None,
    save_dir: opt.OptionalSaveDir = None,
    saver: opt.Saver = "",
    dry_run: opt.DryRun = False,
    options: ConvertOptions,
    encoder_pp: opt.EncoderPp = None,
    push: opt.Push = None,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
    bf16: opt.Bf16 = False,
    fp16: opt.Fp16 = False,
    model_type: opt.ModelType = None,
    ignored: opt.Ignored = None,
    ignored_flags: opt.IgnoredFlag = False,
) -> None:
    """Convert a checkpoint into another format, naming scheme or parallel layout.

    The output appears at --save-dir complete or not at all. A size that is left out stays as in the source.
    """
    opt.check_known_type(model_type)
    load_dir = opt.one_place(source, load_dir, "input", "--load-dir")
    save_dir = opt.one_place(target, save_dir, "output", "--save-dir")
    options = opt.with_encoder_stages(options, encoder_pp)
    options = replace(options, dtype=opt.one_dtype(options.dtype, bf16, fp16))
    request = Request(
        load_dir,
        save_dir,
        saver,
        options.for_saver(saver),
        push,
        model_type,
        dry_run,
        quiet,
        as_json,
    )
    run(request if saver else _in_the_same_format(request))


def _in_the_same_format(request: Request) -> Request:
    """The request with the saver of the input's own format. Raises UsageError."""
    from megaconv.commands.same_format import in_the_same_format

    saver, save = in_the_same_format(request.load_dir, request.options)
    return replace(request, saver=saver, options=replace(request.options, save=save))


def run(request: Request) -> None:
    """Convert, or show what a conversion would write. Raises CheckpointError."""
    from megaconv.engine.ranks import started_ranks

    ranks = started_ranks()
    if not request.dry_run:
        if request.push is not None and ranks.rank == 0:
            _require_access(request.push)  # now rather than after hours of work
        _convert(request, ranks)
    elif ranks.rank == 0:
        _dry_run(request)


def _require_access(repository: str) -> None:
    from megaconv.commands.push import require_repository, require_token

    require_repository(repository)
    require_token(repository)


def _push(save_dir: str, repository: str) -> Any:
    from megaconv.commands.process import heed_signals
    from megaconv.commands.push import push as run
    from megaconv.options import PushOptions

    heed_signals()
    return run(save_dir, repository, PushOptions(as_is=True))


def _convert(request: Request, ranks: Any) -> None:
    report = _converted(request, ranks)
    if ranks.rank:
        return
    ignore_signals()
    if request.as_json:
        pushed = (
            {}
            if request.push is None
            else {"push": _push(request.save_dir, request.push).to_json()}
        )
        print_json(report.to_json() | pushed)
        return
    if not request.quiet:
        _print_summary(request.save_dir, report)
    if request.push is not None:
        print_push(_push(request.save_dir, request.push), as_json=False)


def _converted(request: Request, ranks: Any) -> Any:
    """The report of the conversion. Raises Interrupted with what a user can do, and CheckpointError."""
    from megaconv.commands.progress import Progress
    from megaconv.engine.conversion import convert as run

    progress = Progress("converting", shown=ranks.rank == 0 and not request.quiet)

    def planned(report: Any) -> None:
        opt.check_model_type(request.model_type, report.header.config)
        if not request.as_json and not ranks.rank:
            _say_notices(report)
        progress.expect(report.header.nbytes)

    options = request.options
    with how_to_continue(resume=options.resume), progress:
        return run(
            request.load_dir,
            request.save_dir,
            request.saver,
            options,
            progress.advance,
            ranks,
            planned,
        )


def _print_summary(save_dir: str, report: Any) -> None:
    show(f"{save_dir}: {', '.join(_amounts(report))}")
    _print_from_base(report)
    rounding = report.rounding
    if rounding is not None:
        errors = f"at most {rounding.largest:.3g}, {rounding.rms:.3g} rms"
        show(
            f"quantized   {counted(rounding.count, 'weight')} {are(rounding.count)} off by {errors}"
        )
    verified = " (verified)" if report.verified else ""
    fingerprint = report.fingerprint
    show(f"fingerprint {fingerprint.weights}{verified}")
    if fingerprint.optimizer is not None:
        show(f"optimizer   {fingerprint.optimizer}{verified}")


def _amounts(report: Any) -> Iterator[str]:
    """The number of parameters, the size of the output, and the time that it took."""
    from megaconv.commands.units import readable

    speed = readable(int(report.header.nbytes / max(report.seconds, 1e-9)))
    yield f"{report.parameters:,} parameters"
    yield f"{readable(report.nbytes)} in {counted(len(report.files), 'file')}"
    yield f"{report.seconds:.2f} s ({speed}/s)"


def _say_notices(report: Any) -> None:
    for notice in report.notices:
        say(notice)


def _print_from_base(report: Any) -> None:
    """One line about everything that --base gave. `--json` lists all names."""

    names = report.plan.from_base
    if not names:
        return
    files = [name for name in names if name in report.plan.files]
    tensors = counted(len(names) - len(files), "tensor")
    show(f"from the original: {tensors} and {counted(len(files), 'file')}: {listing(names)}")


def _dry_run(request: Request) -> None:
    from megaconv.commands.units import readable
    from megaconv.engine.conversion import rehearse

    report = rehearse(request.load_dir, request.save_dir, request.saver, request.options)
    opt.check_model_type(request.model_type, report.header.config)
    if request.as_json:
        print_json(report.to_json())
        return
    _print_from_base(report)
    for name, size in report.files.items():
        show(f"{size:>18,}  {opt.file_at(request.save_dir, name)}")
    _say_notices(report)
    memory = readable(report.memory)
    show(
        f"{report.nbytes:>18,}  bytes in {counted(len(report.files), 'file')}; "
        f"buffers will take {memory} of memory at most"
    )
    if report.waiting is not None:
        waiting = report.waiting
        place = "on the disk" if waiting.is_spooled else "in memory"
        amount = readable(waiting.spool_bytes or waiting.memory_bytes)
        show(f"{waiting.open_bytes:>18,}  bytes of parts wait at most; they take {amount} {place}")
