"""The server answers as the Hub does, refuses what it must, and keeps apart what changes."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from megaconv.serving.server import Server
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, run
from tests.serving.servers import MEMORY, ask, serving

RUN = FIXTURES / "core-llama-tp2pp2" / "checkpoint"
WEIGHTS = "/org/run/resolve/main/model.safetensors"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a conversion of RUN."""
    target = tmp_path_factory.mktemp("converted") / "hf"
    outcome = run("convert", RUN, target, "--saver", "hf")
    assert outcome.status == 0, outcome.err
    return target


def test_64_ranges_at_once_are_those_of_a_conversion(converted: Path) -> None:
    content = (converted / "model.safetensors").read_bytes()
    random = Random(1)
    ranges = [sorted(random.sample(range(len(content)), 2)) for _ in range(64)]
    with serving({"org/run": RUN}) as server, ThreadPoolExecutor(64) as pool:
        replies = list(
            pool.map(
                lambda ends: ask(server, WEIGHTS, Range=f"bytes={ends[0]}-{ends[1] - 1}"), ranges
            )
        )
    for (start, stop), reply in zip(ranges, replies, strict=True):
        assert (reply.status, reply.body) == (206, content[start:stop])
        assert reply.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(content)}"


@pytest.mark.parametrize(
    ("asked", "status", "expected"),
    [
        ("bytes=0-0", 206, slice(0, 1)),
        ("bytes=-5", 206, slice(-5, None)),
        ("bytes=7-", 206, slice(7, None)),
        ("bytes=100-99999999", 206, slice(100, None)),
        ("bytes=99999999-", 416, slice(0, 0)),
        ("bytes=-0", 416, slice(0, 0)),
        ("bytes=1-2,5-6", 200, slice(None)),
        ("bytes=5-2", 200, slice(None)),
        ("lines=1-2", 200, slice(None)),
        ("bytes=-", 200, slice(None)),
    ],
)
def test_a_range_is_answered_as_the_rfc_says(
    converted: Path, asked: str, status: int, expected: slice
) -> None:
    content = (converted / "model.safetensors").read_bytes()
    with serving({"org/run": RUN}) as server:
        reply = ask(server, WEIGHTS, Range=asked)
    assert (reply.status, reply.body) == (status, content[expected])
    if status == 416:
        assert reply.headers["Content-Range"] == f"bytes */{len(content)}"


def test_a_download_of_an_earlier_file_is_not_continued(converted: Path) -> None:
    """RFC 9110, section 13.1.5: a range of another file than the one of If-Range is answered with the whole file."""
    content = (converted / "model.safetensors").read_bytes()
    with serving({"org/run": RUN}) as server:
        tag = ask(server, WEIGHTS, "HEAD").headers["ETag"]
        same = ask(server, WEIGHTS, Range="bytes=7-", **{"If-Range": tag})
        other = ask(server, WEIGHTS, Range="bytes=7-", **{"If-Range": '"other"'})
        later = ask(server, WEIGHTS, Range="bytes=99999999-", **{"If-Range": '"other"'})
    assert (same.status, same.body) == (206, content[7:])
    assert (other.status, other.body) == (200, content)
    assert (later.status, later.body) == (200, content)


def test_head_has_the_headers_of_get_and_no_body(converted: Path) -> None:
    with serving({"org/run": RUN}) as server:
        reply = ask(server, WEIGHTS, "HEAD")
        got = ask(server, WEIGHTS)
    size = (converted / "model.safetensors").stat().st_size
    assert (reply.status, reply.body, reply.headers["Content-Length"]) == (200, b"", str(size))
    assert reply.headers["ETag"] == got.headers["ETag"]
    assert reply.headers["X-Repo-Commit"] == got.headers["X-Repo-Commit"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/models/org/other", "RepoNotFound"),
        ("/org/other/resolve/main/config.json", "RepoNotFound"),
        ("/org/run/resolve/nowhere/config.json", "RevisionNotFound"),
        ("/org/run/resolve/main/pytorch_model.bin", "EntryNotFound"),
        ("/org/run/resolve/main/../../../../etc/passwd", "EntryNotFound"),
        ("/org/run/resolve/main/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "EntryNotFound"),
        ("/etc/passwd", None),
    ],
)
def test_missing_entries_have_the_error_codes_of_the_hub(path: str, code: str | None) -> None:
    with serving({"org/run": RUN}) as server:
        reply = ask(server, path)
    assert (reply.status, reply.headers["X-Error-Code"]) == (404, code)


def test_many_clients_may_connect_at_once() -> None:
    """They wait until the server accepts them, which a busy one does late."""
    with Server(("127.0.0.1", 0), {}, MEMORY) as server, ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(socket.socket())
            client.settimeout(1)
            client.connect(("127.0.0.1", server.server_port))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(method: str) -> None:
    with serving({"org/run": RUN}) as server:
        reply = ask(server, "/api/models/org/run", method)
    assert reply.status == 405


def test_a_page_of_another_site_gets_nothing() -> None:
    with serving({"org/run": RUN}) as server:
        assert ask(server, "/", Host="evil.example").status == 403
        assert ask(server, WEIGHTS, Host="evil.example:8700").status == 403
        assert ask(server, "/", Host=f"localhost:{server.server_port}").status == 200


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_ipv6_is_served() -> None:
    with Server(("::1", 0), {}, MEMORY) as server:
        assert server.url == f"http://[::1]:{server.server_port}"
        assert server.is_local
        socket.create_connection(("::1", server.server_port)).close()


