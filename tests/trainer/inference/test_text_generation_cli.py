"""examples/text_generation_cli.py: what it asks, sends and prints. The server here answers as Megatron's does."""

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

CLIENT = Path(__file__).parents[3] / "examples" / "text_generation_cli.py"


class Server(HTTPServer):
    """Repeats the prompt, or refuses an empty one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.asked: list[dict[str, Any]] = []


class Answering(BaseHTTPRequestHandler):
    server: Server

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({"path": self.path, **body})
        (prompt,) = body["prompts"]
        status, answer = (200, json.dumps({"text": [prompt * 2]})) if prompt else (400, "no prompt")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def run(address: str, typed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CLIENT, address], input=typed, capture_output=True, text=True, check=False
    )


def test_it_prints_the_continuation_of_each_prompt(server: Server) -> None:
    outcome = run(f"127.0.0.1:{server.server_port}", "ab\n3\n\n1\ncd\nmany\n")
    assert server.asked == [
        {"path": "/api", "prompts": ["ab"], "tokens_to_generate": 3},
        {"path": "/api", "prompts": [""], "tokens_to_generate": 1},
    ]
    assert "Megatron Response:\nabab\n" in outcome.stdout
    assert outcome.stderr == ("Error 400: no prompt\nThe number of tokens must be an integer.\n")
    assert outcome.returncode == 0


def test_a_server_that_is_not_there_is_named(server: Server) -> None:
    outcome = run("127.0.0.1:1", "ab\n3\n")
    assert outcome.returncode == 1
    assert outcome.stderr.startswith("127.0.0.1:1: can't be reached: ")
