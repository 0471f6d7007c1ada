"""`megaconv serve-hf`."""

import errno
import sys
from contextlib import suppress
from typing import Annotated

import typer

from megaconv.commands.cli.parameters import command
from megaconv.options import ConvertOptions
from megaconv.terminal import show

EXAMPLES = """\b
Examples:
  megaconv serve-hf ckpt --name org/run
  HF_ENDPOINT=http://127.0.0.1:8700 vllm serve org/run"""


@command(name="serve-hf", epilog=EXAMPLES)
def serve_hf(
    *,
    paths: Annotated[
        list[str], typer.Argument(help="Checkpoints of any format.", metavar="PATH...")
    ],
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="OWNER/MODEL",
            help="The name of each checkpoint, in the same order (default: local/DIRECTORY).",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 takes any free port.")
    ] = 8700,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="The address to listen at; other machines can reach 0.0.0.0.",
        ),
    ] = "127.0.0.1",
    options: ConvertOptions,
) -> None:
    """Serve checkpoints as Hugging Face repositories, without a conversion. Computes files when clients read them.

    With HF_ENDPOINT set to the printed address, clients of the Hub load the models: transformers, vLLM, huggingface_hub.
    """
    from megaconv.errors import Interrupted, UsageError
    from megaconv.serving.repository import open_repositories
    from megaconv.serving.server import Server

    repositories = open_repositories(paths, names or [], options)
    try:
        server = Server((host, port), repositories, options.max_memory)
    except OSError as error:
        # Any other error is one of the host: it is unknown, or another machine's address.
        is_of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = f"choose another {'port' if is_of_port else 'host'}"
        raise UsageError(
            f"--host {host} --port {port}: {error.strerror or error}; {advice}"
        ) from error
    with server, suppress(Interrupted):
        show(f"serving {', '.join(repositories)} at {server.url}")
        sys.stdout.flush()  # a script that waits for the address reads a file or a pipe
        server.serve_forever()
