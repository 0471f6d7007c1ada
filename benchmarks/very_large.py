"""Planning at the size of the largest open models: DeepSeek-V3 (671 billion parameters) and a Llama of 405 billion.

    python benchmarks/very_large.py [--dir /some/disk] [--models deepseek_v3 llama_405b] [--runs 3] [--json]

Makes each model as sparse files, which hold headers and no weights and take next to no room: as Hugging Face's safetensors,
as `torch_dist`, and as rank files. Then runs whole cold processes that read no weight: `inspect`, a layout that can't be
sharded, and dry runs. Reports the medians of their seconds and processor seconds, and the most memory that any took (its
peak resident set, sampled).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from formats.output import FileLayout
from formats.safetensors import SafetensorsLayout, index_json, shard
from formats.tensor import byte_count
from megaconv.engine.opening import open_source
from megaconv.families import family_of_hf
from megaconv.input import find_input
from megaconv.model.ir import Header
from megaconv.model.layout import Chunk, LayerSplit, Layout
from megaconv.model.naming import HF
from megaconv.model.natives import native_tensors
from megaconv.options import SaveOptions
from megaconv.registry import saver

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""Source: config.json of deepseek-ai/DeepSeek-V3, without its quantization."""
LLAMA_405B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
"""Source: config.json of meta-llama/Llama-3.1-405B."""


class Model(NamedTuple):
    config: Mapping[str, Any]
    shard_bytes: int
    """The bytes of one safetensors file."""
    impossible: tuple[str, ...]
    """A layout that the model can't be sharded to."""
    many: tuple[str, ...]
    """One of very many ranks."""
    stored: dict[str, Any]
    """The layout of the rank files that are read."""


MODELS = {
    "deepseek_v3": Model(
        DEEPSEEK_V3,
        7_960_000_000,
        ("--tp", "8", "--ep", "48"),
        ("--tp", "8", "--ep", "64", "--pp", "16", "--decoder-last-pipeline-num-layers", "1"),
        {"tp": 1, "ep": 8, "pp": 16, "split": LayerSplit(last=1)},
    ),
    "llama_405b": Model(
        LLAMA_405B, 5_000_000_000, ("--tp", "48"), ("--tp", "8", "--pp", "126"), {"tp": 8, "pp": 9}
    ),
}


def make_sparse(directory: Path, files: Mapping[str, FileLayout]) -> None:
    """Write the files that a saver lays out, without tensors."""
    for name, layout in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(layout.size)
            for offset, data in layout.headers(defaultdict(int)):
                # Checksums of zero are not compared.
                file.seek(offset)
                file.write(data)


def make_hugging_face(directory: Path, model: Model) -> None:
    table = family_of_hf(model.config, "config.json")
    config = replace(table.read_hf(model.config), mtp_layers=0)  # as transformers saves it
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    natives = native_tensors(table.rows, config, HF, Layout(), 0, whole, config.vocab)
    tensors = [(n.name, n.shape, "bfloat16") for n in natives if n.copy is None or n.copy.written]
    shards = shard(tensors, model.shard_bytes)
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    files: dict[str, FileLayout] = {}
    where: dict[str, str] = {}
    for file, members in zip(names, shards, strict=True):
        files[file] = SafetensorsLayout({name: (shape, dtype) for name, shape, dtype in members})
        where |= {name: file for name, _, _ in members}
    make_sparse(directory, files)
    total = sum(byte_count(shape, dtype) for _, shape, dtype in tensors)
    (directory / "model.safetensors.index.json").write_bytes(index_json(where, total))
    (directory / "config.json").write_text(json.dumps(model.config))


def make_megatron(directory: Path, header: Header, **options: Any) -> None:
    make_sparse(directory, saver("core").plan(header, SaveOptions(**options)).files)


def make_all(root: Path, model: Model) -> dict[str, Path]:
    """The three forms of a model."""
    made = {form: root / form for form in ("hf", "torch_dist", "rank_files")}
    if not made["hf"].exists():
        make_hugging_face(made["hf"], model)
    if not made["torch_dist"].exists():
        source = open_source(find_input(made["hf"]))
        make_megatron(made["torch_dist"], source.header, ckpt_format="torch_dist")
        make_megatron(made["rank_files"], source.header, **model.stored)
    return made


class Measured(NamedTuple):
    seconds: float
    processor: float
    peak_mb: float
    status: int


def measure(arguments: list[str]) -> Measured:
    """One whole process."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "megaconv", *arguments], stdout=subprocess.DEVNULL, env=environment
    )
    ended: list[tuple[float, int, Any]] = []

    def wait() -> None:
        _, status, usage = os.wait4(process.pid, 0)
        ended.append((time.perf_counter() - started, os.waitstatus_to_exitcode(status), usage))

    waiting, peak = threading.Thread(target=wait), 0
    waiting.start()
    # What the system itself says at the end (ru_maxrss) counts the process that started this one, too.
    while waiting.is_alive():
        with suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(
                [
                    peak,
                    *(
                        int(line.split()[1])
                        for line in status.splitlines()
                        if line.startswith("VmHWM")
                    ),
                ]
            )
        waiting.join(0.02)
    [(seconds, process.returncode, usage)] = ended
    return Measured(seconds, usage.ru_utime + usage.ru_stime, peak / 1000, process.returncode)


def commands(made: Mapping[str, Path], model: Model) -> dict[str, list[str]]:
    to_core = ["--saver", "core", "--save-dir", str(made["hf"].parent / "out"), "--dry-run"]
    found: dict[str, list[str]] = {}
    for form, path in made.items():
        source = ["convert", "--load-dir", str(path)]
        found |= {
            f"{form}: inspect": ["inspect", str(path)],
            f"{form}: refused": [*source, *to_core, *model.impossible],
            f"{form}: dry run to torch_dist": [
                *source,
                *to_core,
                "--ckpt-format",
                "torch_dist",
                "--pp",
                "1",
                "--ep",
                "1",
            ],
            f"{form}: dry run to torch_dist for many": [
                *source,
                *to_core,
                "--ckpt-format",
                "torch_dist",
                *model.many,
            ],
            f"{form}: dry run to many ranks": [*source, *to_core, *model.many],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, help="where the files are made, and kept; otherwise they are temporary"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="only commands whose name has this in it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.models:
            made = make_all((options.dir or Path(temporary)) / name, MODELS[name])
            for command, arguments in commands(made, MODELS[name]).items():
                if options.only not in command:
                    continue
                runs = [measure(arguments) for _ in range(options.runs)]
                expected = 2 if command.endswith("refused") else 0
                if {run.status for run in runs} != {expected}:
                    sys.exit(
                        f"{' '.join(arguments)}: ended with {runs[0].status}, expected {expected}"
                    )
                found = {
                    "seconds": statistics.median(run.seconds for run in runs),
                    "processor": statistics.median(run.processor for run in runs),
                    "peak_mb": max(run.peak_mb for run in runs),
                }
                results[f"{name}, {command}"] = found
                if not options.json:
                    numbers = f"{found['seconds']:7.2f} s {found['processor']:7.2f} s {found['peak_mb']:7.0f} MB"
                    print(f"{name + ', ' + command:<48} {numbers}", flush=True)
    if options.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
