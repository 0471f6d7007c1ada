"""The checkpoints that are attacked: one small model in every format, made by transformers' and Megatron's rules.

    <root>/sources/hf            safetensors in two files, tokenizer files beside; nothing recorded
    <root>/sources/other         another model of the same sizes: what an output replaces
    <root>/sources/<format>      the same model, written by megaconv, with megaconv.json
    <root>/sources/<format>-bare the same without megaconv.json
    <root>/sources/gguf          the same, written by megaconv, without a tokenizer
    <root>/sources/gguf-words    another one, in Q8_0, with a tokenizer
    <root>/sources/nemo          another one, put together as NeMo 1 unpacks it
    <root>/sources/nemo-archive  the same in a .nemo archive
    <root>/sources/fsdp ...      other models, as verl, DeepSpeed and Orbax wrote them; nothing recorded
    <root>/sources/gguf-experts  another one, as llama.cpp's converter wrote it
    <root>/sources/whole ...     a model that sees, as a whole: in safetensors, rank files and torch_dist
    <root>/sources/peft ...      adapters as peft wrote them, and (adapter ...) as they are written for Megatron-Bridge

`python -m tests.trust.checkpoints DIRECTORY` makes those that need torch, in a process that ends.
"""

import json
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from megaconv.engine.record import RECORD_NAME
from tests.trust import server

