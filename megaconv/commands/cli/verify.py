"""`megaconv verify`, and `verify --forward`, which computes with the models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from formats.wording import counted, listing
from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.commands.endings import say
from megaconv.local_paths import local_path
from megaconv.options import LoadOptions, SealOptions
from megaconv.terminal import show

if TYPE_CHECKING:
    from megaconv.commands.verification import Verification
    from megaconv.signatures.checking import Signed

EXAMPLES = """\b
Examples:
  megaconv verify ckpt && echo as it was written
  megaconv verify Llama-2-7b ckpt --forward && echo both compute the same"""


@command(epilog=EXAMPLES)
def verify(
    *,
    path: opt.Input,
    other: Annotated[
        str | None,
        typer.Argument(metavar="[B]", help="With --forward: another, in any format and layout."),
    ] = None,
    forward: Annotated[
        bool,
        typer.Option(
            "--forward",
            help="Compute the model, or both, layer by layer, and compare hidden states and logits. Needs torch.",
        ),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            parser=local_path,
            metavar="FILE",
            help="With --forward: the text to compute; built-in tokens by default.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0,
            help="With --forward: states that differ by no more than this part of their largest value are equal (1e-4).",
        ),
    ] = None,
    common_tokens: Annotated[
        bool,
        typer.Option(
            "--common-tokens",
            help="With --forward: A and B may have different vocabularies; compare the logits of the tokens that both have.",
        ),
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            min=2,
            metavar="N",
            help="With --forward: tokens that attend to each other (512 of a text, 32 built-in ones).",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="With --forward: fp32, bf16 or fp16, to compute in (fp32)."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="SIZE",
            help="With --forward: memory for weights and activations (4GiB).",
        ),
    ] = None,
    loader: str | None,
    loader_a: opt.LoaderA = None,
    loader_b: opt.LoaderB = None,
    load: LoadOptions,
    seal: SealOptions,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """Compare a checkpoint with the fingerprints in its megaconv.json. Exit status 0: as written; 4: it differs.

    Configuration, tokenizer and other small files are compared with the hashes there. With --public-key or --identity, a
    signature is required first: every file must be as it was signed. With --forward, the command computes with the weights
    in place of that: it compares what two checkpoints compute, or prints a perplexity.
    """
    asked = {
        "B": other, "--text": text, "--tolerance": tolerance, "--window": window, "--dtype": dtype,
        "--max-memory": max_memory, "--loader-a": loader_a, "--loader-b": loader_b, "--common-tokens": common_tokens or None,
    }  # fmt: skip
    if forward:
        from megaconv.commands.cli.forward_lines import run_forward
        from megaconv.commands.forward_pass import MAX_MEMORY, TOLERANCE, ForwardRequest
        from megaconv.errors import UsageError
        from megaconv.options.values import byte_size

        if seal != SealOptions():
            raise UsageError(
                "--forward checks no signature; run `megaconv verify` with the options of the signature first"
            )
        of_two = {
            "--tolerance": tolerance,
            "--loader-b": loader_b,
            "--common-tokens": common_tokens or None,
        }
        given = [name for name, value in of_two.items() if value is not None]
        if other is None and given:
            raise UsageError(f"{given[0]} is for two checkpoints; give B too, or leave it out")
        request = ForwardRequest(
            places=(path,) if other is None else (path, other),
            loaders=(loader_a or loader, loader_b or loader)[: 1 if other is None else 2],
            load=load,
            text=text,
            window=window,
            dtype=dtype or "fp32",
            max_memory=byte_size(max_memory or MAX_MEMORY, "--max-memory "),
            tolerance=TOLERANCE if tolerance is None else tolerance,
            common_tokens=common_tokens,
        )
        run_forward(request, as_json=as_json)
        return
    _require_forward(asked)
    from megaconv.commands.progress import Progress
    from megaconv.commands.verification import verify as run

    with Progress("verifying", shown=not quiet) as progress:
        found = run(
            path, load, advance=progress.advance, loader=loader, expect=progress.expect, seal=seal
        )
    if found.has_unchecked_signature:
        say("the signature in model.sig was not checked; pass --public-key or --identity")
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    if not found.same:
        raise typer.Exit(4)


def _show(found: "Verification") -> None:
    if found.signed is not None:
        _show_signature(found.signed)
    if not found.is_recorded:
        show("no megaconv.json: the tensors have no fingerprints to compare with")
    elif found.same:
        files = f" and {counted(found.files, 'other file')}" if found.files else ""
        show(f"as written: {counted(found.tensors, 'tensor')}{files}, fingerprint {found.found}")
    else:
        if found.found == found.recorded:
            show(f"different, though the weights are as written, fingerprint {found.found}")
        else:
            show(f"different: fingerprint {found.found}, written was {found.recorded}")
        for name, kind in found.differences.items():
            show(f"  {name}  {kind}")


def _require_forward(asked: dict[str, Any]) -> None:
    """Raises UsageError for parameters that only a forward pass has."""
    from megaconv.errors import UsageError

    given = [name for name, value in asked.items() if value is not None]
    if given:
        raise UsageError(
            f"{given[0]} is for verify --forward; `megaconv diff A B` compares two checkpoints tensor by tensor"
        )


def _show_signature(signed: "Signed") -> None:
    show(f"as signed: {counted(signed.resources, 'file')}, digest {signed.root}")
    if signed.left_out:
        say(f"the signature doesn't cover {listing(signed.left_out)}")
