"""`megaconv scan`."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.local_paths import local_path
from megaconv.terminal import show

_VERDICTS = {0: "nothing that runs code, no faults", 3: "no code was found; faults", 6: "unsafe"}
"""The verdict by exit status."""


@command(epilog="Example: megaconv scan Llama-2-7b && echo nothing in there runs code")
def scan(
    path: Annotated[str, typer.Argument(help="A directory, a file, or a Hub id.", metavar="PATH")],
    sarif: Annotated[
        Path | None,
        typer.Option(
            "--sarif",
            parser=local_path,
            metavar="FILE",
            help="Write the findings to a file in SARIF 2.1.0.",
        ),
    ] = None,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """List what would run code, and files whose structure is damaged, without loading anything.

    Every class and function that a pickle names is judged: `ordinary`, `named` (not known, and not called) or `unsafe`.
    Pickles, headers, indices and configurations are read. Values of tensors are not: `megaconv verify` compares those.
    Exit status 0: nothing found; 3: faults; 6: something would run code in a program that trusts it.
    """
    from megaconv.commands.scanning import scan as run

    if sarif is not None:
        from megaconv.commands.sarif import require_findings

        require_findings("--sarif", sarif)
    found = run(path)
    if sarif is not None:
        from formats.whole_file import write_whole
        from megaconv.commands.sarif import sarif_json

        write_whole(sarif, sarif_json(found))
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)
    raise typer.Exit(found.status)


def _print(found: Any) -> None:
    for kind, findings in (
        ("unsafe", found.code),
        ("fault", found.faults),
        ("remark", found.remarks),
    ):
        for each in findings:
            show(f"{kind:<8} {each.file}: {each.what}")
    _print_globals(found.globals)
    files = f"{found.files} file{'s' * (found.files != 1)}"
    show(f"{found.path}: {files}: {_VERDICTS[found.status]}")


def _print_globals(found: Iterable[Any]) -> None:
    """A line for each function or class that pickles name: ordinary ones once for all files, others by file."""
    ordinary = Counter[str]()
    others = Counter[tuple[str, str, str]]()
    for each in found:
        if each.judgement == "ordinary":
            ordinary[each.name] += 1
        else:
            others[each.judgement, each.file, each.name] += 1
    for (judgement, file, name), count in sorted(others.items()):
        _print_global(judgement, file, name, count)
    for name, count in sorted(ordinary.items()):
        show(f"ordinary {name} ({count})")


def _print_global(judgement: str, file: str, name: str, count: int) -> None:
    verb = "calls" if judgement == "unsafe" else "names"
    times = f", {count} times" if count > 1 else ""
    show(f"{judgement:<8} {file}: {verb} {name}{times}")
