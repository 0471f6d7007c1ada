"""Hugging Face -> torch_dist and back, beside `cp` of the same bytes and PyTorch's own DCP utilities, in one run.

    python benchmarks/torch_dist.py [--layers 22] [--runs 5] [--dir /fast/disk] [--json]

Makes the Llama of benchmarks/convert.py (2.2 GB), and the same tensors as one torch file and as a plain DCP checkpoint.
Then alternates whole cold processes, each of which brings its output to disk:

    cp + fsync                 of the model's directory
    megaconv hf -> torch_dist  TP 2, fingerprints and checksums included
    megaconv torch_dist -> hf
    torch_save_to_dcp          torch.distributed.checkpoint.format_utils: a torch file -> DCP
    dcp_to_torch_save          DCP -> a torch file

Reports medians, ratios to cp, how much quicker than PyTorch's utility each direction is, and peaks of anonymous memory.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from convert import COPY, make_model, peak_memory, run

SAVE = """
import sys, torch
from safetensors.torch import load_file
torch.save(load_file(sys.argv[1] + "/model.safetensors"), sys.argv[2])
"""
UTILITY = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
{name}(sys.argv[1], sys.argv[2])
"""
SYNCED = 'mkdir -p {target} && "$@" && find {target} -type f -exec sync {{}} +'
WRITING, READING = "megaconv hf -> torch_dist", "megaconv torch_dist -> hf"
PEERS = {WRITING: "torch_save_to_dcp", READING: "dcp_to_torch_save"}


def commands(work: Path, megaconv: str) -> dict[str, list[str]]:
    """Every one writes below work/out; what they read is made first, by the first of each kind."""
    source, target = work / "model", work / "out"
    convert = [megaconv, "convert", "--save-dir", str(target)]
    to_dist = [
        "--load-dir",
        str(source),
        "--saver",
        "core",
        "--ckpt-format",
        "torch_dist",
        "--tp",
        "2",
    ]

    def utility(name: str, left: Path, right: Path) -> list[str]:
        python = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            UTILITY.format(name=name),
            str(left),
            str(right),
        ]
        return ["sh", "-c", SYNCED.format(target=target), "sh", *python]

    return {
        "cp + fsync": ["sh", "-c", COPY.format(source=source, target=target)],
        WRITING: [*convert, *to_dist],
        PEERS[WRITING]: utility("torch_save_to_dcp", work / "model.pt", target / "dcp"),
        READING: [*convert, "--load-dir", str(work / "dist"), "--saver", "hf"],
        PEERS[READING]: utility("dcp_to_torch_save", work / "dcp", target / "model.pt"),
    }


def prepare(work: Path, made: dict[str, list[str]]) -> None:
    """The inputs of the reading commands."""
    run([sys.executable, "-c", SAVE, str(work / "model"), str(work / "model.pt")])
    run(made[WRITING])
    (work / "out").rename(work / "dist")
    run(made[PEERS[WRITING]])
    (work / "out/dcp").rename(work / "dcp")
    shutil.rmtree(work / "out")


def measure(work: Path, layers: int, runs: int) -> dict[str, object]:
    size = make_model(work / "model", layers)
    megaconv = shutil.which("megaconv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if megaconv is None:
        sys.exit("megaconv is not installed beside this Python; pip install -e . first")
    made = commands(work, megaconv)
    prepare(work, made)
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(runs):
        for name, command in made.items():
            os.sync()
            times[name].append(run(command)[0])
            shutil.rmtree(work / "out")
    peaks = {}
    for name, command in made.items():
        (work / "out").mkdir()
        # The memory of Python itself, not of its shell.
        peaks[name] = peak_memory(command[4:] if name in PEERS.values() else command)
        shutil.rmtree(work / "out")
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = {
        name: {"median_s": round(medians[name], 3), "all_s": [round(value, 3) for value in values],
               "ratio_to_cp": round(medians[name] / medians["cp + fsync"], 3),
               "peak_anonymous_mb": round(peaks[name] / 1e6, 1)}
        for name, values in times.items()
    }  # fmt: skip
    for ours, theirs in PEERS.items():
        rows[ours][f"times as fast as {theirs}"] = round(medians[theirs] / medians[ours], 2)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"machine": machine, "bytes": size, "layers": layers, "results": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = measure(Path(folder), args.layers, args.runs)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['machine']}; {found['bytes']:,} bytes, {args.runs} runs")
    for name, row in found["results"].items():  # type: ignore[attr-defined]
        faster = "".join(
            f"   {words[:13]} {value:.1f}"
            for words, value in row.items()
            if words.startswith("times as")
        )
        memory = f"peak anonymous {row['peak_anonymous_mb']:>7.1f} MB"
        print(
            f"{name:<26} {row['median_s']:>7.2f} s   {row['ratio_to_cp']:>5.2f} x cp   {memory}   {row['all_s']}{faster}"
        )


if __name__ == "__main__":
    main()
