"""Generation on a CPU beside transformers and llama.cpp: time to the first token, tokens per second, share of the bandwidth.

    LLAMA_CPP_PYTHON=llama/bin/python python benchmarks/cpu_generation.py [--rounds 5] [--new-tokens 12] [--threads 1] [--batch 1]

A Llama of 271 million parameters with random weights (16 layers of 1024, vocabulary 32,000), greedy: one prompt of 64 tokens, or
sixteen of 16.
Contenders: megatron_lite in bf16 and with --quantize q8_0, transformers in bf16 (its forward pass with a dynamic cache, without
`generate`), and llama.cpp in bf16 and q8_0, from files of --saver gguf. llama.cpp runs in a process of its own
(benchmarks/llama_cpp_contender.py), and is left out without LLAMA_CPP_PYTHON. Contenders take turns. Times are of the processor, so
that other programs count less; the figures are medians of rounds. The bandwidth is that of a sum of 256 MiB, in the same rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

import megaconv
from megatron_lite.inference.commands.generate import parser
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.opening import open_model
from megatron_lite.inference.slots import Feed
from megatron_lite.processes import launch
from megatron_lite.settings.parallel import Parallel

ROOT = Path(__file__).parents[1]
VOCAB, LENGTH = 32000, 256
PROMPTS = {1: 64, 16: 16}
"""Batch -> tokens of a prompt."""
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16}
MATRIX_WEIGHTS = 16 * (4 * 1024**2 + 3 * 1024 * 2816) + VOCAB * 1024
"""Weights that a step reads: all but the embedding."""
BYTES = {"bf16": 2.0, "q8_0": 1.0, "llama.cpp q8_0": 34 / 32}


class Times(NamedTuple):
    """Seconds of the prompts, and of all later steps together."""

    first: float
    later: float


Rows = list[list[int]]
Run = Callable[[Rows, int], Times]


def save(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    settings = LlamaConfig(
        **SIZES, num_attention_heads=16, vocab_size=VOCAB, max_position_embeddings=LENGTH,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(settings).bfloat16().save_pretrained(directory)


def megatron_lite(directory: Path, quantize: str | None) -> Run:
    words = ["--load", str(directory), "--dtype", "bf16", "--tokenizer-type", "NullTokenizer"]
    words += ["--slots", str(max(PROMPTS)), "--max-length", str(LENGTH)]
    words += ["--quantize", quantize] if quantize else []
    flags = parser().parse_args(words)
    model: EngineModel = open_model(flags, Parallel(), launch.start(Parallel())).model

    def run(rows: Rows, new_tokens: int) -> Times:
        begun = time.process_time()
        logits = model.extend([Feed(slot, 0, tuple(row)) for slot, row in enumerate(rows)])
        first = time.process_time()
        for step in range(new_tokens - 1):
            chosen = logits.argmax(-1).tolist()
            feeds = [Feed(slot, len(rows[0]) + step, (token,)) for slot, token in enumerate(chosen)]
            logits = model.extend(feeds)
        return Times(first - begun, time.process_time() - first)

    return run


def transformers(directory: Path) -> Run:
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    def run(rows: Rows, new_tokens: int) -> Times:
        with torch.inference_mode():
            begun = time.process_time()
            cache = DynamicCache()
            ids = torch.tensor(rows)
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            first = time.process_time()
            for _ in range(new_tokens - 1):
                ids = logits.argmax(-1, keepdim=True)
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            return Times(first - begun, time.process_time() - first)

    return run


def llama_cpp(python: str, directory: Path, kind: str, threads: int) -> Run:
    output = directory.parent / f"gguf-{kind}"
    options = {"gguf_type": kind, "tokenizer": "none"}
    megaconv.convert(directory, output, saver="gguf", options=options)
    [file] = output.glob("*.gguf")
    words = [python, "-m", "benchmarks.llama_cpp_contender", str(file), str(threads)]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def run(rows: Rows, new_tokens: int) -> Times:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([rows, new_tokens]), file=process.stdin, flush=True)
        return Times(*json.loads(process.stdout.readline()))

    return run


def bandwidth(numbers: torch.Tensor) -> float:
    """Return bytes per second of processor time and thread."""
    begun = time.process_time()
    numbers.sum()
    return numbers.nbytes / (time.process_time() - begun)


def measure(
    contenders: dict[str, Run], batches: Iterable[int], rounds: int, new_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.ones(64 << 20)
    for batch in batches:
        found: dict[str, list[Times]] = {name: [] for name in contenders}
        speeds = []
        for number in range(-1, rounds):
            rows = torch.randint(0, VOCAB, (batch, PROMPTS[batch]), generator=generator).tolist()
            speeds.append(bandwidth(numbers))
            for name, run in list(contenders.items())[:: 1 if number % 2 else -1]:
                times = run(rows, new_tokens)
                if number >= 0:  # the first round doesn't count
                    found[name].append(times)
        print(f"\nbandwidth {statistics.median(speeds) / 1e9:.1f} GB/s", flush=True)
        for name, times in found.items():
            print(_row(batch, name, times, found, statistics.median(speeds), new_tokens))


def _row(
    batch: int,
    name: str,
    times: list[Times],
    found: dict[str, list[Times]],
    speed: float,
    new_tokens: int,
) -> str:
    steps = new_tokens - 1
    later = statistics.median(each.later for each in times) / steps
    kind = name if name in BYTES else name.split()[-1]
    share = MATRIX_WEIGHTS * BYTES[kind] / later / speed
    pairs = zip(times, found["transformers bf16"], strict=True)
    ratio = statistics.median(theirs.later / own.later for own, theirs in pairs)
    first = statistics.median(each.first for each in times)
    return (
        f"batch {batch:<3} {name:<20} first {first:7.3f} s   {batch / later:7.1f} tokens/s   "
        f"{ratio:5.2f} x transformers   {share:5.0%} of the bandwidth"
    )


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--new-tokens", type=int, default=12)
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--batch", type=int, choices=PROMPTS, help="1 or 16 (both)")
    given = flags.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "model"
        save(directory)
        contenders = {
            "megatron_lite bf16": megatron_lite(directory, None),
            "megatron_lite q8_0": megatron_lite(directory, "q8_0"),
            "transformers bf16": transformers(directory),
        }
        if python := os.environ.get("LLAMA_CPP_PYTHON"):
            for kind in ("bf16", "q8_0"):
                contenders[f"llama.cpp {kind}"] = llama_cpp(python, directory, kind, given.threads)
        measure(
            contenders, [given.batch] if given.batch else PROMPTS, given.rounds, given.new_tokens
        )


if __name__ == "__main__":
    main()
