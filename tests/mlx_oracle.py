"""What mlx-lm writes for a model of each family that megaconv writes for MLX, recorded in fixtures/mlx/families.json.

    python -m tests.mlx_oracle     records the digests again; it needs mlx, mlx-lm, and megaconv

mlx runs on Linux too: `pip install mlx[cpu] mlx-lm`.
"""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np

from formats import safetensors
from formats.tensor import read_tensor
from megaconv.families import read_config
from megaconv.model.fields import changed
from megaconv.model.naming import HF, HF_STACKED
from megaconv.model.natives import unsharded_tensors

RECORD = Path(__file__).parent / "fixtures" / "mlx" / "families.json"
STACKED = ("qwen3_5_moe",)
"""Families whose experts mlx-lm expects in one tensor."""


def cases() -> dict[str, dict[str, Any]]:
    """Name -> `config`, a model's config.json, and `digest`, of the weights that mlx-lm makes of its source."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return found


def write_source(path: Path, config: dict[str, Any], mtp: int = 0) -> Path:
    """Write a Hugging Face directory in bfloat16. Its values follow from the names of its tensors alone.

    mtp: layers for predicting further tokens, which mlx-lm doesn't have.
    """
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    is_inside = "text_config" in config
    family, described = read_config(path / "config.json", text_only=is_inside)
    described = changed(described, {"mtp_layers": mtp})
    naming = HF_STACKED if family.name in STACKED else HF
    names = {
        native.name: native.shape
        for native in unsharded_tensors(family.rows, described, naming)
        if native.copy is None
    }
    if is_inside:
        names = {_in_whole_model(name, family.name): shape for name, shape in names.items()}
    layout = safetensors.SafetensorsLayout(
        {name: (shape, "bfloat16") for name, shape in names.items()}
    )
    content = bytearray(layout.size)
    for offset, header in layout.headers({}):
        content[offset : offset + len(header)] = header
    for name, shape in names.items():
        record = layout.records[name]
        content[record.offset : record.offset + record.nbytes] = _values(name, shape)
    (path / "model.safetensors").write_bytes(content)
    return path


def _in_whole_model(name: str, family: str) -> str:
    """The name of a language model's tensor in the files of the multimodal model around it."""
    if family == "llama4":
        return f"language_model.{name}"
    return name.replace("model.", "model.language_model.", 1)


def _values(name: str, shape: tuple[int, ...]) -> bytes:
    """Numbers from -0.5 to 0.5 in bfloat16."""
    counted = np.arange(np.prod(shape), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(
        crc32(name.encode())
    )
    numbers = (counted >> np.uint64(9) & np.uint64(1023)).astype(np.float32) / 1024 - 0.5
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


def digest(directory: Path) -> str:
    """A digest of all weights: their names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    tensors = {
        name: tensor
        for file in directory.glob("model*.safetensors")
        for name, tensor in safetensors.read(file).items()
    }
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(read_tensor(tensor).tobytes())
    return found.hexdigest()


def made_by_mlx(source: Path, target: Path) -> str:
    """The digest of what mlx-lm makes of a model."""
    from mlx_lm.utils import load_model, save_model

    model, _ = load_model(source, lazy=True)
    save_model(target, model)
    return digest(target)


def main() -> None:
    recorded = cases()
    for name, case in recorded.items():
        with TemporaryDirectory() as directory:
            source = write_source(Path(directory) / "source", case["config"])
            case["digest"] = made_by_mlx(source, Path(directory) / "mlx")
            print(name, case["digest"])
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