def test_an_error_of_the_host_asks_for_another_host_and_one_of_the_port_for_another_port() -> None:
    outcome = run("serve-hf", RUN, "--host", "nowhere.invalid")
    assert_refused(outcome, 2, "--host nowhere.invalid", "choose another host")
    with Server(("127.0.0.1", 0), {}, MEMORY) as server:
        outcome = run("serve-hf", RUN, "--port", server.server_port)
    assert_refused(outcome, 2, f"--port {server.server_port}", "choose another port")


def test_a_source_that_changes_is_no_longer_served(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    with serving({"org/run": source}) as server:
        before = ask(server, WEIGHTS)
        assert before.status == 200
        weights = source / "model.safetensors"
        weights.write_bytes(weights.read_bytes())
        reply = ask(server, WEIGHTS)
    assert reply.status == 503
    assert "model.safetensors" in json.loads(reply.body)["error"]
    with serving({"org/run": source}) as server:
        after = ask(server, WEIGHTS)
    assert after.body == before.body
    assert after.headers["ETag"] != before.headers["ETag"]


def test_iterations_of_a_run_are_revisions_and_can_be_compared(tmp_path: Path) -> None:
    first = write_llama(tmp_path / "first", seed=1)
    second = write_llama(tmp_path / "second", seed=2)
    for number, source in ((1, first), (2, second)):
        target = tmp_path / f"run{number}"
        outcome = run("convert", source, target, "--saver", "core", "--iteration", number)
        assert outcome.status == 0, outcome.err
    shutil.copytree(tmp_path / "run1" / "iter_0000001", tmp_path / "run2" / "iter_0000001")
    with serving({"org/run": tmp_path / "run2"}) as server:
        branches = json.loads(ask(server, "/api/models/org/run/refs").body)["branches"]
        assert [each["name"] for each in branches] == ["main", "iter_0000001", "iter_0000002"]
        weights = [
            ask(server, f"/org/run/resolve/{name}/model.safetensors").body
            for name in ("main", "iter_0000001", "iter_0000002")
        ]
        assert weights[0] == weights[2] != weights[1]
        page = ask(server, "/").body.decode()
        assert "org/run@iter_0000001" in page
        assert "default-src 'none'" in page
        report = ask(server, "/diff?a=org/run@iter_0000001&b=org/run@main")
        assert report.status == 200
        assert "attn" in report.body.decode()
        assert ask(server, "/diff?a=org/run@iter_0000009&b=org/run").status == 404


def test_names_on_the_page_are_text(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "<script>alert(1)<")
    with serving({"org/run": source}) as server:
        assert "<script>" not in ask(server, "/").body.decode()


CLIENT = """
import json, sys
from huggingface_hub import HfApi, HfFileSystem, get_safetensors_metadata, snapshot_download
from transformers import AutoModelForCausalLM

api = HfApi()
files = api.model_info("org/run", files_metadata=True).siblings
tree = {file.path: file.size for file in api.list_repo_tree("org/run")}
assert {file.rfilename: file.size for file in files} == tree
assert api.file_exists("org/run", "config.json") and not api.file_exists("org/run", "none")
assert not api.repo_exists("org/other")
assert [ref.name for ref in api.list_repo_refs("org/run").branches] == ["main", "iter_0000005"]
counts = get_safetensors_metadata("org/run").parameter_count
assert HfFileSystem().read_bytes("org/run/config.json").startswith(b"{")
model = AutoModelForCausalLM.from_pretrained("org/run")
print(json.dumps({"directory": snapshot_download("org/run"), "counts": counts, "tensors": len(model.state_dict())}))
"""


@pytest.mark.oracle
def test_clients_of_the_hub_load_what_a_conversion_writes(converted: Path, tmp_path: Path) -> None:
    """huggingface_hub and transformers, in a process that was told the address alone."""
    with serving({"org/run": RUN}) as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
        environment.pop("HF_HUB_OFFLINE")
        outcome = subprocess.run(
            [sys.executable, "-c", CLIENT],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    downloaded = Path(found["directory"])
    for name in ("config.json", "model.safetensors"):
        assert (downloaded / name).read_bytes() == (converted / name).read_bytes()
    outcome = run("diff", downloaded, RUN)
    assert outcome.status == 0, outcome.out


def test_the_command_prints_address_and_names_and_ends_on_a_signal(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    process = subprocess.Popen(
        [sys.executable, "-m", "megaconv", "serve-hf", source, "--port", "0"],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    process.terminate()
    process.wait(timeout=30)
    assert re.fullmatch(r"serving local/source at http://127\.0\.0\.1:\d+\n", line)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", "one"], "expected OWNER/MODEL"),
        (["--name", "a/../b"], "expected OWNER/MODEL"),
        (["--name", "a/b", "--name", "c/d"], "2 names for 1 checkpoint;"),
    ],
)
def test_a_wrong_name_is_refused(words: list[str], message: str) -> None:
    outcome = run("serve-hf", RUN, *words)
    assert outcome.status == 2
    assert message in outcome.err
