"""`megaconv inspect --stats` beside `megaconv fingerprint` of the same model: both read everything once.

    python benchmarks/inspect_stats.py [--layers 22] [--runs 3] [--dir /fast/disk]

Whole cold processes in turns, every other round in reverse order; the source is in the page cache. Prints each round's
ratio, and their median, as JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from convert import make_model, run

MEGACONV = [sys.executable, "-m", "megaconv"]


def fill_with_normals(file: Path, size: int) -> None:
    """Weights as models have them: bf16 of a normal distribution, 16 MiB of them again and again."""
    numbers = np.random.default_rng(0).standard_normal(1 << 23, np.float32) * np.float32(0.02)
    block = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    with file.open("r+b") as opened:
        start = file.stat().st_size - size
        opened.seek(start)
        for position in range(0, size, len(block)):
            opened.write(block[: size - position])


def one_round(model: Path, *, statistics_first: bool) -> tuple[float, float]:
    """Seconds of (fingerprint, inspect --stats)."""
    commands = {
        "fingerprint": [*MEGACONV, "fingerprint", str(model)],
        "stats": [*MEGACONV, "inspect", str(model), "--stats"],
    }
    seconds = {name: run(commands[name])[0] for name in sorted(commands, reverse=statistics_first)}
    return seconds["fingerprint"], seconds["stats"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        model = Path(folder) / "hf"
        size = make_model(model, args.layers)
        fill_with_normals(model / "model.safetensors", size)
        one_round(model, statistics_first=False)  # compiles modules, fills the page cache
        rounds = [
            one_round(model, statistics_first=bool(number % 2)) for number in range(args.runs)
        ]
    ratios = [round(stats / fingerprint, 2) for fingerprint, stats in rounds]
    found = {
        "bytes": size,
        "fingerprint_s": round(statistics.median(seconds for seconds, _ in rounds), 2),
        "stats_s": round(statistics.median(seconds for _, seconds in rounds), 2),
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
