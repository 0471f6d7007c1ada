"""`megaconv plan`."""

from dataclasses import replace
from typing import Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import print_json
from megaconv.commands.cli.parameters import command
from megaconv.options import LoadOptions
from megaconv.terminal import show


@command(epilog="Example: megaconv plan Llama-2-70b --gpus 64 --gpu-memory 80GiB")
def plan(
    *,
    path: opt.Input,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, help="GPUs of the run; as few as hold the model once by default."
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, such as 80GiB."),
    ] = None,
    loader: str | None,
    load: LoadOptions,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """List the parallel layouts that a model can have, with the share of each rank and the memory for training.

    The memory is that of weights, gradients and optimizer state with Megatron's distributed optimizer, without
    activations. PATH may also be a config.json, or a directory with nothing but one.
    """
    from megaconv.commands.inspection import inspect
    from megaconv.commands.layouts import layouts
    from megaconv.options.values import byte_size

    header = inspect(path, replace(load, optimizer=False), loader, check_source=False).header
    found = layouts(
        header, gpus, None if gpu_memory is None else byte_size(gpu_memory, "--gpu-memory ")
    )
    if as_json:
        print_json(found.to_json())
        return
    for line in found.lines():
        show(line)
