"""`megaconv push`."""

from typing import TYPE_CHECKING, Annotated

import typer

from formats.wording import counted
from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.commands.endings import say
from megaconv.options import PushOptions
from megaconv.terminal import show

if TYPE_CHECKING:
    from megaconv.commands.hub_commit import PushReport

Directory = Annotated[
    str,
    typer.Argument(
        help="A finished checkpoint, or the URI of one in a store; if it is not a Hugging Face directory, it is converted first.",
        metavar="DIR",
    ),
]
Repository = Annotated[
    str,
    typer.Argument(
        help="The repository on the Hugging Face Hub; created if it isn't there.",
        metavar="ORG/NAME",
    ),
]
PushDryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="List the files to push, with their hashes, without any network access."
    ),
]


@command(epilog="Example: megaconv push Llama-2-7b-tuned my-org/Llama-2-7b-tuned --private")
def push(
    *,
    directory: Directory,
    repository: Repository,
    options: PushOptions,
    dry_run: PushDryRun = False,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Put a model on the Hugging Face Hub in one commit, and compare what arrived with what was sent.

    Log in first with `hf auth login`, or set HF_TOKEN. Exit status 4: the Hub has other content than was sent.
    """
    from megaconv.commands.push import push as run

    print_push(run(directory, repository, options, dry_run=dry_run), as_json)


def print_push(report: "PushReport", as_json: bool) -> None:
    from megaconv.commands.units import readable

    if as_json:
        print_json(report.to_json())
        return
    size = f"{readable(report.nbytes)} in {counted(len(report.files), 'file')}"
    if report.commit is None:
        for name, file in report.files.items():
            show(f"{file.size:>18,}  {file.sha256}  {name}")
        show(f"{size} would be pushed to {report.repository}")
    elif report.changed:
        show(f"{report.repository}: {size}, as they are here; commit {report.commit}")
        show(report.pull_request or report.url or "")
    else:
        show(f"{report.repository}: nothing to do; {size} are there as they are here")
    for notice in report.notices:
        say(notice)
