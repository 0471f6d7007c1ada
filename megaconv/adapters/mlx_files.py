"""An adapter as mlx-lm saves it: adapter_config.json beside adapters.safetensors.

    <module>.lora_a [in, r], <module>.lora_b [r, out]     the module's output gets scale * (x lora_a) lora_b
    <module>.m [out]                                      the magnitude, of DoRA

    {"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": [...]}, "model": ...}

Both matrices are the transposes of peft's, and the scale is peft's alpha / rank. Source: mlx-lm 0.32, tuner/lora.py and
tuner/dora.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats import safetensors
from formats.tensor import LazyTensor
from megaconv.adapters.derived import Transposed
from megaconv.adapters.peft_files import CONFIG, Adapter, AdapterConfig, ModuleAdapter
from megaconv.errors import CorruptCheckpoint, TensorMismatch, UnsupportedInput

SETTINGS = "lora_parameters"
WEIGHTS = "adapters.safetensors"
_KINDS = ("lora", "dora")
_PARTS = {"lora_a": "a", "lora_b": "b", "m": "magnitude"}
_INSIDE = "language_model."
"""The beginning of names of a language model that mlx-lm took out of a multimodal model."""
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embeddings")


def open_mlx_adapter(directory: Path, config: AdapterConfig) -> Adapter:
    """Open an adapter. Raises CheckpointError if it isn't complete, or has tensors that can't be merged."""
    weights = directory / WEIGHTS
    if not weights.is_file():
        raise CorruptCheckpoint(
            f"{directory}: has the {CONFIG} of mlx-lm, and no {WEIGHTS}; copy it too",
            code="missing-file",
        )
    modules = tuple(_modules(safetensors.read(weights), str(weights)))
    _require_rank(modules, config.rank, str(weights))
    return Adapter(directory, config, modules, replaced={}, weights=weights)


def mlx_config(raw: Mapping[str, Any], where: Path) -> AdapterConfig:
    """The settings of an adapter_config.json.

    Raises CorruptCheckpoint for a value of the wrong type, UnsupportedInput for another kind of training.
    """
    kind = raw.get("fine_tune_type", "lora")
    if kind not in _KINDS:
        raise UnsupportedInput(
            f"{where}: fine_tune_type {kind!r:.40}; only {' and '.join(_KINDS)} are adapters. mlx_lm.fuse makes a model of it"
        )
    given = raw.get(SETTINGS)
    if not isinstance(given, Mapping):
        raise CorruptCheckpoint(f"{where}: {SETTINGS} should be an object, found {given!r:.40}")
    rank, scale, dropout = given.get("rank"), given.get("scale"), given.get("dropout", 0.0)
    if type(rank) is not int or not 0 < rank < 1 << 31:
        raise CorruptCheckpoint(
            f"{where}: {SETTINGS}.rank should be a positive number, found {rank!r:.40}"
        )
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < 1 << 31:
        raise CorruptCheckpoint(
            f"{where}: {SETTINGS}.scale should be a positive number, found {scale!r:.40}"
        )
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise CorruptCheckpoint(
            f"{where}: {SETTINGS}.dropout should be a number from 0 to 1, found {dropout!r:.40}"
        )
    base = raw.get("model")
    return AdapterConfig(
        rank=rank,
        alpha=scale * rank,
        dora=kind == "dora",
        keeps_tie=True,  # LoRAEmbedding.as_linear of mlx-lm adds the change to a tied head too
        base=base if isinstance(base, str) else "",
        dropout=float(dropout),
    )


def _modules(tensors: Mapping[str, LazyTensor], where: str) -> "list[ModuleAdapter]":
    """The adapters of modules, with matrices as peft has them."""
    parts: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        module, _, last = name.removeprefix(_INSIDE).rpartition(".")
        if last not in _PARTS or not module:
            raise UnsupportedInput(
                f"{where}: {name} is a kind of adapter tensor that is not supported"
            )
        held = parts.setdefault(module, {})
        if _PARTS[last] in held:
            raise TensorMismatch(
                f"{where}: holds {last} of {module} with {_INSIDE} before its name, and without; remove the wrong ones"
            )
        dimensions = 1 if last == "m" else 2
        if len(tensor.shape) == 3:
            raise UnsupportedInput(
                f"{where}: {name} adapts all experts of a layer at once, which isn't supported; mlx_lm.fuse merges it"
            )
        if len(tensor.shape) != dimensions:
            raise TensorMismatch(
                f"{where}: {name} is {list(tensor.shape)}, expected {dimensions} dimensions",
                code="misshapen-tensor",
            )
        held[_PARTS[last]] = tensor if last == "m" else Transposed(tensor)
    for module, held in parts.items():
        if not {"a", "b"} <= held.keys():
            raise TensorMismatch(
                f"{where}: {module} has only one of its two matrices", code="missing-tensor"
            )
    return [
        ModuleAdapter(module, **held, embedding=module.endswith(_EMBEDDINGS))
        for module, held in parts.items()
    ]


def _require_rank(modules: tuple[ModuleAdapter, ...], rank: int, where: str) -> None:
    """Raise TensorMismatch for matrices of another rank than the configuration says."""
    for module in modules:
        found = module.a.shape[0], module.b.shape[1]
        if found != (rank, rank):
            raise TensorMismatch(
                f"{where}: {module.module} has matrices of rank {found[0]} and {found[1]}; its configuration says {rank}",
                code="misshapen-tensor",
            )
