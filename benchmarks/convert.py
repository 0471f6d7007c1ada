"""Hugging Face -> Megatron core TP2 PP2, beside `cp` of the same bytes, in one run.

    python benchmarks/convert.py [--layers 22] [--runs 5] [--dir /fast/disk] [--peers] [--json]

Makes a Llama of 1.1 billion random bf16 parameters (2.2 GB), then alternates whole cold processes: `cp` and fsync of
the copy, and `megaconv convert` (which fsyncs all it writes, and computes checksums and fingerprints). Each starts with
the source in the page cache, nothing waiting to be written and, as after `pip install`, with its modules compiled; the
first round warms up and does not count, and every other round goes in the opposite order. Reports median times, the
median of the ratios to `cp` within a round (so that a disk that slows down for a while does not count), processor seconds,
and the peak of anonymous memory, sampled from /proc. --peers adds loading and saving by transformers.
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
            for word, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn)))
        }
        shapes |= {name + f"{word}_layernorm.weight": (hidden,) for word in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    path.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers, **SIZES}
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
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
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
                peak, *(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))
            )
        except (OSError, TypeError):
            pass
        time.sleep(0.002)
    if process.returncode:
        sys.exit(f"{command} failed with status {process.returncode}")
    return peak


def one_round(out: Path, commands: dict[str, list[str]], *, backwards: bool) -> dict[str, tuple[float, float]]:
    """Each command once, with a disk that has nothing else to do."""
    times = {}
    for name in reversed(commands) if backwards else commands:
        os.sync()
        time.sleep(0.5)
        times[name] = run(commands[name])
        shutil.rmtree(out)
    return times


def measure(work: Path, layers: int, runs: int, peers: bool) -> dict[str, object]:
    source = work / "model"
    size = make_model(source, layers)
    megaconv = shutil.which("megaconv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if megaconv is None:
        sys.exit("megaconv is not installed beside this Python; pip install -e . first")
    commands = {
        "cp + fsync": ["sh", "-c", COPY.format(source=source, target=work / "out")],
        "megaconv hf -> core TP2 PP2": [
            megaconv,
            "convert",
            "--load-dir",
            str(source),
            "--saver",
            "core",
            "--save-dir",
            str(work / "out"),
            "--tp",
            "2",
            "--pp",
            "2",
        ],
    }
    if peers:
        commands["transformers load + save"] = [sys.executable, "-c", TRANSFORMERS, str(source), str(work / "out")]
    rounds = [one_round(work / "out", commands, backwards=bool(number % 2)) for number in range(runs + 1)][1:]
    rows = {}
    for name, command in commands.items():
        times = [times[name][0] for times in rounds]
        rows[name] = {
            "median_s": round(statistics.median(times), 3),
            "ratio_to_cp": round(statistics.median(times[name][0] / times["cp + fsync"][0] for times in rounds), 3),
            "processor_s": round(statistics.median(times[name][1] for times in rounds), 3),
            "peak_anonymous_mb": round(peak_memory(command) / 1e6, 1),
            "all_s": [round(seconds, 3) for seconds in times],
        }
        shutil.rmtree(work / "out")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "bytes": size,
        "layers": layers,
        "results": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = measure(Path(folder), args.layers, args.runs, args.peers)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['machine']}; {found['bytes']:,} bytes, {args.runs} runs")
    for name, row in found["results"].items():  # type: ignore[attr-defined]
        memory = f"peak anonymous {row['peak_anonymous_mb']:>7.1f} MB"
        times = f"{row['median_s']:>7.2f} s ({row['processor_s']:.2f} s of processors)"
        print(f"{name:<30} {times}   {row['ratio_to_cp']:>5.2f} x cp   {memory}   {row['all_s']}")


if __name__ == "__main__":
    main()