SIZES = {"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 8, "vocab": 38}

SAVERS = {
    "core": "--saver core --tp 2 --pp 2",
    "torch_dist": "--saver core --ckpt-format torch_dist --tp 2 --dist-files 2",
    "zarr": "--saver core --ckpt-format zarr --tp 2",
    "legacy": "--saver legacy --tp 2",
    "dcp": "--saver dcp --dist-files 2",
    "hf": "--saver hf --max-shard-size 6KB",
    "meta": "--saver llama_mistral --tp 2",
    "trtllm": "--saver trtllm --tp 2 --pp 2",
    "for-deepspeed": "--saver deepspeed",
    "dcp-optimizer": "--saver dcp --dist-files 2",
    "for-deepspeed-optimizer": "--saver deepspeed",
}
"""Options of every kind of output."""

SOURCES = {"dcp-optimizer": "core-optimizer", "for-deepspeed-optimizer": "core-optimizer"}
"""Kinds of output that are made of another source than `hf`."""
PATCHES = ("delta", "apply")
"""Further outputs: the patch that makes `other` of `hf`, and what it makes."""

OPTIMIZERS = {
    "core-optimizer": ("core-te-llama-optim-tp2pp1", "--saver core --tp 1"),
    "torch_dist-optimizer": (
        "core-te-llama-optim-tp2pp1",
        "--saver core --ckpt-format torch_dist --dist-files 2",
    ),
}
"""Formats with optimizer state: (fixture that Megatron wrote, options)."""

DERIVED = {
    "bridge": "--saver core --ckpt-format torch_dist --option for=megatron-bridge --dist-files 2",
}
"""More kinds of output that are read and damaged, not those that runs are killed at."""

_BRIDGE = "--saver core --ckpt-format torch_dist"
ADAPTERS = {
    "adapter": ("peft-llama-all-linear", f"{_BRIDGE} --tp 2"),
    "adapter-fused": ("peft-llama-all-linear", f"{_BRIDGE} --option lora=fused"),
    "adapter-experts": ("peft-mixtral-experts", _BRIDGE),
}
"""Adapters for Megatron-Bridge: (fixture that peft wrote, options)."""
WHOLES = {"whole-core": "--saver core --tp 2 --pp 2", "whole-dist": f"{_BRIDGE} --tp 2"}
"""Outputs of a model that sees."""

_FIXTURES = Path(__file__).parents[1] / "fixtures"

NEIGHBOURS = {
    "fsdp": "fsdp-verl-dp3",
    "deepspeed": "deepspeed-zero2-llama-tied-groups-dp2/checkpoint",
    "universal": "universal-zero2-llama-tied-groups-dp2",
    "orbax": "orbax-maxtext-scan-bf16/checkpoint",
    "whole": "whole-qwen2_5_vl",
    "peft": "peft-llama-all-linear/adapter",
    "peft-dora": "peft-mixtral-expert-dora/adapter",
    "gguf-experts": "gguf-qwen3moe-bpe",
}
"""Formats that are only read -> fixture that their own software wrote."""

_LLAMA = _FIXTURES / "peft-llama-all-linear/base"
_MIXTRAL = _FIXTURES / "peft-mixtral-experts/base"
_QWEN = _FIXTURES / "gguf-qwen2-bpe/hf"
_READING = {
    "orbax": f"--config {_LLAMA} --option maxtext_rope=split",
    **dict.fromkeys(("nemo", "nemo-archive", "adapter", "adapter-fused"), f"--config {_LLAMA}"),
    "adapter-experts": f"--config {_MIXTRAL}",
    "peft": f"--loader peft --config {_LLAMA}",
    "peft-dora": f"--loader peft --config {_MIXTRAL}",
}
_FILES = {"nemo-archive": "model.nemo", "gguf-experts": "qwen3moe-bpe-bf16.gguf"}
"""The sources that are files instead of directories."""


@dataclass(frozen=True)
class Checkpoint:
    name: str
    path: Path

    @property
    def reading(self) -> str:
        """Options without which it can't be read."""
        return _READING.get(self.name.removesuffix("-bare"), "")

    @property
    def writing(self) -> str:
        """Options of what it is converted to when it was damaged."""
        if self.name.startswith(("adapter", "peft")):
            return "--saver peft"
        return "--saver core --tp 1" if "optimizer" in self.name else "--saver hf"

    def source(self, copy: Path) -> Path:
        """The path to convert, in a copy of the checkpoint."""
        return copy / _FILES.get(self.name, "")

    @property
    def recorded(self) -> bool:
        """True if it has a megaconv.json."""
        return (self.path / RECORD_NAME).is_file()


def make(root: Path, kept: Path | None = None) -> dict[str, Checkpoint]:
    """Everything above, by name. kept: a directory in which it lies from then on, or has been made before."""
    sources = root / "sources"
    if kept is None:
        sources.mkdir()
    else:
        kept.mkdir(exist_ok=True)
        sources.symlink_to(kept.resolve())
    if not any(sources.iterdir()):
        _make(sources)
    return {path.name: Checkpoint(path.name, path) for path in sorted(sources.iterdir())}


def _make(sources: Path) -> None:
    command = [sys.executable, "-m", "tests.trust.checkpoints", str(sources)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    for name, (fixture, options) in OPTIMIZERS.items():
        _convert(_FIXTURES / fixture / "checkpoint", sources / name, options)
    for name, options in SAVERS.items():
        source = sources / SOURCES.get(name, "hf")
        _convert(source, sources / ("hf-written" if name == "hf" else name), options)
    for name, options in DERIVED.items():
        _convert(sources / "hf", sources / name, options)
    _convert(sources / "hf", sources / "gguf", "--saver gguf --option tokenizer=none")
    _convert(_QWEN, sources / "gguf-words", "--saver gguf --option gguf_type=q8_0")
    for name in ("gguf", "gguf-words"):
        (sources / name / "notes.txt").write_text(
            "so that there is another file to exchange it for"
        )
    for name, fixture in NEIGHBOURS.items():
        shutil.copytree(_FIXTURES / fixture, sources / name)
    shutil.rmtree(sources / "gguf-experts/hf")
    (sources / "gguf-experts/notes.txt").write_text(
        "so that there is another file to exchange it for"
    )
    for name, options in WHOLES.items():
        _convert(sources / "whole", sources / name, options)
    for name, (fixture, options) in ADAPTERS.items():
        peft = _FIXTURES / fixture
        _convert(
            peft / "adapter", sources / name, f"--loader peft --config {peft / 'base'} {options}"
        )
    _archive(sources / "nemo", sources / "nemo-archive")
    for path in [path for path in sources.iterdir() if (path / RECORD_NAME).is_file()]:
        shutil.copytree(
            path, sources / f"{path.name}-bare", ignore=shutil.ignore_patterns(RECORD_NAME)
        )


def _archive(unpacked: Path, target: Path) -> None:
    """Pack an archive as NeMo does, with another file beside it."""
    target.mkdir()
    with tarfile.open(target / "model.nemo", "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(unpacked, arcname=".")
    (target / "notes.txt").write_text("of a run")


def _convert(source: Path, target: Path, options: str) -> None:
    done = server.run(
        "convert",
        "--load-dir",
        source,
        "--save-dir",
        target,
        *options.split(),
        "--workers",
        1,
        folder=target.parent,
    )
    assert done.status == 0, done.err


def _make_with_torch(sources: Path) -> None:
    from tests.models import write_llama

    for name, options in {
        "hf": {"shards": 2}, "other": {"shards": 2, "seed": 1}, "bin": {"format": "bin"},
        "legacy_bin": {"format": "legacy_bin", "shards": 2},
    }.items():  # fmt: skip
        path = write_llama(sources / name, **SIZES, **options)  # type: ignore[arg-type]
        (path / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "model_max_length": 64})
        )
        (path / "generation_config.json").write_text(
            json.dumps({"bos_token_id": 1, "eos_token_id": 2})
        )
    _write_nemo(sources / "nemo")


def _write_nemo(target: Path) -> None:
    """Two tensor ranks, of rank files of megaconv's."""
    import torch

    made = target.with_name("nemo-made")
    _convert(_LLAMA, made, "--saver core --tp 2")
    for file in sorted(made.rglob("model_optim_rng.pt")):
        model = torch.load(file, map_location="cpu", weights_only=False)["model"]
        rank = target / f"tp_rank_{file.parent.name.split('_')[2]}_pp_rank_000"
        rank.mkdir(parents=True)
        torch.save(
            {f"model.{name}": value for name, value in model.items()}, rank / "model_weights.ckpt"
        )
    (target / "model_config.yaml").write_text("mcore_gpt: true\n")
    shutil.rmtree(made)


if __name__ == "__main__":
    _make_with_torch(Path(sys.argv[1]))
