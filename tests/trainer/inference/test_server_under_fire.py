"""The server under fire: 200 requests at the same time, of which many are wrong or go away; limits; and its end."""

import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_lite.inference.opening import Opened
from tests.trainer.inference.conversations import save
from tests.trainer.inference.crowds import Crowd, visit
from tests.trainer.inference.serving import KEY, Serving, opened
from tests.trainer.inference.storms import COMPLETIONS, judge, mixed, said, storm, streams

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `serve`)")

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

GROWTH = 16 << 20
"""Bytes of memory that may differ between one storm and the next; the answers of one alone are more."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chat")
    save(made)
    return made


@pytest.fixture(scope="module")
def alone(directory: Path) -> Opened:
    return opened(directory)


@pytest.fixture(scope="module")
def serving(directory: Path) -> Iterator[Serving]:
    running = Serving(directory, "--slots", "5", "--served-model-name", "tiny")
    yield running
    assert running.end() == (0, "")


def resident(serving: Serving) -> int:
    status = Path(f"/proc/{serving.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def descriptors(serving: Serving) -> int:
    return len(list(Path(f"/proc/{serving.process.pid}/fd").iterdir()))


def settled_descriptors(serving: Serving, allowed: int, patience_s: float = 10.0) -> int:
    """The number of open descriptors, once it is at most `allowed` or the patience is over. The last connections
    close late."""
    end = time.monotonic() + patience_s
    while (found := descriptors(serving)) > allowed and time.monotonic() < end:
        time.sleep(0.1)
    return found


def counted(serving: Serving) -> Counter[str]:
    """Requests by status."""
    found: Counter[str] = Counter()
    for line in serving.ask("/metrics")[1].splitlines():
        if line.startswith("megatron_lite_requests_total{") and "/metrics" not in line:
            found[line.split('status="')[1].split('"')[0]] += int(line.split()[-1])
    return found


def test_200_requests_at_once_are_answered_or_refused_and_leave_nothing_behind(
    serving: Serving, alone: Opened
) -> None:
    shots = mixed(alone, 200)
    assert len(shots) >= 200
    judge(shots, storm(serving, shots))  # warm-up
    serving.settle()
    memory, files, before = resident(serving), descriptors(serving), counted(serving)
    generated = serving.metric("generated_tokens_total")
    for _ in range(3):
        judge(shots, storm(serving, shots))
        serving.settle()
    after = counted(serving)
    assert resident(serving) - memory < GROWTH
    assert settled_descriptors(serving, files) <= files
    expected = Counter("left" if shot.status is None else str(shot.status) for shot in shots)
    found = {status: after[status] - before[status] for status in after}
    assert 0 < found["499"] <= 3 * expected["left"]
    # Some clients leave after their answer has begun: these count as 200.
    found["200"] -= 3 * expected.pop("left") - found.pop("499")
    assert found == {status: 3 * count for status, count in expected.items()}
    assert sum(after.values()) - sum(before.values()) == 3 * len(shots)
    least = sum(shot.tokens for shot in shots)
    assert serving.metric("generated_tokens_total") - generated >= 3 * least


def test_200_streams_of_which_every_second_client_leaves_are_whole_and_free_their_slots(
    serving: Serving, alone: Opened
) -> None:
    shots = streams(alone, 200)
    judge(shots, storm(serving, shots))  # warm-up
    serving.settle()
    memory, files, before = resident(serving), descriptors(serving), counted(serving)
    judge(shots, storm(serving, shots))
    serving.settle()
    assert resident(serving) - memory < GROWTH
    assert settled_descriptors(serving, files) <= files
    after = counted(serving)
    found = {
        status: after[status] - before[status]
        for status in after
        if after[status] != before[status]
    }
    assert found.keys() == {"200", "499"}
    assert sum(found.values()) == 200
    assert found["200"] >= 100
    assert found["499"] >= 50  # the others left when their answer was done
    assert serving.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 2})[0] == 200


def threads(serving: Serving) -> int:
    return len(list(Path(f"/proc/{serving.process.pid}/task").iterdir()))


def test_200_clients_that_come_read_slowly_stall_and_leave_see_their_own_text_alone(
    tmp_path: Path,
) -> None:
    save(tmp_path, max_position_embeddings=512)
    serving = Serving(tmp_path, "--slots", "5", "--served-model-name", "tiny")
    crowd = Crowd(serving, opened(tmp_path))
    visit(crowd, 200, seed=0)  # warm-up
    serving.settle()
    memory, files, workers = resident(serving), descriptors(serving), threads(serving)
    reused = serving.metric("prompt_tokens_reused_total")
    visit(crowd, 200, seed=1)
    serving.settle()
    assert not crowd.wrong()
    assert {answer.behavior for answer in crowd.answers} == {"reads", "reads slowly", "stalls"}
    assert len(crowd.answers) >= 2 * 150
    assert all(found == expected for found, expected in crowd.statuses)
    assert serving.metric("prompt_tokens_reused_total") > reused
    assert resident(serving) - memory < GROWTH
    assert settled_descriptors(serving, files) <= files
    assert threads(serving) <= workers
    together = [f"{number} begins" for number in range(5)]  # every slot is free again
    answer = serving.ask(COMPLETIONS, {"prompt": together, "max_tokens": 20, "temperature": 0})[1]
    assert [choice["index"] for choice in answer["choices"]] == list(range(5))
    assert serving.end() == (0, "")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for answers of about a thousand tokens, which take a second."""
    made = tmp_path_factory.mktemp("slow")
    save(made, max_position_embeddings=4096)
    return made


