"""Every direction of `megaconv convert`, each beside `cp` of the same bytes, in turns.

    python benchmarks/convert.py [--layers 22] [--runs 5] [--only NAME ...] [--dir /fast/disk] [--peers] [--json]

Makes a Llama of 1.1 billion random bf16 parameters (2.2 GB), and from it a Megatron core checkpoint (TP 2, PP 2), one in
torch_dist (TP 2) and, for the cast, the same model in fp32. Then alternates whole cold processes: `cp` and fsync of the
copy, and a conversion (which computes checksums and fingerprints, and fsyncs all it writes). The cast is compared with `cp`
of the larger side, its output. Each starts with its source in the page cache, nothing waiting to be written and, as after
`pip install`, with its modules compiled; the first round warms up and measures memory, and every other round has `cp` last.

Reports the median time of each, the median of the ratios to the `cp` beside it (so that a disk that slows down for a while
does not count), the processor seconds of both, and the peak of anonymous memory, sampled from /proc. Judge processor seconds
beside those of `cp`: the kernel's part of a copy differs by a factor of three between machines. --peers adds loading and
saving by transformers.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
COPY = "cp -r {source} {target} && find {target} -type f -exec sync {{}} +"
TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).save_pretrained(sys.argv[2])
"""


def make_model(path: Path, layers: int) -> int:
    """A random Llama, written with nothing but numpy; returns its bytes."""
    import numpy as np

    hidden, ffn, vocab = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"]
    kv = SIZES["num_key_value_heads"] * (hidden // SIZES["num_attention_heads"])
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shapes |= {
            name + f"self_attn.{word}_proj.weight": (rows, hidden)
            for word, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))
        }
        shapes |= {
            name + f"mlp.{word}_proj.weight": shape
            for word, shape in (
                ("gate", (ffn, hidden)),
                ("up", (ffn, hidden)),
                ("down", (hidden, ffn)),
            )
        }
        shapes |= {
            name + f"{word}_layernorm.weight": (hidden,) for word in ("input", "post_attention")
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    path.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        **SIZES,
    }
    config |= {
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config))
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, position, 1 << 24):
            file.write(random.bytes(min(1 << 24, position - start)))
    return position


