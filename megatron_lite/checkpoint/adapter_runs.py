"""Checkpoints of runs that train adapters: the files that peft loads, and the state that the run needs to continue.

iter_0000100/adapter_config.json, adapter_model.safetensors      peft's files; the weights are the optimizer's float32 masters
iter_0000100/optimizer.safetensors                               `exp_avg.<name>` …, whole matrices, one per expert
iter_0000100/trainer_state.json                                  progress, precision, objective, the base model and samples of its weights
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from formats import rank_files, safetensors
from formats.ceilings import CONFIG_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_json
from formats.tensor import LazyTensor
from megaconv.errors import UsageError
from megaconv.hub import resolve
from megaconv.local_paths import local_path
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Key
from megatron_lite.checkpoint.adapters import gather_adapters, init_adapters, load_adapters
from megatron_lite.checkpoint.base_samples import check_same_base, samples_of
from megatron_lite.checkpoint.peft import ReadAdapter, adapter_files, read_adapter
from megatron_lite.checkpoint.restore import load_state
from megatron_lite.checkpoint.same_run import STATE, check_same_objective, check_same_start
from megatron_lite.checkpoint.saver import has_checkpoint
from megatron_lite.checkpoint.snapshot import Snapshot
from megatron_lite.checkpoint.state import Progress
from megatron_lite.checkpoint.tensor_file import TensorFile
from megatron_lite.engine import Engine
from megatron_lite.models.lora.whole import beside_layers
from megatron_lite.settings.config import Settings
from megatron_lite.settings.options import LoRA
from megatron_lite.settings.run_options import adapter_options

OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True)
class AdapterStart:
    """The adapters that a run starts from. The base model is loaded separately."""

    options: LoRA
    tensors: Mapping[Key, LazyTensor] | None
    """Adapter weights and optimizer state by key; None: new adapters are initialized."""
    progress: Progress = Progress()  # noqa: RUF009  # frozen
    place: Path | None = None
    base: str | None = None
    """The base that an adapter of --lora-load names, if it is another one than --load."""
    dtype: str | None = None
    """The compute dtype of the continued run, or None if its state does not record one."""
    base_samples: Mapping[str, str] = field(default_factory=dict)
    """Samples of the base's weights (base_samples.py)."""


def find_adapters(
    settings: Settings, config: ModelConfig, base: Mapping[str, LazyTensor]
) -> AdapterStart | None:
    """Return the adapters to start from, or None for a run that trains all weights. Raises CheckpointError.

    base: the base's weights by canonical name.
    """
    found = _find(settings, config, base)
    return None if found is None else replace(found, base_samples=samples_of(base))


def _find(
    settings: Settings, config: ModelConfig, base: Mapping[str, LazyTensor]
) -> AdapterStart | None:
    """Return the adapters without samples of their base."""
    lora = settings.lora
    if not lora.wanted:
        adapter_options(settings)  # refuses flags of adapters
        return None
    saving = settings.checkpointing
    if _continues(settings):
        assert saving.save is not None
        version = rank_files.find_version(Path(saving.save))
        assert version is not None
        return _continued(settings, version, config, base)
    if lora.lora_load is None:
        options = adapter_options(settings)
        assert options is not None
        return AdapterStart(beside_layers(options, lora, config), None)
    place = local_path(resolve(lora.lora_load))
    read = _read(settings, place, config)
    weights = {Key(name): tensor for name, tensor in read.tensors.items()}
    is_another = read.is_of_another(str(saving.load), config)
    return AdapterStart(read.options, weights, place=place, base=read.base if is_another else None)


def reads_adapters(settings: Settings) -> bool:
    """Return whether the run starts from adapters in files: it continues, or --lora-load names them."""
    lora = settings.lora
    return lora.lora_load is not None or (lora.wanted and _continues(settings))


def _continues(settings: Settings) -> bool:
    saving = settings.checkpointing
    return bool(saving.save and saving.resume and has_checkpoint(Path(saving.save)))


