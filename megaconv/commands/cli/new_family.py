"""`megaconv new-family`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from formats.wording import counted
from megaconv.commands.cli.parameters import command
from megaconv.local_paths import local_path, require_place
from megaconv.terminal import show


@command(
    name="new-family",
    epilog="Example: megaconv new-family config.json --save megaconv/families/my_model.py",
)
def new_family(
    config: Annotated[
        str,
        typer.Argument(
            help="A config.json, a directory with one, or a Hub id such as hf://org/name@revision.",
            metavar="CONFIG",
        ),
    ],
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            parser=local_path,
            metavar="FILE",
            help="Write the draft to a new file instead of printing it.",
        ),
    ] = None,
) -> None:
    """Draft the file of a model family, from a config.json and from transformers' class for it.

    The draft is a difference from the existing family that is nearest by tensor names, keys and computation. Each line
    with DECIDE is a question that names and keys don't answer. docs/add-a-model.md describes the next steps.
    """
    from megaconv.commands import drafting
    from megaconv.hub import resolve

    if save is not None:
        require_place("--save", save)
    found = drafting.new_family(Path(resolve(config)))
    if save is None:
        print(found.text, end="")
    else:
        drafting.save(found, save)
    if found.existing:
        show(
            f"megaconv: the family {' and '.join(found.existing)} has this architecture already; the draft was made without it",
            sys.stderr,
        )
    open_questions = f"{counted(len(found.questions), 'question')} to decide"
    show(f"megaconv: nearest family: {found.base}; {open_questions}", sys.stderr)
