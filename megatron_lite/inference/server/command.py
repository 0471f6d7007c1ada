"""`megatron-lite serve`: rank 0 answers HTTP, all ranks compute."""

import argparse
import os
import signal
import socket
import sys
from importlib.util import find_spec

from megaconv.errors import UsageError
from megatron_lite.inference.opening import Opened, Parser, command, make_parser, run
from megatron_lite.loop import launch
from megatron_lite.loop.failure import report

EXAMPLES = """  megatron-lite serve --load Llama-3.2-1B-Instruct --port 8000
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once", "max_tokens": 20}'
  torchrun --nproc-per-node 4 -m megatron_lite serve --load ckpt --tp 2 --pp 2 --slots 32 --api-key-file key.txt --host 0.0.0.0"""

KEY = "MEGATRON_LITE_API_KEY"


def parser() -> Parser:
    made = make_parser("serve", "A model behind OpenAI's routes and Megatron's PUT /api (extra `serve`).", EXAMPLES)
    add = made.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="who can reach it (127.0.0.1: this machine alone)")
    add("--port", type=int, default=8000, metavar="N", help="0: any that is free (8000)")
    add("--served-model-name", metavar="NAME", help="what clients call the model (the checkpoint's last part)")
    add(
        "--api-key",
        metavar="KEY",
        help=f"that clients have to have; seen by everyone on this machine: better ${KEY} or the next",
    )
    add("--api-key-file", metavar="FILE", help="its first line is the key")
    add(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="requests that wait for a slot; more are refused with 429 (256)",
    )
    add("--max-body-bytes", type=int, default=4 << 20, metavar="N", help="of a request (4 MiB)")
    add("--request-timeout", type=float, default=600.0, metavar="SECONDS", help="until an answer has to be ready (600)")
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="that answers have to end in after SIGTERM (30)",
    )
    return made


def main(words: list[str]) -> int:
    return command(parser(), words, _main)


def _main(given: argparse.Namespace) -> None:
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise UsageError(f"serve needs the package {package}: pip install 'megaconv[serve]'")
    if given.max_waiting < 0 or given.max_body_bytes < 1 or given.request_timeout <= 0 or given.shutdown_timeout < 0:
        raise UsageError("--max-waiting, --max-body-bytes, --request-timeout and --shutdown-timeout can't be negative")
    if not 0 <= given.port < 1 << 16:
        raise UsageError(f"--port {given.port} should be a number from 0 to 65535")
    key = _key(given)
    bound = _bound(given.host, given.port) if launch.rank() == 0 else None  # before a model is loaded for nothing
    run(given, lambda opened: _serve(opened, given, key, bound), lasting=True)


def _bound(host: str, port: int) -> socket.socket:
    """A socket of that address, which doesn't listen yet. Raises UsageError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port} can't be had: {error.strerror or error}") from error
    return made


def _key(given: argparse.Namespace) -> str | None:
    key: str | None
    if given.api_key_file:
        try:
            with open(given.api_key_file, encoding="utf-8") as file:  # noqa: PTH123  # its first line alone
                key = file.readline().strip()
        except OSError as error:
            raise UsageError(f"{given.api_key_file}: can't be read: {error.strerror}") from error
    else:
        key = given.api_key if given.api_key is not None else os.environ.get(KEY)
    if key == "":
        raise UsageError("the key is empty; leave it out to serve everyone")
    return key


def _serve(opened: Opened, given: argparse.Namespace, key: str | None, bound: socket.socket | None) -> None:
    """On rank 0."""
    import uvicorn

    from megatron_lite.inference.server.app import Limits, Server
    from megatron_lite.inference.server.worker import Worker

    def failed(error: BaseException) -> None:
        launch.leave(report(error, "rank 0 (which serves)", opened.store))

    worker = Worker(opened.model, given.max_waiting, failed)
    limits = Limits(given.max_body_bytes, given.request_timeout)
    server = Server(opened, worker, given.served_model_name or opened.name, limits, key)
    config = uvicorn.Config(
        server.app(), given.host, given.port, log_level="warning", lifespan="off",
        timeout_graceful_shutdown=max(1, int(given.shutdown_timeout)),
    )  # fmt: skip
    assert bound is not None, "rank 0 has an address"
    bound.listen(config.backlog)  # whoever reads the next line can connect
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(
        f"serving {server.name} at http://{shown}:{port}, {opened.model.slots} slots of {opened.model.length} tokens",
        flush=True,
    )
    if key is None and given.host not in ("127.0.0.1", "::1", "localhost"):
        print(
            "megatron_lite: warning: anyone who reaches this address can use it: there is no --api-key", file=sys.stderr
        )
    # uvicorn raises the signal that ended it once more; by then it has done its work.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config).run(sockets=[bound])
    worker.stop()
