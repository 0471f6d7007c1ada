"""Tokens per second of the trainer, beside transformers and Megatron core, in one run with interleaved steps.

    python benchmarks/trainer.py single [--steps 15] [--tiny] [--mixture [fine-grained]] [--dtype float32|bfloat16] [--json]
    python benchmarks/trainer.py parallel [--steps 15] [--tiny] [--json]
    python benchmarks/trainer.py gpu [MODEL ...] [--steps 15] [--limit-minutes 20] [--minutes 9] [--continue] [--results FILE]
                                     [--tiny] [--json]

single: a Llama of 25 million parameters on the CPU, one process each. Contenders take turns, step by step, after two that
don't count; medians of --steps rounds, and of the ratio within a round, which a shared machine disturbs least, by the clock and by
the processor's time (where others keep the machine busy only the latter means anything, with OMP_NUM_THREADS=1). All run
as installed; `keeping freed memory` gives the others glibc's mallopt setting too, which the trainer makes on a CPU.
With --mixture a Mixtral of 34 million parameters in its place: 8 experts in each of 4 layers, of which a token goes to 2; or, fine-grained,
64 of a quarter of the width, of which it goes to 8.
parallel: step time at TP2, PP2, DP2 on gloo, and the share of it in which a rank waits for communication.
gpu: on one GPU, in bf16 and FP8, sequences of 4096: Llamas of 1B and 3B, 8 of the 32 layers of an 8B, the 8B with adapters, a small
mixture; plain and compiled, beside transformers with torch.compile and Megatron core. Tokens/s, MFU against the data sheet's dense
bf16 peak, and peak memory. on_gpu.py has the models; MODEL takes some of them. Each measurement has a process and a time limit. Its
result is a line of FILE (build/trainer-gpu.jsonl) as soon as it is there, whatever happens to the others. With --minutes, all of them end
after this time. With --continue, measurements with a result in FILE are left out, and those that failed come last.
"""

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from turns import ROOT, Figures, answer, environment, rounds

try:
    import torch
    from contenders import (
        SMALL,
        TINY,
        Step,
        add_mixture,
        batch,
        chosen,
        core_step,
        ours,
        transformers_step,
    )
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; install this clone: pip install '.[train,data]'") from missing

from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.parallel.grid import make_grid
from megatron_lite.processes.launch import keep_freed_memory
from megatron_lite.settings.options import ModelOptions, OptimizerOptions

KEEPING = (("transformers", True), ("megatron-core", True))
CONTENDERS = (("megatron_lite", True), ("transformers", False), ("megatron-core", False), *KEEPING)
"""(who, whether freed memory is kept): the trainer does so by itself on a CPU, the others where they are told to."""
WARM_UP = 2


def one(name: str, dtype: str, tiny: bool, keep: bool, mixture: str | None) -> None:
    """A contender's own process: takes a step for each line that it is sent, and answers with the seconds and its peak."""
    config, rows = chosen(mixture, tiny), 2
    if keep:
        keep_freed_memory()
    step = {"megatron_lite": ours, "transformers": transformers_step, "megatron-core": core_step}[
        name
    ](config, dtype, rows)
    for _ in range(WARM_UP):
        step()

    def turn() -> Figures:
        cpu = time.process_time()
        seconds = _timed(step)
        return {
            "tokens_per_second": rows * config.max_positions / seconds,
            "tokens_per_cpu_second": rows * config.max_positions / (time.process_time() - cpu),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    answer(turn)


def _timed(step: Step, settle: Step = lambda: None) -> float:
    begun = time.perf_counter()
    step()
    settle()
    return time.perf_counter() - begun


def measure(step: Step, steps: int, settle: Step = lambda: None) -> float:
    """Median seconds of a step."""
    for _ in range(WARM_UP):
        step()
    settle()
    return statistics.median(_timed(step, settle) for _ in range(steps))


def single(steps: int, tiny: bool, dtype: str, mixture: str | None) -> dict[str, Any]:
    """All contenders are there at once and take one step after the other, so that a busy machine is busy for each."""
    commands = {
        (name, keep): [sys.executable, __file__, "one", name, "--dtype", dtype]
        + ["--tiny"] * tiny
        + ["--keep"] * keep
        + (["--mixture", mixture] if mixture else [])
        for name, keep in CONTENDERS
    }
    all_rounds, found = rounds(commands, steps), {}
    for who in commands:
        named = found[who[0] + (", keeping freed memory" if who in KEEPING else "")] = {}
        for unit in ("second", "cpu_second"):
            key = f"tokens_per_{unit}"
            ratios = [taken["megatron_lite", True][key] / taken[who][key] for taken in all_rounds]
            named[key] = round(statistics.median(taken[who][key] for taken in all_rounds), 1)
            named[f"ours_is_times_by_{unit}"] = (
                f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        named["peak_GB"] = round(max(taken[who]["peak_bytes"] for taken in all_rounds) / 1e9, 2)
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-3000:]}")
    return done.stdout


def parallel(steps: int, tiny: bool) -> dict[str, Any]:
    layouts = {"one process": (1, 1, 1), "TP2": (2, 1, 1), "PP2": (1, 2, 1), "DP2": (1, 1, 2)}
    found = {}
    for label, sizes in layouts.items():
        launch = (
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(max(sizes))]
            if max(sizes) > 1
            else [sys.executable]
        )
        words = ["rank", *map(str, sizes), "--steps", str(steps), *["--tiny"] * tiny]
        found[label] = json.loads(_run([*launch, __file__, *words]).splitlines()[-1])
    return found


