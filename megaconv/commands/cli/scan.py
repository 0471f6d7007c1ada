"""`megaconv scan`."""

from collections import Counter
from typing import Annotated, Any

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app, print_json
from megaconv.terminal import show


@app.command(epilog="Example: megaconv scan Llama-2-7b && echo nothing in there runs code")
def scan(
    path: Annotated[str, typer.Argument(help="A directory, a file, or a Hub id.", metavar="PATH")],
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """List what would run code, and files whose structure is damaged, without loading anything.

    Every class and function that a pickle names is judged: `ordinary`, `named` (not known, and not called) or `unsafe`.
    Pickles, headers, indices and configurations are read, the values of tensors are not: `megaconv verify` compares those.
    Exit status 0: neither; 3: faults; 6: something would run code in a program that trusts it.
    """
    from megaconv.commands.scanning import scan as run

    found = run(path)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)
    raise typer.Exit(found.status)


def _print(found: Any) -> None:
    for kind, findings in (("unsafe", found.code), ("fault", found.faults), ("remark", found.remarks)):
        for each in findings:
            show(f"{kind:<8} {each.file}: {each.what}")
    counts = Counter((each.judgement, each.file, each.name) for each in found.globals)
    for (judgement, file, name), count in sorted(counts.items()):
        if judgement != "ordinary":
            times = f", {count} times" if count > 1 else ""
            show(f"{judgement:<8} {file}: {'calls' if judgement == 'unsafe' else 'names'} {name}{times}")
    names = Counter(each.name for each in found.globals if each.judgement == "ordinary")
    for name, count in sorted(names.items()):
        show(f"ordinary {name} ({count})")
    verdict = {0: "nothing that runs code, no faults", 3: "no code was found; faults", 6: "unsafe"}[found.status]
    show(f"{found.path}: {found.files} file{'s' * (found.files != 1)}: {verdict}")