LONG = {"prompt": "go on", "max_tokens": 4000, "temperature": 0, "logit_bias": {"0": -100}}
"""A request whose answer takes seconds: the bias keeps the model from ending it early."""


def test_a_request_that_times_out_frees_its_slot(slow: Path) -> None:
    running = Serving(slow, "--request-timeout", "0.3")
    status, found = running.ask(COMPLETIONS, LONG)
    assert (status, found["error"]["type"]) == (504, "timeout_error")
    status, found = running.ask(COMPLETIONS, LONG | {"stream": True})
    assert status == 200
    assert "after 0.3 seconds" in found.split("data: ")[-2]
    assert (
        running.ask(
            "/api", {"prompts": ["go on"], "tokens_to_generate": 4000, "top_k": 1}, method="PUT"
        )[0]
        == 504
    )
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n".encode()
        )
        connection.sendall(b'Content-Length: 20\r\n\r\n{"prompt"')
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
    running.settle()
    assert running.end() == (0, "")


def test_answers_that_run_are_ended_before_the_server_is(slow: Path) -> None:
    running, longer, answers = (
        Serving(slow, "--shutdown-timeout", "60"),
        LONG | {"max_tokens": 400},
        ThreadPoolExecutor(2),
    )
    whole = running.ask(COMPLETIONS, longer)[1]["choices"][0]["text"]
    waiting = [
        answers.submit(running.ask, COMPLETIONS, longer | {"stream": stream})
        for stream in (True, False)
    ]
    while running.metric("requests_running") < 2:
        time.sleep(0.05)
    assert running.end() == (0, "")
    (_, events), (_, answer) = (each.result() for each in waiting)
    assert said(events.encode()) == answer["choices"][0]["text"] == whole


def test_answers_that_take_longer_than_the_end_may_are_cut_off(slow: Path) -> None:
    running = Serving(slow, "--shutdown-timeout", "1")
    answers = ThreadPoolExecutor(2)
    waiting = [
        answers.submit(running.ask, COMPLETIONS, LONG | {"stream": stream})
        for stream in (True, False)
    ]
    while running.metric("requests_running") < 2:
        time.sleep(0.05)
    status, errors = running.end()
    assert status == 0
    assert "Cancel 2 running" in errors
    assert "Traceback" not in errors
    (_, events), (refused, answer) = (each.result() for each in waiting)
    assert "shutting down" in events
    assert "[DONE]" not in events
    assert (refused, answer["error"]["message"]) == (503, "the server is shutting down")


def test_ctrl_c_lets_answers_end_and_a_second_one_ends_them(slow: Path) -> None:
    running = Serving(slow, "--shutdown-timeout", "60")
    answer = ThreadPoolExecutor(1).submit(running.ask, COMPLETIONS, LONG | {"stream": True})
    while running.metric("requests_running") < 1:
        time.sleep(0.05)
    running.process.send_signal(signal.SIGINT)
    assert running.process.stderr is not None
    line = running.process.stderr.readline()
    assert "waits for 1 request, 60 s at most, and ends; Ctrl-C again" in line
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(20) == 0
    assert "[DONE]" not in answer.result()[1]
