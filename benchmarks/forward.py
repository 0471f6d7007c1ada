"""`verify --forward` beside transformers' forward pass of the same tokens: memory, processor time, and the logits.

    python benchmarks/forward.py [--layers 22] [--rounds 2] [--tiny] [--json] [--dir /fast/disk]

Makes the Llama of benchmarks/convert.py (1.1 billion parameters in bf16 with 22 layers) with normally distributed weights. Both
sides compute 32 tokens in fp32 on one thread, each in a process of its own, in turns. The processor time and the anonymous memory
count from the opening of the checkpoint to the logits; imports come before. The difference is that of the logits, divided
by the largest of them.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from convert import SIZES, make_model
from delta import SIGMA, WEIGHTS, as_bf16
from turns import environment

WAYS = ("megaconv", "transformers")
WINDOW = 32
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
ELEMENTS = 1 << 22
INTERVAL_S = 0.005


def write_model(path: Path, layers: int) -> int:
    """Write a model with finite weights. Returns the number of its parameters."""
    elements = make_model(path, layers) // 2
    random = np.random.default_rng(0)
    with (path / WEIGHTS).open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        for start in range(0, elements, ELEMENTS):
            count = min(ELEMENTS, elements - start)
            values = random.standard_normal(count, dtype=np.float32) * np.float32(SIGMA)
            file.write(as_bf16(values).tobytes())
    return elements


def anonymous_bytes() -> int:
    """The anonymous memory of this process: mapped files don't count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise SystemExit("the kernel doesn't report anonymous memory")


class Watch:
    """Samples the anonymous memory of this process in a thread, until it is read."""

    def __init__(self) -> None:
        self._begin = anonymous_bytes()
        self._most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.is_set():
            self._most = max(self._most, anonymous_bytes() - self._begin)
            time.sleep(INTERVAL_S)

    def peak_bytes(self) -> int:
        """The most memory above that at the start."""
        self._over.set()
        self._thread.join()
        return self._most


def processor_seconds() -> float:
    """Processor time of this process so far, of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def by_megaconv(model: str) -> Any:
    """Logits as `verify --forward` computes them."""
    import torch

    from megatron_lite.checkpoint.restore import open_weights
    from megatron_lite.forward.opening import open_streamed
    from megatron_lite.forward.rows import batches, built_in_tokens

    start = open_weights(model)
    tensors = {key.name: tensor for key, tensor in start.tensors.items()}
    engine = open_streamed(
        model, start.config, tensors, "float32", torch.device("cpu"), 4 << 30, WINDOW
    )
    (batch,) = batches(start.config, [built_in_tokens(start.config.vocab, WINDOW)], 1)
    return engine.logits(batch)


def by_transformers(model: str) -> Any:
    """Logits of transformers, which loads the model first."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_lite.forward.rows import built_in_tokens

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.tensor([built_in_tokens(loaded.config.vocab_size, WINDOW)])
    return loaded(input_ids=tokens).logits


def turn(way: str, model: str, target: str) -> None:
    """Compute one turn in this process, save the logits, and print the figures."""
    import torch

    import megatron_lite.forward.verification  # noqa: F401

    if way != "megaconv":
        from transformers import AutoModelForCausalLM  # noqa: F401
    torch.set_num_threads(1)
    watch, begun = Watch(), processor_seconds()
    with torch.inference_mode():
        logits = (by_megaconv if way == "megaconv" else by_transformers)(model)
    figures = {
        "processor_seconds": processor_seconds() - begun,
        "anonymous_bytes": watch.peak_bytes(),
    }
    np.save(target, logits.reshape(WINDOW, -1).numpy())
    print(json.dumps(figures))


def measured(way: str, model: Path, target: Path) -> dict[str, float]:
    """The figures of one turn in a process of its own."""
    command = [sys.executable, __file__, "--turn", way, str(model), str(target)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def compare(work: Path, layers: int, rounds: int) -> dict[str, Any]:
    """All figures: the least processor time and the largest memory of each way, and the difference of their logits."""
    parameters = write_model(work / "model", layers)
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            turns[way].append(measured(way, work / "model", work / f"{way}.npy"))
    ours, theirs = (np.load(work / f"{way}.npy").astype(np.float64) for way in WAYS)
    figures = {
        way: {
            "processor_seconds": min(each["processor_seconds"] for each in found),
            "anonymous_bytes": max(each["anonymous_bytes"] for each in found),
        }
        for way, found in turns.items()
    }
    largest = float(np.abs(theirs).max())
    difference = float(np.abs(ours - theirs).max())
    return {
        "parameters": parameters,
        "tokens": WINDOW,
        "difference": difference / largest,
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a model for tests, of 2 layers")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--turn", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        turn(*args.turn)
        return
    if args.tiny:
        SIZES.update(TINY)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = compare(Path(folder), 2 if args.tiny else args.layers, args.rounds)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{found['parameters']:,} parameters, {found['tokens']} tokens")
    for way in WAYS:
        memory = found[way]["anonymous_bytes"] / 2**20
        print(f"{way:<14} {memory:9,.0f} MiB {found[way]['processor_seconds']:8.1f} s")
    print(f"largest difference of logits: {found['difference']:.1e}")


if __name__ == "__main__":
    main()
