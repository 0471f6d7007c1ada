"""`megatron-lite serve`: rank 0 answers HTTP requests, all ranks compute."""

import argparse
import os
import signal
import socket
import sys
from dataclasses import replace
from importlib.util import find_spec

from formats.errors import CheckpointError
from megaconv.errors import UsageError
from megaconv.extras import install
from megaconv.terminal import reason_of, show
from megatron_lite.inference.commands.serve import KEY
from megatron_lite.inference.gallery import Images, NoImages
from megatron_lite.inference.generation_config import GENERATION
from megatron_lite.inference.opening import Opened, run
from megatron_lite.inference.sampling import PLAIN, Sampling
from megatron_lite.inference.server.calls.table import BY_TEMPLATE
from megatron_lite.inference.server.model_card import stated_sampling
from megatron_lite.processes import launch
from megatron_lite.processes.failure import report


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise UsageError(f"serve needs the package {package}; {install('serve')}")
    if (
        given.max_waiting < 0
        or given.max_body_bytes < 1
        or given.request_timeout <= 0
        or given.shutdown_timeout < 0
    ):
        raise UsageError(
            "--max-waiting, --max-body-bytes, --request-timeout and --shutdown-timeout can't be negative"
        )
    if not 0 <= given.port < 1 << 16:
        raise UsageError(f"--port {given.port} should be a number from 0 to 65535")
    key = _key(given)
    # Take the port before the model is loaded, so that a port in use is reported at once.
    bound = _bound(given.host, given.port) if launch.rank() == 0 else None
    run(given, lambda opened: _serve(opened, given, key, bound), lasting=True)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, which does not listen yet. Raises UsageError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port} can't be opened: {error.strerror or error}"
        ) from error
    return made


def _key(given: argparse.Namespace) -> str | None:
    key: str | None
    if given.api_key_file:
        try:
            with open(given.api_key_file, encoding="utf-8-sig") as file:  # noqa: PTH123  # its first line alone
                key = file.readline().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{given.api_key_file}: can't be read: {reason_of(error)}") from error
    else:
        key = given.api_key if given.api_key is not None else os.environ.get(KEY)
    if key == "":
        raise UsageError("the key is empty; leave it out to serve everyone")
    return key


def _serve(
    opened: Opened, given: argparse.Namespace, key: str | None, bound: socket.socket | None
) -> None:
    """Serve on rank 0."""
    import uvicorn

    from megatron_lite.inference.server.access_log import AccessLog
    from megatron_lite.inference.server.app import Limits, Server
    from megatron_lite.inference.server.ending import announce_end
    from megatron_lite.inference.server.local_only import is_loopback
    from megatron_lite.inference.server.worker import Worker

    def failed(error: BaseException) -> None:
        launch.leave(report(error, "rank 0 (which serves)", opened.store))

    if given.sampling_defaults == "openai":
        opened = replace(opened, sampling=PLAIN)
    name = given.served_model_name or opened.name
    if name in opened.adapters:
        raise UsageError(
            f"{name} is the name of the model and of an adapter; give another one by --adapter NAME=DIR or --served-model-name"
        )
    opened = replace(opened, images=loaded(opened.images))
    worker = Worker(opened.model, given.max_waiting, failed)
    limits = Limits(given.max_body_bytes, given.request_timeout)
    assert bound is not None, "rank 0 has an address"
    host, port = bound.getsockname()[:2]
    local_name = given.host if is_loopback(host) else None
    reasoning = given.reasoning or (BY_TEMPLATE if given.separate_reasoning else None)
    server = Server(opened, worker, name, limits, key, reasoning, local_name, given.tool_calls)
    app = AccessLog(server.app()) if given.access_log else server.app()
    seconds = max(1, int(given.shutdown_timeout))
    config = uvicorn.Config(
        app, given.host, given.port, log_level="warning", lifespan="off",
        timeout_graceful_shutdown=seconds,
    )  # fmt: skip
    # Listen before printing the address, so that clients can connect at once.
    bound.listen(config.backlog)
    _announce(name, opened, host, port, is_open=key is None and local_name is None)
    _announce_sampling(opened.sampling)
    # uvicorn raises the signal that ended it again, after it has shut down.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    listener = uvicorn.Server(config)
    announce_end(listener, lambda: sum(worker.counts), seconds)
    listener.run(sockets=[bound])
    worker.stop()


def loaded(images: Images) -> Images:
    """Return the images with their encoder. It is loaded before the first request.

    transformers loads it with another default dtype, which holds for all threads.
    """
    try:
        images.load()
    except CheckpointError as error:
        show(f"no images are read: {error}", sys.stderr)
        return NoImages(str(error))
    return images


def _announce_sampling(sampling: Sampling) -> None:
    """Print the sampling of requests that state none, if it isn't OpenAI's."""
    stated = stated_sampling(sampling)
    if stated:
        shown = ", ".join(f"{name} {value:g}" for name, value in stated.items())
        print(f"sampling of {GENERATION} unless a request states its own: {shown}", flush=True)


def _announce(name: str, opened: Opened, host: str, port: int, *, is_open: bool) -> None:
    """Print the address. is_open: True if everyone who reaches the address can use it."""
    shown = f"[{host}]" if ":" in host else host
    print(
        f"serving {name} at http://{shown}:{port}, {opened.model.slots} slots of {opened.model.length} tokens",
        flush=True,
    )
    if is_open:
        print(
            "megatron-lite: warning: anyone who reaches this address can use it: there is no --api-key",
            file=sys.stderr,
        )
