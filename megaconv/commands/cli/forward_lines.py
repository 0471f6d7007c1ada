"""The lines of `megaconv verify --forward`."""

from math import isfinite

import typer

from formats.wording import counted
from megaconv.commands.cli.app import print_json
from megaconv.commands.forward_pass import (
    ForwardPass,
    ForwardRequest,
    StateDifference,
    forward_pass,
)
from megaconv.errors import UsageError
from megaconv.terminal import show

_WIDTH = 20


def run_forward(request: ForwardRequest, *, as_json: bool) -> None:
    """Compute and print. Ends with status 4 if two models differ."""
    if not isfinite(request.tolerance):
        raise UsageError(
            f"--tolerance {request.tolerance}: is not a number; write one such as 1e-4"
        )
    found = forward_pass(request, _ignore if as_json else _print_state)
    if as_json:
        print_json(found.to_json())
    else:
        _print_result(found)
    if not found.same:
        raise typer.Exit(4)


def _ignore(_state: StateDifference) -> None:
    """Print nothing: one JSON document holds all states."""


def _print_state(state: StateDifference) -> None:
    show(
        f"{state.name:<{_WIDTH}} {state.relative:<9.2g} (largest difference {state.absolute:.3g} of {state.largest:.3g})"
    )


def _print_result(found: ForwardPass) -> None:
    perplexities = [each for each in found.perplexities if each is not None]
    if perplexities:
        shown = ", ".join(f"{each:.6g}" for each in perplexities)
        show(f"{'perplexity':<{_WIDTH}} {shown} ({found.predicted} predicted tokens)")
    request = found.request
    if len(request.places) == 1:
        return
    if found.has_common_tokens:
        a, b = found.vocabularies
        show(
            f"{'common tokens':<{_WIDTH}} {min(a, b):,}: A has {a:,}, B has {b:,}; further logits are not compared"
        )
    first = found.first
    if first is None:
        show(
            f"the same: {counted(found.tokens, 'token')}, no difference beyond {request.tolerance:g}"
        )
    else:
        show(
            f"different: from {first.name} on, by {first.relative:.2g}; the tolerance is {request.tolerance:g}"
        )
