"""`megaconv plan`."""

from typing import Annotated

import typer

from megaconv.commands.cli import options as opt
from megaconv.commands.cli.app import app, print_json
from megaconv.terminal import show


@app.command(epilog="Example: megaconv plan Llama-2-70b --gpus 64 --gpu-memory 80GiB")
def plan(
    path: opt.Input,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs of the run; as few as hold the model once by default.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, such as 80GiB.")
    ] = None,
    loader: opt.Loader = None,
    config: opt.Config = None,
    true_vocab_size: opt.TrueVocab = None,
    text_only: opt.TextOnly = False,
    option: opt.Option = None,
    quiet: opt.NoProgress = False,
    as_json: opt.Json = False,
) -> None:
    """List the parallel layouts that a model can have: what a rank holds of it, and the memory to train it.

    Memory is that of weights, gradients and optimizer state with Megatron's distributed optimizer, without activations.
    A config.json is enough: PATH may be one, or a directory with no more than that.
    """
    from megaconv.commands.inspection import inspect
    from megaconv.commands.layouts import layouts
    from megaconv.options import LoadOptions, byte_size

    options = LoadOptions(config, true_vocab_size, optimizer=False, text_only=text_only, extra=opt.extra(option))
    header = inspect(path, options, loader, check_source=False).header
    found = layouts(header, gpus, None if gpu_memory is None else byte_size(gpu_memory, "--gpu-memory "))
    if as_json:
        print_json(found.to_json())
        return
    for line in found.lines():
        show(line)