def rank(tp: int, pp: int, dp: int, steps: int, tiny: bool) -> None:
    """One process of `parallel`: four microbatches a step, one thread."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    keep_freed_memory()
    config = TINY if tiny else SMALL
    if tp * pp * dp > 1:
        dist.init_process_group("gloo")
    clock = _time_communication()
    each = config.layer_count // pp
    grid = make_grid(Layout(tp, pp, stage_layers=(each,) * pp), dp, torch.device("cpu"))
    engine = Engine(
        config,
        grid,
        ModelOptions(dtype="float32", vocab_divisor=1),
        OptimizerOptions(distributed=dp > 1),
    )
    init_weights(engine, 0.02, 0)
    data = [batch(config, 1)] * (4 // dp)
    waited: list[float] = []

    def step() -> None:
        clock[0] = 0.0
        engine.train_step(data, 1e-4)
        engine.finish()
        waited.append(clock[0])

    seconds = measure(step, steps)
    if grid.rank == 0:
        print(
            json.dumps(
                {
                    "step_ms": round(seconds * 1e3, 1),
                    "communication": round(statistics.median(waited[WARM_UP:]) / seconds, 3),
                }
            )
        )
    if tp * pp * dp > 1:
        dist.barrier()
        dist.destroy_process_group()


def _time_communication() -> list[float]:
    """[seconds that this process has spent in collectives and waiting for messages]."""
    from megatron_lite.parallel import comm

    clock = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **words: Any) -> Any:
            begun = time.perf_counter()
            work = call(*arguments, **words)
            clock[0] += time.perf_counter() - begun
            return _Waiting(work, clock) if hasattr(work, "wait") else work

        return run

    for name in (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "send",
        "receive",
        "gathered",
        "scattered",
    ):
        setattr(comm, name, timed(getattr(comm, name)))
    return clock


class _Waiting:
    """A message under way."""

    def __init__(self, work: Any, clock: list[float]) -> None:
        self._work, self._clock = work, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self) -> Any:
        begun = time.perf_counter()
        done = self._work.wait()
        self._clock[0] += time.perf_counter() - begun
        return done


SOFTWARE = (
    "torch", "triton", "transformers", "megatron-core", "flash-attn", "flash-attn-3", "flash-attn-4", "transformer-engine",
)  # fmt: skip
"""Packages whose versions change the figures."""


def gpu(
    models: Sequence[str],
    steps: int,
    limit_s: float,
    total_s: float,
    results: Path,
    *,
    continues: bool,
    tiny: bool,
) -> dict[str, Any]:
    """Measure each model and contender in a process of its own. models: their names; none: all.

    continues: measurements with a result in the file are left out.
    """
    import measurements
    import on_gpu

    known = on_gpu.models()
    for name in models:
        if name not in known:
            raise SystemExit(f"unknown model {name!r}; take one of: {', '.join(known)}")
    if not torch.cuda.is_available() and not tiny:
        raise SystemExit(
            f"this measurement needs a CUDA device, and torch {torch.__version__} finds none: does nvidia-smi show one, "
            "and is its driver as new as the CUDA of this torch? --tiny tests the measurement on a CPU"
        )
    script = str(ROOT / "benchmarks/on_gpu.py")
    commands = {
        f"{'tiny ' if tiny else ''}{name}: {contender}": [
            sys.executable, script, name, contender, "--steps", str(steps), *["--tiny"] * tiny,
        ]
        for name in models or known
        for contender in known[name].contenders
    }  # fmt: skip
    if continues:
        commands = measurements.without_result(commands, results)
    measurements.exit_at_sigterm()
    print(f"results go to {results}", file=sys.stderr, flush=True)
    software = _software()
    measurements.append(results, {"software": software})
    return {"software": software, **measurements.run_all(commands, limit_s, results, total_s)}


def _software() -> dict[str, str]:
    """Return the versions of the installed packages that change the figures."""
    found = {}
    for name in SOFTWARE:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("single", "parallel", "gpu", "one", "rank"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    add_mixture(parser)
    parser.add_argument("--limit-minutes", type=float, default=20, help="of one measurement")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of all measurements")
    parser.add_argument("--continue", action="store_true", dest="continues")
    parser.add_argument("--results", type=Path, default=ROOT / "build/trainer-gpu.jsonl")
    for word in ("--tiny", "--keep", "--json"):
        parser.add_argument(word, action="store_true")
    args = parser.parse_args()
    if args.what == "one":
        one(args.rest[0], args.dtype, args.tiny, args.keep, args.mixture)
    elif args.what == "rank":
        rank(*map(int, args.rest), args.steps, args.tiny)
    else:
        found = {
            "single": lambda: single(args.steps, args.tiny, args.dtype, args.mixture),
            "parallel": lambda: parallel(args.steps, args.tiny),
            "gpu": lambda: gpu(
                args.rest,
                args.steps,
                60 * args.limit_minutes,
                60 * args.minutes,
                args.results,
                continues=args.continues,
                tiny=args.tiny,
            ),
        }[args.what]()
        machine = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
        if args.json:
            print(json.dumps({"machine": machine, **found}, indent=1))
        else:
            print(machine)
            for label, figures in found.items():
                print(f"{label:<40} {figures}")


if __name__ == "__main__":
    main()
