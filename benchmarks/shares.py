"""The processor's time of a training step by kind: matrix products, attention, everything else; also for transformers
and Megatron core.

    python benchmarks/shares.py [--steps 5] [--mixture [fine-grained]] [--compile] [--tiny] [--top 12] [--json]

The models of trainer.py, one thread. Every operation of PyTorch is timed by the processor's clock of its thread, below autograd, so that
other programs of a busy machine don't count and backward passes do. Shares are of the sum over all operations; `outside` is what a step
takes beside them, in Python and autograd: of the step when nothing is timed, so that the timing isn't part of it. Contenders take turns.

With --compile ours and transformers with each layer compiled by torch.compile are there too. Of what was compiled only products and
attention are seen as operations: everything else is the rest of the same step, in which Python and the timing are, so at most that.
`start_up_s` is the processor's time up to the end of the first step, compilers' too; with an empty TORCHINDUCTOR_CACHE_DIR that of
a first run.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from contenders import add_mixture, chosen, core_step, ours, transformers_step
from torch.utils._python_dispatch import TorchDispatchMode
from trainer import WARM_UP
from turns import Figures, answer, rounds

from megatron_lite.processes.launch import keep_freed_memory

CONTENDERS = {"megatron_lite": ours, "transformers": transformers_step, "megatron-core": core_step}
COMPILED = {
    "megatron_lite": partial(ours, compile=True),
    "transformers": partial(transformers_step, compiled=True),
}
COMPILED_REST = "compiled, and outside of operations"
GROUPED = (
    "_grouped_mm",
    "transformers.grouped_mm_fallback",
    "transformers.grouped_mm_fallback_backward",
)
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", *GROUPED)
ROWS = 2


class Clock(TorchDispatchMode):
    """Seconds of the thread that each operation has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that compiled code runs although operations are watched."""
        return True

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        begun = time.thread_time()
        found = function(*arguments, **(named or {}))
        self.seconds[str(function.overloadpacket).removeprefix("aten.")] += (
            time.thread_time() - begun
        )
        return found


def one(name: str, tiny: bool, mixture: str | None, compiled: bool) -> None:
    """A contender's own process."""
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # compilers are children then, whose time is known
    keep_freed_memory()
    config = chosen(mixture, tiny)
    begun = _with_children()
    step = (COMPILED if compiled else CONTENDERS)[name](config, "float32", ROWS)
    step()
    start_up = _with_children() - begun
    for _ in range(WARM_UP):
        step()

    def turn() -> Figures:
        plain, clock = _seconds(step), Clock()
        with clock:
            timed = _seconds(step)
        rest = {COMPILED_REST: timed - sum(clock.seconds.values())} if compiled else {}
        return {"step": plain, "operations": clock.seconds | rest, "start_up": start_up}

    answer(turn)


def _with_children() -> float:
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _seconds(step: Callable[[], None]) -> float:
    begun = time.process_time()
    step()
    return time.process_time() - begun


def kind(operation: str) -> str:
    if "scaled_dot_product" in operation:
        return "attention"
    return "products" if operation in PRODUCTS else "others"


def measure(
    steps: int, tiny: bool, mixture: str | None, compiled: bool, top: int
) -> dict[str, Any]:
    words = ["--tiny"] * tiny + (["--mixture", mixture] if mixture else [])
    commands = {name: [sys.executable, __file__, "--one", name, *words] for name in CONTENDERS}
    if compiled:
        commands |= {f"{name}, compiled": [*commands[name], "--compile"] for name in COMPILED}
    all_rounds = rounds(commands, steps)
    return {name: summary([taken[name] for taken in all_rounds], top) for name in commands}


def summary(turns: list[Figures], top: int) -> dict[str, Any]:
    """Medians over the turns."""
    names = {name for turn in turns for name in turn["operations"]}
    seconds = {
        name: statistics.median(turn["operations"].get(name, 0.0) for turn in turns)
        for name in names
    }
    step, whole = statistics.median(turn["step"] for turn in turns), sum(seconds.values())
    shares = dict.fromkeys(("products", "attention", "others"), 0.0)
    for name, took in seconds.items():
        shares[kind(name)] += took / whole
    most = sorted(
        (name for name in names if kind(name) == "others"), key=lambda name: -seconds[name]
    )[:top]
    return {
        "step_cpu_ms": round(1e3 * step),
        "operations_ms": round(1e3 * whole),
        "outside_ms": round(1e3 * (step - whole)),
        "start_up_s": round(turns[0]["start_up"], 1),
        **{name: f"{share:.1%}" for name, share in shares.items()},
        "most of the others, ms": {name: round(1e3 * seconds[name], 1) for name in most},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--top", type=int, default=12)
    add_mixture(parser)
    for word in ("--tiny", "--compile", "--json"):
        parser.add_argument(word, action="store_true")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        one(given.one, given.tiny, given.mixture, given.compile)
        return
    found = measure(given.steps, given.tiny, given.mixture, given.compile, given.top)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, figures in found.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:<26} {value}")


if __name__ == "__main__":
    main()
