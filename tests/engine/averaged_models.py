"""Models to average: of three formats, and with norms in two stored forms."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def write_models(place: Path) -> list[Path]:
    """Three models: of Hugging Face, of Megatron core at tp 2, and of Megatron's torch_dist."""
    made = [write_llama(place / f"hf{seed}", seed=seed) for seed in range(3)]
    options = [[], ["--tp", 2], ["--ckpt-format", "torch_dist", "--dist-files", 2]]
    for seed in (1, 2):
        out = place / f"core{seed}"
        assert run("convert", made[seed], out, "--saver", "core", *options[seed]).status == 0
        made[seed] = out
    return made


def write_delta_nets(place: Path) -> list[Path]:
    """Two Qwen3-Next: of Hugging Face, and the same in Transformer Engine's form, whose output norms are stored minus 1."""
    source = FIXTURES / "hybrid-qwen3-next-tp2" / "hf"
    for number in range(2):
        out = place / f"hf{number}"
        out.mkdir()
        (out / "config.json").write_bytes((source / "config.json").read_bytes())
        generator = torch.Generator().manual_seed(number)
        tensors = {
            name: torch.randint(40, 80, tensor.shape, generator=generator) / 64
            for name, tensor in weights(source).items()
        }
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        form = ["--saver", "core", "--transformer-impl", "transformer_engine"]
        assert run("convert", out, place / f"core{number}", *form).status == 0
    return [place / "hf0", place / "hf1", place / "core0", place / "core1"]
