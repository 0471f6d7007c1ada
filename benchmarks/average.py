"""The average of three models: `megaconv average` beside mergekit's `linear`, in turns.

    python benchmarks/average.py [--layers 8] [--runs 3] [--dir /fast/disk] [--mergekit /path/to/mergekit-yaml]

Makes three Llamas of normally distributed bf16 weights, and averages them in whole cold processes. Reports the median time,
processor seconds, and the peak of anonymous memory. mergekit belongs into an environment of its own, and is left out if it
isn't given. It sums in float32 here, its widest dtype; megaconv sums in float64.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from convert import peak_memory, run
from delta import write_models

MODELS = ("old", "finetuned", "sparse")


def commands(work: Path, mergekit: Path | None) -> dict[str, list[str]]:
    """The command of each contender. All write `out`."""
    out = str(work / "out")
    places = [str(work / name) for name in MODELS]
    found = {
        "megaconv": [sys.executable, "-m", "megaconv", "average", *places, "--save-dir", out],
    }
    if mergekit is not None:
        plan = work / "linear.yaml"
        listed = "".join(
            f"  - model: {place}\n    parameters:\n      weight: 1.0\n" for place in places
        )
        plan.write_text(
            f"merge_method: linear\nmodels:\n{listed}dtype: float32\nout_dtype: bfloat16\n"
        )
        found["mergekit"] = [str(mergekit), str(plan), out, "--no-copy-tokenizer"]
    return found


def measure(work: Path, runs: int, mergekit: Path | None) -> dict[str, str]:
    """A line for each contender."""
    contenders = commands(work, mergekit)
    memory: dict[str, int] = {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(runs + 1):
        for name, command in contenders.items():
            if number:
                times[name].append(run(command))
            else:
                memory[name] = peak_memory(command)
            shutil.rmtree(work / "out")
    return {name: _line(times[name], memory[name]) for name in contenders}


def _line(times: list[tuple[float, float]], memory: int) -> str:
    seconds, processor = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{seconds:7.2f} s  {processor:7.2f} s of processors  {memory / 1e6:8.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--mergekit", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        work = Path(folder)
        write_models(work, args.layers)
        size = (work / MODELS[0] / "model.safetensors").stat().st_size
        print(f"{len(MODELS)} models of {size:,} bytes, {args.runs} runs")
        for name, line in measure(work, args.runs, args.mergekit).items():
            print(f"{name:<10} {line}")


if __name__ == "__main__":
    main()
