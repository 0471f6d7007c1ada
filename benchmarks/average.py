"""The average of three models (of two by slerp): `megaconv average` beside mergekit, in turns.

    python benchmarks/average.py [--layers 8] [--runs 3] [--dir /fast/disk] [--mergekit /path/to/mergekit-yaml]
        [--methods linear slerp ties dare]

Makes three Llamas of normally distributed bf16 weights, and averages them in whole cold processes. Reports the median time,
processor seconds, and the peak of anonymous memory. mergekit belongs into an environment of its own, and is left out if it
isn't given. It computes in float32 here, its widest dtype; megaconv computes in float64.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from convert import peak_memory, run
from delta import write_models

MODELS = ("old", "finetuned", "sparse")


DENSITY = 0.2
"""The part of each difference that `ties` and `dare` keep."""
NAMES = {"linear": "linear", "slerp": "slerp", "ties": "ties", "dare": "dare_linear"}
"""Methods of megaconv -> those of mergekit."""


def commands(work: Path, method: str, mergekit: Path | None) -> dict[str, list[str]]:
    """The command of each contender. All write `out`."""
    out = str(work / "out")
    places = [str(work / name) for name in MODELS[: 2 if method == "slerp" else 3]]
    density = ["--density", str(DENSITY)] if method in ("ties", "dare") else []
    ours = ["average", *places, "--method", method, *density, "--save-dir", out]
    found = {"megaconv": [sys.executable, "-m", "megaconv", *ours]}
    if mergekit is not None:
        plan = work / f"{method}.yaml"
        plan.write_text(json.dumps(_plan(places, method)))  # JSON is YAML
        found["mergekit"] = [str(mergekit), str(plan), out, "--no-copy-tokenizer"]
    return found


def _plan(places: list[str], method: str) -> dict[str, Any]:
    """mergekit's description of an average."""
    plan: dict[str, Any] = {
        "merge_method": NAMES[method],
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }
    own: dict[str, float] = {"weight": 1.0}
    if method != "linear":
        plan["base_model"] = places[0]
        own = {} if method == "slerp" else {"weight": 1.0, "density": DENSITY}
    if method == "slerp":
        plan["parameters"] = {"t": 0.5}
    weighted = places if method == "linear" else places[1:]
    plan["models"] = [
        {"model": place, "parameters": own} if place in weighted and own else {"model": place}
        for place in places
    ]
    return plan


def measure(work: Path, runs: int, contenders: dict[str, list[str]]) -> dict[str, str]:
    """A line for each contender. All write `out` in work."""
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
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=["linear"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        work = Path(folder)
        write_models(work, args.layers)
        size = (work / MODELS[0] / "model.safetensors").stat().st_size
        print(f"{len(MODELS)} models of {size:,} bytes, {args.runs} runs")
        for method in args.methods:
            contenders = commands(work, method, args.mergekit)
            for name, line in measure(work, args.runs, contenders).items():
                print(f"{method:<8} {name:<10} {line}", flush=True)


if __name__ == "__main__":
    main()
