"""Processor time of a served byte, beside that of a converted byte.

    python benchmarks/serving.py [--layers 22] [--runs 3] [--dir /fast/disk]

Makes the model of benchmarks/convert.py as a Megatron core checkpoint (TP 2, PP 2). Then, in turns: `megaconv convert` to
Hugging Face, and a client that reads all files of `megaconv serve-hf` in ranges of 16 MiB. The processor seconds are those of
the conversion and of the server alone, without the client. Prints medians and their ratio.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from convert import LAYOUT, conversion, environment, make_model, run

RANGE = 16 << 20
TICKS = os.sysconf("SC_CLK_TCK")


def served(source: Path) -> tuple[float, int]:
    """(processor seconds of the server, bytes that the client read)."""
    command = [
        sys.executable,
        "-m",
        "megaconv",
        "serve-hf",
        str(source),
        "--name",
        "o/m",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment() | {"PYTHONUNBUFFERED": "1"}
    ) as server:
        assert server.stdout is not None
        found = re.search(r":(\d+)$", server.stdout.readline().strip())
        assert found is not None
        client = http.client.HTTPConnection("127.0.0.1", int(found[1]))
        read = sum(read_file(client, name) for name in names(client))
        user, system = Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        server.terminate()
    return (int(user) + int(system)) / TICKS, read


def names(client: http.client.HTTPConnection) -> list[str]:
    client.request("GET", "/api/models/o/m")
    return [each["rfilename"] for each in json.loads(client.getresponse().read())["siblings"]]


def read_file(client: http.client.HTTPConnection, name: str) -> int:
    """Read a file in ranges; returns its bytes."""
    place, buffer = 0, bytearray(1 << 20)
    while True:
        client.request(
            "GET",
            f"/o/m/resolve/main/{name}",
            headers={"Range": f"bytes={place}-{place + RANGE - 1}"},
        )
        reply = client.getresponse()
        while count := reply.readinto(buffer):
            place += count
        if place == int(reply.headers["Content-Range"].partition("/")[2]):
            return place


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        work = Path(folder)
        make_model(work / "hf", args.layers)
        run(conversion(work, "hf", "--saver", "core", *LAYOUT))
        (work / "out").rename(work / "core")
        converting, serving = [], []
        for _ in range(args.runs):
            converting.append(run(conversion(work, "core", "--saver", "hf"))[1])
            shutil.rmtree(work / "out")
            seconds, read = served(work / "core")
            serving.append(seconds)
    ours, theirs = statistics.median(serving), statistics.median(converting)
    print(
        f"{read:,} bytes, {args.runs} runs: convert {theirs:.2f} s, serve-hf {ours:.2f} s, ratio {ours / theirs:.2f}"
    )


if __name__ == "__main__":
    main()