def _read(settings: Settings, place: Path, config: ModelConfig) -> ReadAdapter:
    """Read the adapter at `place` and apply the flags. Raises UsageError for a flag that contradicts the adapter."""
    found, lora = read_adapter(place, config), settings.lora
    stated = {
        "lora_rank": found.options.rank,
        "lora_alpha": found.options.alpha,
        "lora_rslora": found.options.rslora,
        "lora_dora": found.options.dora,
    }
    asked = beside_layers(found.options, lora, config)
    for name, given, own in (
        ("lora_modules_to_save", asked.whole, found.options.whole),
        ("lora_trainable_token_indices", asked.rows, found.options.rows),
    ):
        if name in settings.given and given != own:
            words = " ".join(getattr(lora, name))
            raise UsageError(
                f"--{name.replace('_', '-')} {words} contradicts the adapter {place}, which has others; leave the flag out"
            )
    for name, value in stated.items():
        asked_value = getattr(lora, name)
        if name in settings.given and asked_value != value:
            word = "" if asked_value is True else f" {asked_value}"
            has = "was trained without it" if value is False else f"has {value}"
            raise UsageError(
                f"--{name.replace('_', '-')}{word} contradicts the adapter {place}, which {has}; leave the flag out"
            )
    return replace(found, options=replace(found.options, dropout=lora.lora_dropout))


def _continued(
    settings: Settings, version: Path, config: ModelConfig, weights: Mapping[str, LazyTensor]
) -> AdapterStart:
    """Return the adapters of a run that goes on. weights: of its base."""
    if not (version / STATE).is_file():
        raise UsageError(
            f"--resume: {version} is not a checkpoint of adapters; leave --lora-rank out to continue its run"
        )
    state = read_json(version / STATE, CONFIG_BYTES)
    try:
        progress, base = Progress(**state["progress"]), str(state["base"])
        dtype = None if state.get("dtype") is None else str(state["dtype"])
        before = dict(state.get("objective", {}))
        samples = dict(state.get("base_samples", {}))
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{version / STATE}: is not the state of a run ({error})"
        ) from error
    saved = str(version.parent)
    check_same_start(settings, saved, base)
    check_same_objective(settings, saved, before)
    check_same_base(weights, samples, version, str(settings.checkpointing.load))
    read = _read(settings, version, config)
    tensors: dict[Key, LazyTensor] = {Key(name): tensor for name, tensor in read.tensors.items()}
    if (version / OPTIMIZER).is_file() and not settings.checkpointing.no_load_optim:
        for stored, tensor in safetensors.read(version / OPTIMIZER).items():
            slot, _, name = stored.partition(".")
            tensors[Key(name, slot)] = tensor
    else:
        progress = Progress(**{**asdict(progress), "engine": None})
    return AdapterStart(read.options, tensors, progress, version, dtype=dtype)


def start_adapters(
    engine: Engine, start: AdapterStart, seed: int, base: Mapping[str, LazyTensor]
) -> None:
    """Load or initialize the adapters of an engine. Collective. Raises TensorMismatch.

    base: the base's weights by canonical name.
    """
    if start.tensors is None:
        init_adapters(engine, seed, base)
        return
    load_adapters(engine, start.tensors)
    if start.progress.engine is not None:
        load_state(engine, start.progress.engine, start.dtype)


def adapter_snapshot(
    engine: Engine,
    progress: Progress,
    base: str,
    objective: Mapping[str, Any],
    base_samples: Mapping[str, str],
    *,
    with_optimizer: bool,
) -> Snapshot:
    """Return the snapshot of a run's adapters: the whole model on rank 0, empty on other ranks. Collective.

    objective: see stated_objective. base_samples: of the base's weights.
    """
    options = engine.options.lora
    assert options is not None
    found = gather_adapters(engine)
    if not found:
        return Snapshot(progress.iteration, {})
    weights: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    for key, tensor in found.items():
        if key.slot == WEIGHT:
            weights[key.name] = tensor
        else:
            optimizer[f"{key.slot}.{key.name}"] = tensor
    files = adapter_files(weights, engine.config, options, base)
    state: dict[str, Any] = {
        "base": base,
        "base_samples": dict(base_samples),
        "objective": dict(objective),
        "dtype": engine.options.dtype,
        "progress": asdict(progress),
    }
    text = json.dumps(state, indent=2) + "\n"
    files[STATE] = text.encode()
    if with_optimizer:
        files[OPTIMIZER] = TensorFile(optimizer)
    return Snapshot(progress.iteration, {}, files=files)
