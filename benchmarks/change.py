"""New tokens, experts and fewer channels of a model: `megaconv convert` beside transformers and a plain conversion, in turns.

    python benchmarks/change.py [--layers 8] [--runs 3] [--dir /fast/disk]

Makes a Llama of random bf16 weights. `convert` writes it as it is, `tokens` with 64 tokens more, `experts` as a mixture of four
experts, `channels` with random three quarters of the hidden states and of each MLP. `transformers` adds the same tokens with
resize_token_embeddings, without random numbers. All are whole cold processes. Reports the median time, processor seconds, and
the peak of anonymous memory.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from random import Random

from average import measure
from convert import make_model

MORE = 64
"""Tokens that are added."""
RESIZE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model.resize_token_embeddings(int(sys.argv[3]), mean_resizing=False)
model.save_pretrained(sys.argv[2])
"""


def write_channels(work: Path) -> Path:
    """Write a file that keeps three quarters of all channels."""
    config = json.loads((work / "model" / "config.json").read_text())
    random = Random(0)
    places = {
        f"layers.{layer}.mlp": "intermediate_size" for layer in range(config["num_hidden_layers"])
    }
    keep = {
        place: sorted(random.sample(range(config[size]), config[size] * 3 // 4))
        for place, size in {"hidden": "hidden_size", **places}.items()
    }
    kept = work / "kept.json"
    kept.write_text(json.dumps({"keep": keep}))
    return kept


def commands(work: Path) -> dict[str, list[str]]:
    """The command of each contender. All write `out`."""
    source, out = str(work / "model"), str(work / "out")
    vocab = json.loads((work / "model" / "config.json").read_text())["vocab_size"] + MORE
    ours = [sys.executable, "-m", "megaconv", "convert", source, out, "--saver", "hf"]
    return {
        "convert": ours,
        "tokens": [*ours, "--vocab-size", str(vocab)],
        "transformers": [sys.executable, "-c", RESIZE, source, out, str(vocab)],
        "experts": [*ours, "--num-experts", "4"],
        "channels": [*ours, "--keep-channels", str(write_channels(work))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        work = Path(folder)
        make_model(work / "model", args.layers)
        size = (work / "model" / "model.safetensors").stat().st_size
        print(f"a model of {size:,} bytes, {args.runs} runs")
        for name, line in measure(work, args.runs, commands(work)).items():
            print(f"{name:<12} {line}", flush=True)


if __name__ == "__main__":
    main()
