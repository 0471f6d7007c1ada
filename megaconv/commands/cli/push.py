"""`megaconv push`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app, print_json
from megaconv.commands.endings import say
from megaconv.terminal import show

if TYPE_CHECKING:
    from megaconv.commands.push import PushReport

Directory = Annotated[
    Path,
    typer.Argument(help="A finished checkpoint; what is no Hugging Face directory is converted first.", metavar="DIR"),
]
Repository = Annotated[
    str, typer.Argument(help="The repository on the Hugging Face Hub; created if it isn't there.", metavar="ORG/NAME")
]
AsIs = Annotated[bool, typer.Option("--as-is", help="Push Megatron's own files instead of converting them to hf.")]
Revision = Annotated[str | None, typer.Option("--revision", help="A branch to push to; created if it isn't there.")]
Private = Annotated[bool, typer.Option("--private", help="Make a repository that is created a private one.")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of changing the branch.")]
Message = Annotated[str | None, typer.Option("--message", help="The commit's first line.")]
Card = Annotated[
    bool, typer.Option("--card/--no-card", help="Write a model card (README.md) where neither side has one.")
]
PushDryRun = Annotated[bool, typer.Option("--dry-run", help="List what would be pushed, with its hashes; ask nobody.")]
Include = Annotated[
    list[str] | None, typer.Option("--include", metavar="PATTERN", help="Push only these paths; may be repeated.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Don't push these paths; may be repeated.")
]


@app.command(epilog="Example: megaconv push Llama-2-7b-tuned my-org/Llama-2-7b-tuned --private")
def push(
    directory: Directory,
    repository: Repository,
    as_is: AsIs = False,
    config: opt.Config = None,
    revision: Revision = None,
    private: Private = False,
    create_pr: CreatePr = False,
    message: Message = None,
    card: Card = True,
    include: Include = None,
    exclude: Exclude = None,
    dry_run: PushDryRun = False,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Put a model on the Hugging Face Hub in one commit, and compare what arrived with what was sent (exit status 4 if it differs).

    Who is pushing the Hub knows by a token: `hf auth login`, or HF_TOKEN.
    """
    from megaconv.commands.push import PushOptions
    from megaconv.commands.push import push as run

    options = PushOptions(
        revision, private, create_pr, message, card, as_is, config, tuple(include or ()), tuple(exclude or ())
    )
    print_push(run(directory, repository, options, dry_run=dry_run), as_json)


def print_push(report: "PushReport", as_json: bool) -> None:
    from megaconv.commands.inspection import readable

    if as_json:
        print_json(report.to_json())
        return
    size = f"{readable(report.nbytes)} in {len(report.files)} files"
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
