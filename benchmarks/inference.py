"""Tokens per second of generation beside transformers, and of the server with one client and with sixteen.

    python benchmarks/inference.py generate [--rounds 7] [--new-tokens 32] [--json]
    python benchmarks/inference.py serve [--rounds 5] [--new-tokens 32] [--json]

Both on a Llama of 27 million parameters (8 layers of 384, vocabulary 16384) in float32 on the CPU, one thread, prompts of 64 tokens.
generate: greedy, at batch 1 and 8; transformers with its dynamic and with its static cache, everything in one process. Contenders
take turns, so that a busy machine is busy for each; tokens per second of the processor's time, medians of rounds, and the median of the
ratio within a round.
serve: a server of 16 slots; rounds with one client and with sixteen take turns, each client asks twice, one answer after the other.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_lite.inference.batching import generate
from megatron_lite.inference.commands.generate import parser
from megatron_lite.inference.opening import open_model
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.processes import launch
from megatron_lite.settings.parallel import Parallel

ROOT = Path(__file__).parents[1]
PROMPT, VOCAB, LONGEST = 64, 16384, 512
BATCHES, CLIENTS = (1, 8), (1, 16)

Rows = list[list[int]]


def save(directory: Path) -> Any:
    """The model of transformers, whose files are in the directory afterwards; there is no tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    settings = LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6, vocab_size=VOCAB,
        max_position_embeddings=LONGEST, bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(settings).eval()
    model.save_pretrained(directory)
    return model


def prompts(count: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count, PROMPT), generator=generator).tolist()


def generators(directory: Path, new_tokens: int) -> dict[str, Callable[[Rows], Rows]]:
    theirs = save(directory)
    words = (
        "--load",
        str(directory),
        "--tokenizer-type",
        "NullTokenizer",
        "--slots",
        str(max(BATCHES)),
    )
    flags = parser().parse_args(words)
    ours = open_model(flags, Parallel(), launch.start(Parallel())).model

    def megatron_lite(rows: Rows) -> Rows:
        answers = generate(ours, [Request(tuple(row), new_tokens, Sampling(0)) for row in rows])
        return [answer.tokens for answer in answers]

    def with_cache(kind: str) -> Callable[[Rows], Rows]:
        def run(rows: Rows) -> Rows:
            ids = torch.tensor(rows)
            found = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, cache_implementation=kind,
                disable_compile=True, pad_token_id=0,
            )  # fmt: skip
            return found[:, PROMPT:].tolist()

        return run

    return {
        "megatron_lite": megatron_lite, "transformers, dynamic": with_cache("dynamic"), "transformers, static": with_cache("static")
    }  # fmt: skip


def compare(rounds: int, new_tokens: int, directory: Path) -> dict[str, Any]:
    contenders = generators(directory, new_tokens)
    found: dict[str, Any] = {}
    for batch in BATCHES:
        # The first round is not timed.
        answers = {name: run(prompts(batch, 0)) for name, run in contenders.items()}
        equal = all(answer == answers["megatron_lite"] for answer in answers.values())
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds):
            turns = list(contenders.items())
            for name, run in turns if number % 2 else turns[::-1]:
                begun = time.process_time()
                run(prompts(batch, number + 1))
                speeds[name].append(batch * new_tokens / (time.process_time() - begun))
        found[f"batch {batch}"] = {
            name: statistics.median(values) for name, values in speeds.items()
        } | {
            f"ratio to {name}": statistics.median(
                mine / theirs for mine, theirs in zip(speeds["megatron_lite"], values, strict=True)
            )
            for name, values in speeds.items()
            if name != "megatron_lite"
        }
        found[f"batch {batch}"]["same tokens"] = equal
    return found


def serve(rounds: int, new_tokens: int, directory: Path) -> dict[str, Any]:
    save(directory)
    words = [
        "-m", "megatron_lite", "serve", "--load", str(directory), "--port", "0", "--slots", str(max(CLIENTS)),
        "--tokenizer-type", "NullTokenizer",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split("127.0.0.1:")[1].split(",")[0])
        asyncio.run(_clients(port, 2, new_tokens))
        speeds: dict[int, list[float]] = {count: [] for count in CLIENTS}
        for number in range(rounds):
            for count in CLIENTS if number % 2 else CLIENTS[::-1]:
                begun = time.perf_counter()
                tokens = asyncio.run(_clients(port, count, new_tokens))
                speeds[count].append(tokens / (time.perf_counter() - begun))
    finally:
        process.terminate()
        process.wait()
    ratios = [many / one for one, many in zip(*speeds.values(), strict=True)]
    return {f"{count} clients": statistics.median(values) for count, values in speeds.items()} | {
        "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)
    }  # fmt: skip


async def _clients(port: int, count: int, new_tokens: int) -> int:
    """Tokens that came for all of them."""
    return sum(await asyncio.gather(*(_client(port, row, new_tokens) for row in prompts(count, 0))))


async def _client(port: int, row: list[int], new_tokens: int) -> int:
    body = json.dumps({"prompt": row, "max_tokens": new_tokens, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    tokens = 0
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        answer = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        tokens += json.loads(answer)["usage"]["completion_tokens"]
    return tokens


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("what", choices=("generate", "serve"))
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--new-tokens", type=int, default=32)
    flags.add_argument("--json", action="store_true")
    given = flags.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = (compare if given.what == "generate" else serve)(
            given.rounds, given.new_tokens, Path(directory)
        )
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        shown = value.items() if isinstance(value, dict) else [("", value)]
        for part, figure in shown:
            print(
                f"{name:<12} {part:<32} {figure if isinstance(figure, bool) else format(figure, '.2f')}"
            )


if __name__ == "__main__":
    main()