def run(command: list[str]) -> tuple[float, float]:
    """(seconds, processor seconds) of a whole process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment())
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def environment() -> dict[str, str]:
    """Ours, with modules compiled once and not at every start."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def peak_memory(command: list[str]) -> int:
    """Peak bytes of anonymous memory of a process, sampled; in a run of its own, since looking takes time too."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(
                peak,
                *(
                    int(line.split()[1]) * 1024
                    for line in status.splitlines()
                    if line.startswith("RssAnon")
                ),
            )
        except (OSError, TypeError):
            pass
        time.sleep(0.002)
    if process.returncode:
        sys.exit(f"{command} failed with status {process.returncode}")
    return peak


LAYOUT = ["--tp", "2", "--pp", "2"]
DIRECTIONS = {
    "hf -> core": ["hf", "--saver", "core", *LAYOUT],
    "core -> hf": ["core", "--saver", "hf"],
    "core -> core": ["core", "--saver", "core", "--tp", "4", "--pp", "1"],
    "hf -> torch_dist": ["hf", "--saver", "core", "--ckpt-format", "torch_dist", "--tp", "2"],
    "torch_dist -> hf": ["torch_dist", "--saver", "hf"],
    "torch_dist -> torch": ["torch_dist", "--saver", "core", "--ckpt-format", "torch", *LAYOUT],
    "bf16 -> fp32": ["hf", "--saver", "core", "--dtype", "fp32", *LAYOUT],
    "hf -> core, --verify": ["hf", "--saver", "core", "--verify", *LAYOUT],
}
"""Name -> what is read, and the options."""


def conversion(work: Path, source: str, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "megaconv",
        "convert",
        "--load-dir",
        str(work / source),
        "--save-dir",
        str(work / "out"),
        *options,
    ]


def prepare(work: Path, layers: int, names: list[str]) -> int:
    """Make everything that these directions read or compare with; returns the bytes of the model."""
    size = make_model(work / "hf", layers)
    made = {
        "core": ["--saver", "core", *LAYOUT],
        "torch_dist": ["--saver", "core", "--ckpt-format", "torch_dist", "--tp", "2"],
        "fp32": ["--saver", "hf", "--dtype", "fp32"],
    }
    for place in {DIRECTIONS[name][0] for name in names} | {
        compared_with(name) for name in names
    } - {"hf"}:
        if place in made:
            run(conversion(work, "hf", *made[place]))
            (work / "out").rename(work / place)
    return size


def compared_with(name: str) -> str:
    """The model that `cp` copies for comparison: the larger of input and output."""
    return "fp32" if "fp32" in name else DIRECTIONS[name][0]


def one_pair(
    work: Path, copy: list[str], command: list[str], *, copy_last: bool
) -> list[tuple[float, float]]:
    """(seconds, processor seconds) of the copy and of the command, with a disk that has nothing else to do."""
    pair = {0: copy, 1: command}
    times = {}
    for number in sorted(pair, reverse=copy_last):
        os.sync()
        time.sleep(0.5)
        times[number] = run(pair[number])
        shutil.rmtree(work / "out")
    return [times[0], times[1]]


def measure(work: Path, layers: int, runs: int, names: list[str], peers: bool) -> dict[str, object]:
    size = prepare(work, layers, names)
    commands = {name: conversion(work, *DIRECTIONS[name]) for name in names}
    if peers:
        commands["transformers load + save"] = [
            sys.executable,
            "-c",
            TRANSFORMERS,
            str(work / "hf"),
            str(work / "out"),
        ]
    memory: dict[str, int] = {}
    pairs: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in commands}
    for number in range(runs + 1):
        for name, command in commands.items():
            if not number:
                memory[name] = peak_memory(command)
                shutil.rmtree(work / "out")
                continue
            source = work / (compared_with(name) if name in DIRECTIONS else "hf")
            copy = ["sh", "-c", COPY.format(source=source, target=work / "out")]
            pairs[name].append(one_pair(work, copy, command, copy_last=not number % 2))
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "bytes": size,
        "layers": layers,
        "runs": runs,
        "results": {name: summary(pairs[name], memory[name]) for name in commands},
    }


def summary(pairs: list[list[tuple[float, float]]], memory: int) -> dict[str, object]:
    ratios = [ours / copy for (copy, _), (ours, _) in pairs]
    return {
        "median_s": round(statistics.median(ours for _, (ours, _) in pairs), 3),
        "cp_median_s": round(statistics.median(copy for (copy, _), _ in pairs), 3),
        "ratio_to_cp": round(statistics.median(ratios), 3),
        "all_ratios": [round(ratio, 2) for ratio in ratios],
        "processor_s": round(statistics.median(processor for _, (_, processor) in pairs), 3),
        "cp_processor_s": round(statistics.median(processor for (_, processor), _ in pairs), 3),
        "peak_anonymous_mb": round(memory / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--only",
        action="append",
        choices=list(DIRECTIONS),
        help="this direction alone; may be repeated",
    )
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = measure(
            Path(folder), args.layers, args.runs, args.only or list(DIRECTIONS), args.peers
        )
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['machine']}; {found['bytes']:,} bytes, {args.runs} runs")
    print(f"{'':<26} {'seconds':>17} {'processor seconds':>19}")
    print(
        f"{'':<26} {'cp':>8} {'megaconv':>8} {'cp':>8} {'megaconv':>10} {'ratio':>6} {'memory':>10}"
    )
    for name, row in found["results"].items():  # type: ignore[attr-defined]
        times = f"{row['cp_median_s']:>6.2f} s {row['median_s']:>6.2f} s"
        times += f" {row['cp_processor_s']:>6.2f} s {row['processor_s']:>8.2f} s"
        print(
            f"{name:<26} {times} {row['ratio_to_cp']:>6.2f} {row['peak_anonymous_mb']:>7.1f} MB   {row['all_ratios']}"
        )


if __name__ == "__main__":
    main()
