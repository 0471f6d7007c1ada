"""Conversions from a store to a store, beside boto3 alone that copies the same bytes with the same number of connections.

    python -m benchmarks.stores [--layers 8] [--hidden 1024] [--runs 3] [--latency 0.03] [--rate 90] [--json]

The store is a small server in a process of its own on this machine, whose objects are in memory. It behaves like a distant store:
--latency delays each answer, and --rate limits each connection. The two take turns. Times are of the wall clock and of the
client's processors, after both have imported their packages; RssAnon is sampled. On a busy machine, choose a rate so low that the
store is the limit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import BoundedSemaphore
from typing import Any

BUCKET = "models"
CONNECTIONS = 16
PART = 8 << 20
_SERVER = """
import sys, time
from tests.stores.small_store import Handler, SmallStore
latency, seconds_per_byte = float(sys.argv[1]), float(sys.argv[2])
class Distant(Handler):
    def _send(self, answer, fault):
        time.sleep(latency + len(answer[2]) * seconds_per_byte)
        super()._send(answer, fault)
store = SmallStore("models", Distant)
def delay(asked):
    if asked.action == "part":
        time.sleep(asked.nbytes * seconds_per_byte)
store.hook = delay
print(store.url, flush=True)
store.serve_forever()
"""


def client() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(max_pool_connections=2 * CONNECTIONS))


def upload(directory: Path, prefix: str) -> int:
    """Put a directory's files into the store. Returns their size in bytes."""
    made, size = client(), 0
    for file in directory.iterdir():
        made.put_object(Bucket=BUCKET, Key=f"{prefix}/{file.name}", Body=file.read_bytes())
        size += file.stat().st_size
    return size


def plain_copy() -> None:
    """Read all objects in ranges of 8 MiB with 16 connections, and send each range as a part with 16 others."""
    made = client()
    with ThreadPoolExecutor(CONNECTIONS) as reading, ThreadPoolExecutor(CONNECTIONS) as sending:
        for each in made.list_objects_v2(Bucket=BUCKET, Prefix="source/")["Contents"]:
            _copy(made, each["Key"], each["Size"], reading, sending)


def _copy(made: Any, key: str, size: int, reading: Executor, sending: Executor) -> None:
    target = key.replace("source/", "copy/")
    identity = made.create_multipart_upload(Bucket=BUCKET, Key=target)["UploadId"]
    place = {"Bucket": BUCKET, "Key": target, "UploadId": identity}
    free = BoundedSemaphore(4 * CONNECTIONS)  # parts in memory

    def read(number: int) -> bytes:
        start = number * PART
        span = f"bytes={start}-{min(start + PART, size) - 1}"
        content: bytes = made.get_object(Bucket=BUCKET, Key=key, Range=span)["Body"].read()
        return content

    def send(number: int, content: Future[bytes]) -> dict[str, Any]:
        tag = made.upload_part(**place, PartNumber=number + 1, Body=content.result())["ETag"]
        free.release()
        return {"PartNumber": number + 1, "ETag": tag}

    parts = []
    for number in range(max(1, -(-size // PART))):
        free.acquire()
        parts.append(sending.submit(send, number, reading.submit(read, number)))
    listed = [part.result() for part in parts]
    made.complete_multipart_upload(**place, MultipartUpload={"Parts": listed})


def conversion() -> None:
    from megaconv import convert

    convert(f"s3://{BUCKET}/source", f"s3://{BUCKET}/out", saver="core", tp=2, pp=2)


def plan() -> None:
    """Import everything that a conversion needs."""
    from megaconv import convert

    words = {"saver": "core", "tp": 2, "pp": 2}
    convert(f"s3://{BUCKET}/source", f"s3://{BUCKET}/out", dry_run=True, **words)


WORK: dict[str, Callable[[], None]] = {"boto3 alone": plain_copy, "megaconv": conversion}


def measure(name: str) -> dict[str, float]:
    """Run one of the two in this process. Returns seconds of the wall clock and of processors, and bytes of memory."""
    most, over = [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(most, over))
    client().list_objects_v2(Bucket=BUCKET)
    if name == "megaconv":
        plan()
    watcher.start()
    wall, processor = time.perf_counter(), time.process_time()
    WORK[name]()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    over.set()
    watcher.join()
    return {"seconds": wall, "processor_seconds": processor, "anonymous_bytes": most[0]}


def _watch(most: list[int], over: threading.Event) -> None:
    while not over.wait(0.02):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                most[0] = max(most[0], int(line.split()[1]) << 10)


def in_a_process(name: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.stores", "--only", name]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(output)
    return found


def clear() -> None:
    """Delete what the last run has written."""
    made = client()
    for prefix in ("out/", "copy/"):
        for each in made.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ()):
            made.delete_object(Bucket=BUCKET, Key=each["Key"])


def llama_shapes(hidden: int) -> dict[str, int]:
    """The proportions of Llama 3: heads of 128, four of them to a key, 3.5 times as many inner channels."""
    heads = hidden // 128
    return {"hidden": hidden, "heads": heads, "kv_heads": heads // 4, "ffn": hidden * 7 // 2}


def compare(
    layers: int, hidden: int, runs: int, latency: float, megabytes: float
) -> dict[str, Any]:
    """Return the size of the model, and the medians of both. megabytes: a second and connection; 0 for no limit."""
    from tests.models import write_llama  # imports torch, which the measured processes don't have

    slowness = 1e-6 / megabytes if megabytes else 0.0
    command = [sys.executable, "-c", _SERVER, str(latency), str(slowness)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        os.environ |= {
            "AWS_ENDPOINT_URL": server.stdout.readline().strip(), "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            source = write_llama(
                Path(directory) / "model", layers=layers, vocab=8192, **llama_shapes(hidden)
            )
            size = upload(source, "source")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in WORK}
        for _ in range(runs):
            for name, results in found.items():
                clear()
                results.append(in_a_process(name))
    finally:
        server.kill()
        server.wait()
    medians = {
        name: {key: median(each[key] for each in results) for key in results[0]}
        for name, results in found.items()
    }
    return {"bytes": size, "latency": latency, "rate": megabytes, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure conversions from a store to a store.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds before each answer")
    parser.add_argument(
        "--rate", type=float, default=0, help="MB per second and connection (default: no limit)"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only)))
        return
    found = compare(given.layers, given.hidden, given.runs, given.latency, given.rate)
    if given.json:
        print(json.dumps(found))
        return
    gigabytes = found["bytes"] / 1e9
    for name in WORK:
        each = found[name]
        print(
            f"{name:12} {gigabytes / each['seconds'] * 1e3:7.0f} MB/s {each['processor_seconds'] / gigabytes:6.1f} processor s/GB "
            f"{each['anonymous_bytes'] / 1e6:6.0f} MB of memory"
        )


if __name__ == "__main__":
    main()
