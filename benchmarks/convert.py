"""Hugging Face -> Megatron core TP2 PP2, beside `cp` of the same bytes, in one run.

    python benchmarks/convert.py [--layers 22] [--runs 5] [--dir /fast/disk] [--peers] [--json]

Makes a Llama of 1.1 billion random bf16 parameters (2.2 GB), then alternates whole cold processes: `cp` and fsync of
the copy, and `megaconv convert` (which fsyncs all it writes, and computes checksums and fingerprints). Reports medians,
their ratio, and the peak of anonymous memory, sampled from /proc. --peers adds loading and saving by transformers.
"""

import argparse
import json
import os
import platform
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


def run(command: list[str]) -> float:
    """Seconds of a whole process."""
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def peak_memory(command: list[str]) -> int:
    """Peak bytes of anonymous memory of a process, sampled; in a run of its own, since looking takes time too."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
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
    times: dict[str, list[float]] = {name: [] for name in commands}
    peaks: dict[str, int] = dict.fromkeys(commands, 0)
    for _ in range(runs):
        for name, command in commands.items():
            os.sync()
            times[name].append(run(command))
            shutil.rmtree(work / "out")
    for name, command in commands.items():
        peaks[name] = peak_memory(command)
        shutil.rmtree(work / "out")
    base = statistics.median(times["cp + fsync"])
    rows = {
        name: {"median_s": round(statistics.median(values), 3), "all_s": [round(value, 3) for value in values],
               "ratio_to_cp": round(statistics.median(values) / base, 3), "peak_anonymous_mb": round(peaks[name] / 1e6, 1)}
        for name, values in times.items()
    }  # fmt: skip
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
        print(f"{name:<30} {row['median_s']:>7.2f} s   {row['ratio_to_cp']:>5.2f} x cp   {memory}   {row['all_s']}")


if __name__ == "__main__":
    main()
